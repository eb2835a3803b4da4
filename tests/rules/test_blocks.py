"""Jobs of blocks under the rules: they change without a requeue, within the limits that hold for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ones_db import JobHistory, MembershipRecord, ResizeRecord
from ones_db.reasons import reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import Membership, Spec
from ones_wrapper.protocol.optin import parse_comment
from slurm_ones.act.actor import commands
from slurm_ones.config import LimitSettings, ResizeSettings, Settings
from slurm_ones.jobs.elastic import Elastic, Observation, whole_job
from slurm_ones.learn.learner import JOIN_S, TERM_S, Learner
from slurm_ones.policy.contract import Allocation, JobView, Schedule
from slurm_ones.rules.blocks import BLOCKS, Moves, ever_held_by_us, held_by_others, held_by_us, spare
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.gate import PartitionRules, Round, under_way
from slurm_ones.rules.growth import with_growth
from slurm_ones.rules.job_rules import PACK_S, switch_dwell_s, switch_near_end_s
from slurm_ones.rules.plan import ResizePlan, plan
from slurm_ones.rules.views import cluster_view, job_models, job_views
from slurm_ones.slurm.model import JobState, Node, Partition, SlurmJob, Snapshot
from slurm_ones.testing.rounds import job as view
from tests.act.make import FULL, NOW, elastic, history, with_guests

HOT = Spec(32, 512, 64, 1000, 10, hot=True)


def task(number: int, shape: Shape, *nodes: str, array: int = 1, **changes: Any) -> SlurmJob:
    """A block that runs on these nodes, or waits in a hold where there are none."""
    one = elastic(array * 100 + number, shape, *nodes).job.first
    held = {} if nodes else {"held": True, "reason": "JobHeldUser"}
    return replace(one, array=True, array_id=array, array_tasks=(number,), **{**held, **changes})


def job_of_blocks(*tasks: SlurmJob, array: int = 1) -> Elastic:
    return replace(elastic(array, Shape(1, 1)), job=whole_job(array, tasks))


def told(job_id: int = 1, *members: int, **changes: Any) -> JobHistory:
    report = Membership(1, members or (0,), (0,) * max(len(members), 1), 1, 1, 1, 0, 32, 0.2, why="first")
    known = {"spec": HOT, "membership": MembershipRecord(job_id, 0, 1, 1.0, report)}
    return history(job_id, **(known | changes))


def rules_for(
    jobs: Sequence[Elastic],
    free: dict[str, int],
    histories: dict[int, JobHistory] | None = None,
    *,
    resizes: Sequence[ResizeRecord] = (),
    others: Sequence[SlurmJob] = (),
    drained: Sequence[str] = (),
    site: dict[str, Any] | None = None,
    caps: Sequence[Cap] = (),
    ours: Sequence[int] = tuple(range(1, 8)),
    guests: str = "",
    split_nodes: bool = True,
    **settings: Any,
) -> tuple[Round, PartitionRules]:
    by_id = {one.job.job_id: one for one in jobs}
    used = {name: sum(one.holdings.get(name, 0) for one in jobs) for name in free}
    nodes = {}
    for name, gpus in free.items():
        state, usable = ("IDLE+DRAIN", False) if name in drained else ("", True)
        nodes[name] = Node(name, state, usable, FULL, FULL - gpus, ("gpu",), gpus == FULL)
    assert all(used[name] + free[name] <= FULL for name in free)
    queue = {block.job_id: block for one in jobs for block in one.job.blocks} | {job.job_id: job for job in others}
    seen = Observation(Snapshot(NOW, queue, nodes, {"gpu": Partition("gpu", True, tuple(free), 0.0, 0, False)}), by_id)
    of_guests = {"guests": {"gpu": {"qos": guests}}} if guests else {}
    whole = Settings.model_validate({"resize": settings, "limits": site or {}, **of_guests})
    seen = replace(seen, elastic=with_guests(by_id, whole))
    known = histories or {id_: told(id_) for id_ in by_id}
    held = {id_: frozenset(ours) for id_ in by_id}
    round_ = with_growth(Round(seen, known, whole, under_way(resizes), NOW, held=held, split_nodes=split_nodes))
    rules = round_.partition("gpu")
    return round_, replace(rules, caps=(*rules.caps, *caps))


def planned(
    wanted: dict[int, Shape], jobs: Sequence[Elastic], free: dict[str, int], *a: Any, **other: Any
) -> ResizePlan:
    parked = frozenset(id_ for id_, shape in wanted.items() if shape == PARKED)
    given = {id_: Allocation(shape, 32) for id_, shape in wanted.items() if id_ not in parked}
    return plan(Schedule(given, parked=parked), rules_for(jobs, free, *a, **other)[1])


def waiting(count: int = 3, array: int = 1) -> list[SlurmJob]:
    return [task(number, Shape(1, 1), array=array) for number in range(1, 1 + count)]


def change_of(job_id: int, old: Shape, new: Shape, state: str, **changes: Any) -> ResizeRecord:
    """A resize under way: by blocks, but as `changes` say."""
    return ResizeRecord(job_id, 0, old, 32, new, 32, state, NOW, **({"mechanism": BLOCKS, "id": job_id} | changes))


def shown(one: Elastic, free: dict[str, int]) -> JobView:
    round_, rules = rules_for([one], free)
    (found,) = job_views(round_, rules, cluster_view(round_, rules), job_models(round_, Learner(seed=0)))
    return found


def begun(made: ResizePlan) -> list[int]:
    return [change.job_id for change in made.begin]


SMALL = job_of_blocks(task(0, Shape(1, 1), "n1"), *waiting())
TWO = job_of_blocks(task(0, Shape(1, 1), "n1"), task(1, Shape(1, 2), "n1"), task(2, Shape(1, 1)))


def test_growth_needs_the_difference_alone() -> None:
    """Its own GPUs stay where they are, and those of the new blocks have to be free."""
    (change,) = planned({1: Shape(1, 4)}, [SMALL], {"n1": 3}).begin
    assert change.moves == Moves(((1, Shape(1, 2)), (2, Shape(1, 1)))) and change.blocks == (0, 1, 2)
    none = planned({1: Shape(1, 4)}, [SMALL], {"n1": 2})
    assert none.begin == () and none.outcomes[1].code == "no_moves"


def test_free_gpus_in_pieces_are_better_than_none() -> None:
    """Protects GPUs from idling beside a job that is to have them, whose tasks cannot make up the number: it grows as
    far as they can, to what its owner allows."""
    one = job_of_blocks(task(0, Shape(1, 1), "n1"), task(1, Shape(1, 1)))
    free = {"n1": 0, "n2": 1, "n3": 4}
    (change,) = planned({1: Shape(2, 3)}, [one], free).begin
    assert change.moves == Moves(((1, Shape(1, 4)),)) and change.new.gpus == 5
    stepped = replace(one, optin=parse_comment("ones: gpus=1-7:3 array=blocks"))
    assert planned({1: Shape(1, 4)}, [stepped], {"n1": 0, "n2": 2, "n3": 1}).begin == ()


def test_free_gpus_are_given_to_one_job_only() -> None:
    """Blocks that are about to join take what is free."""
    other = job_of_blocks(task(0, Shape(1, 1), "n1", array=2), *waiting(2, array=2), array=2)
    made = planned({1: Shape(1, 2), 2: Shape(1, 2)}, [SMALL, other], {"n1": 1, "n2": 0})
    assert begun(made) == [1] and made.outcomes[2].code == "no_moves"
    joins = change_of(2, Shape(1, 1), Shape(1, 2), "joining", added=((1, Shape(1, 1)),))
    assert planned({1: Shape(1, 2)}, [SMALL, other], {"n1": 1}, resizes=[joins]).begin == ()


def at_two() -> Elastic:
    """A job of blocks of two GPUs that waits for room."""
    queued = {"held": False, "reason": "Resources"}
    return job_of_blocks(*(task(n, Shape(1, 2), array=2, **queued) for n in range(2)), array=2)


def test_a_job_waits_at_its_shape_until_there_is_room_for_another() -> None:
    """Its shape would change for nothing, and once more. What blocks are about to give up is room, but on nodes that
    take no more jobs."""
    waits = at_two()
    without = planned({1: Shape(1, 3), 2: Shape(1, 4)}, [TWO, waits], {"n1": 1, "n2": 3})
    assert without.outcomes[2].code == "gpus_not_free" and 2 not in begun(without)
    shrinks = planned({1: Shape(1, 1), 2: Shape(1, 3)}, [TWO, waits], {"n1": 1, "n2": 0})
    assert begun(shrinks) == [1, 2]
    drains = planned({1: Shape(1, 1), 2: Shape(1, 1)}, [TWO, waits], {"n1": 1, "n2": 0}, drained=("n1",))
    assert begun(drains) == [1] and drains.outcomes[2].code == "gpus_not_free"


def test_who_waits_without_being_given_anything_asks_for_its_smallest_size() -> None:
    """Protects a full cluster from standing still: what one block began with it can give up only where others are free,
    so who starts with all that its user asked for keeps others out."""
    waits, full = at_two(), {"n1": 0, "n2": 0}
    (change,) = planned({}, [waits], full).begin
    assert (change.job_id, change.new, change.moves) == (2, Shape(1, 1), None)
    assert planned({}, [waits], full).outcomes[2].code == "waits_small"
    room = planned({}, [waits], {"n1": 2, "n2": 0})
    assert room.begin == () and 2 not in room.outcomes, "it starts as it is"
    given = planned({2: Shape(1, 2)}, [waits], full)
    assert given.begin == (), "what the policy gives it comes first"
    resize = change_of(2, Shape(1, 2), Shape(1, 1), "waiting", mechanism="requeue")
    assert planned({}, [waits], full, resizes=[resize]).begin == ()
    assert planned({2: PARKED}, [waits], full).begin == ()
    rigid = replace(elastic(50, Shape(1, 4)).job.first, reason="Resources", comment="")
    assert planned({}, [waits], full, others=[rigid]).begin == (), "what gets free is the rigid job's"


def test_what_a_waiting_job_is_about_to_get_joins_nobody_else() -> None:
    """One GPU is free beside the two that a job gives up, and a third job could have it: the waiting job needs it."""
    other = job_of_blocks(task(0, Shape(1, 1), "n2", array=3), *waiting(2, array=3), array=3)
    free = {"n1": 1, "n2": 0}
    assert planned({1: Shape(1, 1), 3: Shape(1, 2)}, [TWO, other], free).outcomes[3].code == "begins"
    wanted = {1: Shape(1, 1), 2: Shape(1, 3), 3: Shape(1, 2)}
    made = planned(wanted, [TWO, at_two(), other], free)
    assert begun(made) == [1, 2] and made.outcomes[3].code == "no_moves"


def test_what_a_job_in_the_queue_is_reshaped_for_joins_nobody_else() -> None:
    """Protects the room of a job that waits at its new shape from the next rounds, in which blocks leave for it."""
    leaving = job_of_blocks(task(0, Shape(1, 1), "n1"), task(1, Shape(1, 2), "n1"))
    other = job_of_blocks(task(0, Shape(1, 1), "n2", array=3), task(1, Shape(1, 1), array=3), array=3)
    shrinks = change_of(1, Shape(1, 3), Shape(1, 1), "ordering", dropped=(1,))
    waits = change_of(2, Shape(1, 2), Shape(1, 3), "waiting", mechanism="requeue")
    jobs, free = [leaving, at_two(), other], {"n1": 1, "n2": 0}
    assert planned({3: Shape(1, 2)}, jobs, free, resizes=[shrinks]).outcomes[3].code == "begins"
    assert planned({3: Shape(1, 2)}, jobs, free, resizes=[shrinks, waits]).outcomes[3].code == "no_moves"


def test_equal_gpus_are_no_change_of_size() -> None:
    """However they are spread."""
    spread = job_of_blocks(task(0, Shape(1, 2), "n1"), task(1, Shape(1, 2), "n2"))
    made = planned({1: Shape(1, 4)}, [spread], {"n1": 2, "n2": 2, "n3": 4})
    assert made.begin == () and made.outcomes == {}
    batch = plan(Schedule({1: Allocation(Shape(1, 4), 64)}), rules_for([spread], {"n1": 2, "n2": 2})[1])
    (change,) = batch.begin
    assert not change.resizes and change.blocks == (0,)


SPREAD = job_of_blocks(task(0, Shape(1, 2), "n1"), task(1, Shape(1, 2), "n2"), task(2, Shape(1, 1)))


def test_who_keeps_its_gpus_moves_to_fewer_nodes_once_it_has_settled() -> None:
    """Its exchange stays on a node then; not in the minutes after its last change, nor for others' room."""
    room = {"n1": 0, "n2": 0, "n3": 4}
    made = planned({1: Shape(1, 4)}, [SPREAD], room)
    assert made.begin[0].moves == Moves(((2, Shape(1, 4)),), (0, 1)) and made.outcomes[1].code == "blocks_packed"
    young = told(1, 0, 1, last_resize_end=NOW - PACK_S + 1)
    assert planned({1: Shape(1, 4)}, [SPREAD], room, {1: young}).begin == ()
    # Moves that ended on as many nodes double the time.
    for ago, moves in ((4 * PACK_S - 1, 0), (4 * PACK_S + 1, 1)):
        vain = told(1, 0, 1, last_resize_end=NOW - ago, changes_without_effect=2)
        assert len(planned({1: Shape(1, 4)}, [SPREAD], room, {1: vain}).begin) == moves
    both = planned({1: Shape(1, 4), 2: Shape(1, 4)}, [SPREAD, at_two()], room)
    assert begun(both) == [2] and 1 not in both.outcomes
    # A batch changes before that.
    batch = plan(Schedule({1: Allocation(Shape(1, 4), 64)}), rules_for([SPREAD], room)[1])
    assert [change.resizes for change in batch.begin] == [False]


def test_views_say_on_how_many_nodes_a_job_is_at_each_size() -> None:
    """Protects from a circle: a size that is worth having on one node, and is left again once it is on two."""

    def nodes_at(free: dict[str, int]) -> dict[int, int]:
        seen = shown(SPREAD, free)
        assert seen.nodes_at is not None and seen.held_nodes == 2
        return dict(seen.nodes_at)

    full = nodes_at({"n1": 0, "n2": 0, "n3": 0, "n4": 0})
    assert (full[2], full[4]) == (1, 2)
    assert (full[8], full[12], full[16]) == (3, 4, 5)
    # New blocks would take the place of both.
    room = nodes_at({"n1": 0, "n2": 0, "n3": 4, "n4": 4})
    assert (room[4], room[8], room[12]) == (2, 2, 4)


def test_a_shrink_drops_blocks_at_once() -> None:
    (change,) = planned({1: Shape(1, 1)}, [TWO], {"n1": 1}).begin
    assert change.moves == Moves((), (1,)) and change.blocks == (0,) and change.new == Shape(1, 1)


def test_it_is_never_stopped() -> None:
    """Another of its tasks would take it up; a requeue of a running one is never asked for."""
    made = planned({1: PARKED}, [TWO], {"n1": 1})
    assert made.begin == () and made.outcomes[1].code == "blocks_not_parked"


def test_one_that_waits_changes_as_a_waiting_job() -> None:
    first = task(0, Shape(1, 1), held=False, reason="Resources", state=JobState.PENDING)
    waits = job_of_blocks(first, task(1, Shape(1, 1)))
    (change,) = planned({1: Shape(1, 2)}, [waits], {"n1": 4}).begin
    assert change.moves is None and change.resizes and str(change.elastic.job.key) == "1_0"


def test_training_whose_changes_begin_a_term_grows_like_others() -> None:
    (change,) = planned({1: Shape(1, 2)}, [SMALL], {"n1": 3}, {1: told(spec=replace(HOT, hot=False))}).begin
    assert change.moves is not None and change.moves.gained == 1


def test_dwell_follows_from_what_a_change_costs() -> None:
    """A few seconds where it is nearly free, and never more than the site says."""
    settings = ResizeSettings(dwell_s=300)
    assert switch_dwell_s(0.1, settings) == 2.0
    assert switch_dwell_s(0.1, ResizeSettings(blocks_dwell_s=5)) == 5.0
    assert switch_dwell_s(1.5, settings) == 30.0
    assert switch_dwell_s(100.0, settings) == settings.dwell_s
    assert switch_dwell_s(50.0, ResizeSettings()) == 1000.0
    near = view(1, {"n1": 1}, resize_s=0.2, prepare_s=6.0)
    assert switch_near_end_s(near, settings, LimitSettings()) == 6.2, "no longer than others take to join"
    assert switch_near_end_s(near, settings, LimitSettings(near_end_s=3)) == 3.0
    assert switch_near_end_s(replace(near, prepare_s=1e6), settings, LimitSettings()) == settings.blocks_wait_s
    rested = told(last_resize_end=NOW - 11)
    assert planned({1: Shape(1, 2)}, [SMALL], {"n1": 3}, {1: rested}).begin
    young = {1: replace(rested, last_resize_end=NOW - 1)}
    again = planned({1: Shape(1, 2)}, [SMALL], {"n1": 3}, young, blocks_dwell_s=5)
    assert again.outcomes[1].code == "dwell_time"


def test_the_first_change_that_begins_a_term_is_as_dear_as_such_changes_are() -> None:
    """It has seen none of its own, and is not taken for one from memory to memory."""
    anew, learner = told(spec=replace(HOT, hot=False)), Learner()
    assert [learner.switch_s(one) for one in (anew, told(), None)] == [TERM_S, JOIN_S, JOIN_S]
    # Once it has had one, that counts, whether blocks joined or left; before, what those of jobs like it cost.
    assert learner.switch_s(replace(anew, switch_s=1.0)) == 1.0
    learner.finished([told(2, spec=HOT, switch_s=0.03, join_s=0.04)])
    assert [learner.switch_s(one) for one in (anew, told(), None)] == [TERM_S, 0.04, 0.04]


def test_changes_of_blocks_do_not_wait_for_requeues() -> None:
    """Each kind is counted by itself."""
    requeue = change_of(9, Shape(1, 1), Shape(1, 2), "draining", mechanism="requeue")
    jobs = [SMALL]
    assert planned({1: Shape(1, 2)}, jobs, {"n1": 3}, resizes=[requeue], max_open=1).begin
    change = change_of(9, Shape(1, 1), Shape(1, 2), "joining")
    full = planned({1: Shape(1, 2)}, jobs, {"n1": 3}, resizes=[change], max_open_blocks=1)
    assert full.outcomes[1].code == "max_open"


def test_caps_count_blocks_that_are_about_to_run() -> None:
    """Those that join count beside those whose place they take."""
    cap = Cap(4, frozenset({1}), reason("user_cap", user="alice", gpus=4, setting="limits.gpus_per_user"))
    whole = job_of_blocks(task(0, Shape(1, 3), "n1"), *waiting())
    free = {"n1": 0, "n2": 4}
    assert planned({1: Shape(1, 4)}, [whole], {"n1": 1}, caps=[cap]).begin
    replaced = planned({1: Shape(1, 4)}, [whole], free, caps=[cap], split_nodes=False)
    assert replaced.begin and replaced.begin[0].moves == Moves(((1, Shape(1, 1)),))
    joining = change_of(1, Shape(1, 3), Shape(1, 4), "joining", added=((1, Shape(1, 2)),))
    _, rules = rules_for([whole], {"n1": 1, "n2": 4}, resizes=[joining])
    assert rules.jobs[1].gpus == 5


def test_blocks_on_a_drained_node_are_replaced() -> None:
    """The job outlives its node, at the same size."""
    job = job_of_blocks(task(0, Shape(1, 4), "n1"), *waiting())
    made = planned({1: Shape(1, 4)}, [job], {"n1": 0, "n2": 4}, drained=["n1"])
    (change,) = made.begin
    assert change.moves == Moves(((1, Shape(1, 4)),), (0,)) and made.outcomes[1].code == "blocks_replaced"
    assert planned({1: Shape(1, 4)}, [job], {"n1": 0, "n2": 3}, drained=["n1"]).begin == ()


def test_blocks_near_their_time_limit_are_replaced() -> None:
    """And the limit of one block does not keep the others from changing."""
    late = task(0, Shape(1, 4), "n1", time_limit_s=NOW + 100)
    job = job_of_blocks(late, task(1, Shape(1, 4), "n2"), *[task(2, Shape(1, 1)), task(3, Shape(1, 1))])
    (change,) = planned({1: Shape(2, 4)}, [job], {"n1": 0, "n2": 0, "n3": 4}).begin
    assert change.moves == Moves(((2, Shape(1, 4)),), (0,))
    (smaller,) = planned({1: Shape(1, 4)}, [job], {"n1": 0, "n2": 0}).begin
    assert smaller.moves == Moves((), (0,))


def test_tasks_that_others_hold_are_not_used() -> None:
    """Only those that stand in a hold of ours by our own record, and those that left a short while ago."""
    tasks = [
        task(1, Shape(1, 1)),
        task(2, Shape(1, 1)),
        task(3, Shape(1, 1), admin_held=True),
        task(4, Shape(1, 1), "n1", state=JobState.COMPLETED, end_time=NOW - 10),
        task(5, Shape(1, 1), "n1", state=JobState.COMPLETED, end_time=NOW - 1000),
        task(6, Shape(1, 1), "n1", state=JobState.CANCELLED, end_time=NOW - 10),
        task(7, Shape(1, 1), held=False, reason="Resources"),
        task(8, Shape(1, 1), held=False, reason="JobArrayTaskLimit"),
        task(9, Shape(1, 1), "n1", state=JobState.PREEMPTED, end_time=NOW - 10),
    ]
    job = job_of_blocks(task(0, Shape(1, 1), "n1"), *tasks)
    assert spare(job, {2, 3}, (0, 7, 9), NOW) == (2, 8, 4, 9)


def test_what_is_held_by_us() -> None:
    """By our resizes; not what its owner was seen to hold since."""
    first = change_of(1, Shape(1, 1), Shape(1, 2), "done", held=(0, 1, 2, 3), dropped=(0,))
    held = held_by_others({2})
    second = replace(first, held=(), dropped=(), added=((2, Shape(1, 1)),), outcome=held)
    other = replace(first, mechanism="requeue", held=(7,))
    assert held_by_us([first, second, other]) == {0, 1, 3}
    assert held_by_us([first, replace(second, outcome=held_by_others({2, 3}))]) == {0, 1}
    joined = replace(first, held=(), dropped=(), added=((2, Shape(1, 1)),), let_go=(3,))
    assert held_by_us([first, joined]) == {0, 1} and ever_held_by_us([first, joined]) == {0, 1, 2, 3}
    left = replace(first, held=(2,), dropped=(2,))
    assert held_by_us([first, joined, left]) == {0, 1, 2}, "it trained, and left"
    assert held_by_us([first, joined, replace(left, held=())]) == {0, 1}, "into its owner's hold"
    preempted = replace(joined, preempted=(2,))
    assert held_by_us([first, preempted]) == {0, 1, 2} and held_by_us([first, preempted, joined]) == {0, 1}
    back = replace(first, state="rolled_back", held=(1,))
    assert held_by_us([back]) == {1}, "the block that was to leave trains on"
    assert held_by_us([preempted, replace(back, dropped=(2,))]) == {1, 2}, "a guest that runs in our hold"


def test_a_policy_is_shown_what_a_job_keeps() -> None:
    """At each size that blocks that leave make."""
    view = shown(TWO, {"n1": 1})
    assert view.smaller == {1: {"n1": 1}, 2: {"n1": 2}} and view.shape == Shape(1, 3)


def test_a_policy_is_shown_sizes_that_a_job_can_go_down_to() -> None:
    """One block makes no smaller size: others have to join before it leaves, where that many GPUs are free."""
    one = job_of_blocks(task(0, Shape(1, 4), "n1"), *waiting())
    for free, sizes in (({"n1": 0, "n2": 1}, {1, 4}), ({"n1": 0, "n2": 2}, {1, 2, 4}), ({"n1": 0}, {4})):
        view = shown(one, free)
        assert {n for n in view.limits.gpus if n <= 4} == sizes and view.joins


@pytest.mark.parametrize("back", [False, True])
def test_what_a_change_under_way_heads_for(back: bool) -> None:
    """One that is taken back heads for what the job had, and gives nothing up."""
    change = change_of(1, Shape(1, 1), Shape(1, 3), "leaving", dropped=(1,), back=back)
    round_, _ = rules_for([TWO], {"n1": 1}, resizes=[change])
    found = round_.under_way[1]
    assert found.target == (Shape(1, 1) if back else Shape(1, 3))
    assert found.moves == Moves((), () if back else (1,))


def test_the_commands_of_a_change_by_hand() -> None:
    """In the order in which a companion would give them: holds, throttle, shapes, order, releases."""
    first = job_of_blocks(
        task(0, Shape(1, 1), "n1", throttle=1), task(1, Shape(1, 1), held=False, throttle=1, reason="JobArrayTaskLimit")
    )
    (change,) = planned({1: Shape(1, 2)}, [first], {"n1": 3}, ours=()).begin
    blocks = (replace(block, kind="a100") for block in change.elastic.job.blocks)
    typed = replace(change, elastic=job_of_blocks(*blocks), old_kind="a100", new_kind="a100")
    assert commands(typed, 7, None, 900.0)[2].endswith(" Gres=gpu:a100:1")
    assert commands(replace(typed, new_kind=""), 7, None, 900.0)[2].endswith(" Gres=gpu:1"), "none is asked for"
    lines = commands(change, 7, None, 900.0)
    assert lines[:3] == [
        "scontrol uhold 1_1",
        "scontrol update JobId=1 ArrayTaskThrottle=0",
        "scontrol update JobId=1_1 NumNodes=1-1 NumCPUs=1 Gres=gpu:1",
    ]
    assert '"blocks": [0, 1]' in lines[3] and lines[4] == "scontrol release 1_1"
    (shrink,) = planned({1: Shape(1, 1)}, [TWO], {"n1": 1}).begin
    lines = commands(shrink, 8, None, 900.0)
    assert '"blocks": [0]' in lines[0] and lines[-1] == "scontrol requeuehold 1_1"


def _ending(number: int, left_s: float, shape: Shape = Shape(1, 1), **changes: Any) -> SlurmJob:
    return task(number, shape, "n1", start_time=NOW - 1000.0, time_limit_s=1000.0 + left_s, **changes)


GUEST = {"qos": "guest"}


@pytest.mark.parametrize(
    ("running", "free", "moved"),
    [
        ((_ending(0, 900.0), _ending(1, 900.0, **GUEST)), 0, None),
        ((_ending(0, 200.0), _ending(1, 900.0, **GUEST)), 0, Moves(((2, Shape(1, 1)),), (0,))),
        ((_ending(0, 200.0), _ending(1, 900.0, **GUEST)), 1, Moves(((2, Shape(1, 1)),), (0,))),
        ((_ending(0, 900.0), _ending(1, 200.0, **GUEST)), 0, None),
        ((_ending(0, 900.0), _ending(1, 200.0, **GUEST)), 1, Moves(((2, Shape(1, 1)),), (1,))),
        ((_ending(0, 200.0), _ending(1, 100.0, Shape(1, 2))), 0, Moves(((2, Shape(1, 2)), (3, Shape(1, 1))), (0, 1))),
        ((_ending(0, 900.0, Shape(1, 2), **GUEST), _ending(1, 900.0, **GUEST)), 0, Moves(((2, Shape(1, 1)),), (1,))),
        ((_ending(0, 900.0, Shape(1, 2), **GUEST),), 0, Moves(((2, Shape(1, 1)),), (0,))),
        ((_ending(0, 900.0, **GUEST), task(4, Shape(1, 1), held=False, reason="")), 0, None),
    ],
    ids=["no need", "no room", "room", "a guest", "and room", "two", "guests", "one guest", "its base is to start"],
)
def test_a_new_base_before_the_end_of_the_base(running: tuple[SlurmJob, ...], free: int, moved: Moves | None) -> None:
    """It is released whether or not there is room, since Slurm preempts guests for it; so is one, of what was asked
    for, if guests train alone. A guest whose time is over is replaced as any block is, if there is room."""
    one = job_of_blocks(*running, task(2, Shape(1, 1)), task(3, Shape(1, 1)))
    size = Shape(1, sum(job.gpus_per_node for job in running if job.running))
    made = planned({1: size}, [one], {"n1": free}, guests="guest")
    assert [change.moves for change in made.begin] == ([moved] if moved else [])
    if moved and not free:
        cap = Cap(0, frozenset({1}), reason("growth_stops", job=9))
        assert planned({1: size}, [one], {"n1": free}, guests="guest", caps=[cap]).begin == made.begin, "no growth"
        assert not planned({1: size}, [one], {"n1": free}).begin, "without guests nobody would make room"
        alone = job_of_blocks(*running)
        assert not planned({1: size}, [alone], {"n1": free}, guests="guest").begin, "no task is left"
