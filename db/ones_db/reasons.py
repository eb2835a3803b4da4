"""Reasons for changing or keeping a job's size. A reason is a code with arguments; each code has a sentence.

As data, reasons can be counted, stored and compared. To add a reason, add a complete sentence to `SENTENCES`.
"""

from __future__ import annotations

import string
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

Argument = str | int | float

_LIMITS = {
    # Limits that a site has set (rules/)
    "near_time_limit": "it is near its time limit: within {seconds:.0f} s (limits.near_limit_s)",
    "near_end": "it is expected to end within {seconds:.0f} s (limits.near_end_s)",
    "resizes_per_job": "it was resized {times:time|times}, as often as the site allows (limits.resizes_per_job)",
    "resizes_per_hour": "it was resized {times:time|times} within an hour, as often as the site allows "
    "(limits.resizes_per_hour)",
    "partition_share": "elastic jobs may grow to {gpus:GPU|GPUs} in total in partition {partition} (limits.share)",
    "user_cap": "elastic jobs of user {user} may grow to {gpus:GPU|GPUs} in total ({setting})",
    "account_cap": "elastic jobs of account {account} may grow to {gpus:GPU|GPUs} in total ({setting})",
    "no_room_under_cap": "it has no room, since a cap keeps other jobs at their size",
    # Limits that Slurm has, known before (rules/job_rules.py, rules/quotas.py), and what growth costs (rules/cost.py)
    "reserved_ahead": "it could not start again within its time limit: reservation {name} begins at {begin:clock}",
    "partition_closed": "it could not start again while partition {partition} starts no jobs",
    "licenses_lost": "this release of Slurm forgets the licences of a requeued job",
    "quota": "Slurm lets {whose} hold {most} {what} at once, and {left} are left",
    "quota_of_job": "Slurm lets one job of {whose} hold {most} {what}",
    "partition_nodes": "partition {partition} gives one job at most {nodes:node|nodes}",
    "growth_cost": "with more than {gpus:GPU|GPUs} it would use over {factor:.2f} times the GPU hours of its requested "
    "{asked:GPU|GPUs} (limits.growth_cost, or cost= in its comment)",
}
SENTENCES: dict[str, str] = {
    # Slurm and the job: who is never resized (jobs/)
    "other_user": "it belongs to {user}, and this companion looks after only its own user's jobs",
    "job_array": "heterogeneous jobs, and job arrays whose tasks Slurm does not list, are not resized: submit it as a "
    "separate job",
    "task_waits": "Slurm lists its task together with other waiting tasks of the job array: it can be resized once it "
    "runs",
    "task_named_as_array": "Slurm gave this task its job array's own number, by which commands would reach every task: "
    "it keeps its size",
    "task_throttled": "its job array runs at most {most:task|tasks} at once, and another task would start while this "
    "one stops for a resize: it keeps its size until no task waits; submit without %N to avoid this",
    "blocks_no_array": "array=blocks, but it is no job array: submit it with --array=0-7%1, or leave array=blocks out",
    "blocks_unthrottled": "its job array has no throttle, so that Slurm starts all blocks at once: submit it with "
    "--array=0-7%1",
    "blocks_depend": "blocks of its job array depend on others: submit it without dependencies between its tasks",
    "blocks_differ": "tasks of its job array differ in their {what}, and blocks must be alike",
    "blocks_many": "its job array has more than {most} tasks, which no job of blocks can have",
    "interactive": "it is interactive, and Slurm requeues only batch jobs: submit it with sbatch",
    "not_requeueable": "it was submitted without --requeue: submit with --requeue, or run scontrol update JobId=… "
    "Requeue=1",
    "slurm_deadline": "Slurm cancels it if it waits too long to end by its --deadline: submit without it, and write "
    "deadline=… into the comment",
    "task_counts": "it was submitted with task counts, which Slurm does not let its user change: leave out --ntasks…",
    "gpus_unknown": "Slurm knows of no GPUs in partition {partition}: name the GPUs of a node in "
    "whole_node_gpus.{partition} of the companion's settings",
    "gpus_per_job": "it asks for GPUs per job, not per node: submit with --nodes and --gres=gpu:N",
    "kinds_nowhere": "its comment allows GPUs of type {kinds}, and partition {partition} has {there}",
    "several_gpu_types": "it asks for GPUs of several types on each node: submit it with one, as in --gres=gpu:TYPE:N",
    "site_acts": "this site's companion (of {user}) acts on it, so this companion does not",
    "owner_acts": "a companion of its owner {user} ordered something in the last {seconds:.0f} s, so this companion "
    "does not act",
    "resize_off": "resize=off: it is measured, not resized",
    "fused": "it is trained within job {carrier} (fuse={name}), and starts once its result is there: scancel removes "
    "it from that job",
    "no_files": "none of its files can be read ({problem}): start it by ones-run in the directory that it was "
    "submitted from, or name another by ONES_JOB_ROOT; the companion must be able to read it",
    "files_silent": "{problem}: it keeps its size until its files can be read again",
    "spool_not_read": "orders would not reach it, since it does not read the spool {spool}: export "
    "ONES_SPOOL={spool} and submit it again, or have an administrator write that path to /etc/slurm-ones/spool on the "
    "compute nodes",
    "bad_comment": "its comment is not understood: {problem}",
    "near_comment": "its comment does not opt in, since it does not begin with ones: — if it should, write "
    '--comment="{right}" (scontrol update JobId=… Comment="{right}")',
    "opted_out": "its comment no longer opts in",
    "blocks_no_more": "its comment no longer says array=blocks: it keeps the blocks that it has",
    "accounting_only": "known only from Slurm's accounting",
    # The round: who keeps what they have in it (rules/gate.py)
    "resize_under_way": "a resize is under way",
    "held_by_operator": "it is held by an operator",
    "held_by_owner": "it is held by its owner",
    "completing": "it is completing",
    "not_running": "it is {state}",
    "dwell_time": "it may be resized from {until:clock} on: {dwell_s:.0f} s after its start or last "
    "resize (dwell time)",
    "dwell_failures": "it may be resized from {until:clock} on: {times:resize|resizes} in a row did not take effect, "
    "and each doubles the wait",
    "nothing_reported": "it has not reported what it can do: is it started by ones-run, and does its script call "
    "ones.init?",
    "gpus_idle": "this run uses {ranks} of its {gpus:GPU|GPUs}: start it with ones-run (on whole nodes with "
    "--gpus-per-node), or torchrun --nproc_per_node=gpu on all its nodes",
    "gpus_shared": "{ranks} ranks share its {gpus:GPU|GPUs}: start it with ones-run (on whole nodes with "
    "--gpus-per-node), or torchrun --nproc_per_node=gpu on all its nodes",
    "batch_misses": "its comment allows batches of {first} to {last}, and its script takes at most {most} (ones.init): "
    "write batch={base}-{most} in the comment, or raise max_batch in the script",
    # What its training strategy lets it have (rules/strategy.py)
    "strategy_size": "{strategy} runs on {counts} GPUs: {gpus} cannot be used",
    "strategy_nowhere": "{strategy} runs on {counts} GPUs, and none of these is possible here within its comment: it "
    "keeps its size",
    "strategy_together": "{strategy} needs groups of {ranks:consecutive rank|consecutive ranks} on one node each, and "
    "{shape} would separate some",
    "strategy_memory": "{strategy} does not fit into the memory of {gpus:GPU|GPUs}",
    "strategy_takes": "{strategy} takes batches of up to {most} in multiples of {quantum} on {gpus:GPU|GPUs}, and "
    "{batch} is not one of them",
    "strategy_batch": "{strategy} cannot change its batch of {batch} now",
    "strategy_steps": "{strategy}: its next resize may come after {steps:more step|more steps}",
    "strategy_unread": "its spec, which says what it can do, cannot be read any more: {problem}",
    "strategy_sizes": "{strategy} runs on {counts} GPUs",
    "strategy_batch_fixed": "{strategy} keeps its present batch at every size",
    "strategy_every": "{strategy} needs at least {steps:step|steps} between two resizes",
    "strategy_carries": "{strategy} keeps at a resize, besides model and optimizer: {carries}; it resets: {resets}",
    "strategy_inexact": "{strategy} trains a little differently on another number of GPUs",
    **_LIMITS,
    # What goes back to jobs that wait (rules/growth.py)
    "growth_returns": "it gives its growth back, from {before} to {gpus:GPU|GPUs}: job {job} waits for {what}",
    "growth_stops": "it does not grow: job {job} waits for resources that it would take",
    "growth_rests": "it may grow from {until:clock} on: Slurm preempted blocks of it",
    "idle_returns": "its GPUs were in use for {percent:.0f} % of {minutes:.0f} minutes: it gives its growth back, from "
    "{before} to {gpus:GPU|GPUs}; more loader workers or a larger batch may keep them busy",
    "idle_stays": "it does not grow: its {gpus:GPU was|GPUs were} in use for {percent:.0f} % of {minutes:.0f} minutes; "
    "more loader workers or a larger batch may keep them busy",
    "guests_leave": "it waits until Slurm has preempted guests of other jobs for it",
    # What owners ask for by hand (rules/asked.py)
    "size_asked": "its owner asks for {gpus:GPU|GPUs} by hand (size= in its comment)",
    "size_kept": "it keeps {gpus:GPU|GPUs}, as its owner asks by hand (size= in its comment)",
    "size_waits": "its owner asks for {gpus:GPU|GPUs} by hand, which are not free",
    "size_not_possible": "its owner asks for {gpus:GPU|GPUs} by hand, which these nodes or its comment do not allow "
    "(possible: {counts})",
    # What a policy gives and why (ones/, rivals/)
    "fits_nowhere": "none of its GPU counts ({counts}) fits this cluster with a batch that it takes",
    "nodes_do_not_add_up": "the GPUs it holds are not all on nodes that can be used now",
    "no_room": "there is no room now for {gpus:GPU|GPUs}",
    "in_queue": "there is no room now for {gpus:GPU|GPUs}: it is number {place} of {waiting} waiting",
    "turn": "its turn has come: {first} go first",
    "interrupted": "its turn is too late for it to keep its GPUs: {first} go first",
    "never_interrupted": "this policy never pauses a running job",
    "between_changes": "this policy changes the sizes of running jobs at most once in {seconds:.0f} s",
    "least_total_time": "all jobs together are expected to finish soonest this way",
    "trains_faster": "with this change it is expected to train {factor:.2g} times as fast",
    "growth_dearer": "{why}; this size uses {times:.2f} times the GPU hours of its requested one, and the job in all "
    "at most {factor:.2f} times",
    "gives_up_gpus": "it is expected to train at {factor:.2g} times its present speed; other jobs gain more by these "
    "GPUs",
    "faster_kind": "on {kind} instead of {before} it is expected to train {factor:.2g} times as fast",
    "leaves_kind": "on {kind} it is expected to train at {factor:.2g} times its present speed; other jobs gain more on "
    "{before}",
    "several_kinds": "it has GPUs of several kinds ({kinds}), and no change would repay its pause",
    "no_change_repays": "no change of its GPUs would repay a pause of {seconds:.3g} s",
    "within_switches": "{gpus:GPU|GPUs} fit below {switches:leaf switch|leaf switches}; {more:GPU|GPUs} would need "
    "more switches, across which gradients take {taper:.2g} times as long (taper)",
    "on_slow_node": "it trains at about {percent:.0f} % of its usual speed: node {node} is slow, as {runs:run|runs} of "
    "{owners:owner|owners} showed",
    "better_batch": "it is expected to train faster with batch {batch} than with {before}",
    "smallest_size": "a job starts on the smallest size that it takes",
    "least_remaining": "all jobs then need the fewest GPU-seconds; {speed:.3g} samples/s are predicted for it",
    "least_gpu_time": "GPUs go first to what deadlines need, then where they cost the fewest GPU-seconds",
    "deadline_needs": "it needs {gpus:GPU|GPUs} now to end by its deadline, which is promised",
    "deadline_short": "there is no room now for the {gpus:GPU|GPUs} that its promised deadline needs",
    "stopped": "all jobs together need the fewest GPU-seconds while it is stopped",
    "changed_lately": "{gpus:GPU|GPUs} would be better, but a job would change that changed less than "
    "{epochs:epoch|epochs} ago",
    "shortens_most": "GPUs go one by one to the job whose remaining time they shorten most",
    "highest_index": "GPUs go one by one to the job for which a GPU-second saves most waiting",
    "best_total": "of all schedules that were compared, this one is best by {total}",
    "nearly_best_total": "of all schedules that were compared, this one is within {percent:.2g} % of the best by "
    "{total}",
    # The same if there is no other job (`alone`)
    "turn_alone": "its turn has come: there is no other elastic job here",
    "least_total_time_alone": "this way it is expected to end soonest",
    "gives_up_gpus_alone": "at {factor:.2g} times its present speed it is expected to end soonest",
    "least_remaining_alone": "it then needs the fewest GPU-seconds; {speed:.3g} samples/s are predicted for it",
    "shortens_most_alone": "it gets GPUs one by one as long as they shorten its remaining time",
    "highest_index_alone": "it gets GPUs one by one as long as they make it faster",
    "best_total_alone": "of all its sizes that were compared, this one is best",
    "nearly_best_total_alone": "of all its sizes that were compared, this one is within {percent:.2g} % of the best",
    "no_solution": "the integer program has no answer ({message}), so nothing changes",
    "network": "the trained network gave this the highest score",
    # Whether its deadline is promised (ones/, rivals/elasticflow)
    "deadline_promised": "it is expected to be met on at most {gpus:GPU|GPUs}, and no earlier promise is broken",
    "deadline_passed": "it has passed",
    "deadline_too_soon": "even with all GPUs it would have done only {percent:.0f} % of its work by then (some time is "
    "kept in reserve)",
    "deadline_no_room": "on the GPUs that earlier promises and reservations leave, it would have done only "
    "{percent:.0f} % of its work by then",
    "deadline_breaks": "another job would miss its deadline, which was promised before",
    # What becomes of it (rules/plan.py)
    "begins": "begins",
    "batch_changes": "its batch changes",
    "kept_waiting": "it is kept from starting",
    "max_open": "waits its turn: {resizes:resize is|resizes are} under way",
    "gpus_not_free": "waits until {shape} GPUs are free",
    "waits_small": "asks Slurm for {gpus:GPU|GPUs} while it waits, so that it starts as soon as that many are free",
    "blocks_not_parked": "it runs on: a running job of blocks is not stopped",
    "no_moves": "its blocks cannot be combined to {gpus:GPU|GPUs}, and no GPUs are free for a new block",
    "blocks_packed": "new blocks on fewer nodes replace its present ones",
    "blocks_replaced": "new blocks replace those whose nodes drain or whose time limit is near",
    "preempting_off": "it keeps running: preempting running jobs is switched off (resize.preempt)",
    "shrinking_off": "shrinking is switched off (resize.shrink)",
    "stop_file": "the stop file {path} exists: no resize begins",
    # What became of a resize (act/)
    "other_companion": "another companion gave the job a newer order, which it follows",
    "job_unknown": "Slurm no longer knows the job",
    "job_ended": "the job is {state}",
    "block_release_forgotten": "Slurm lost the release of block {task}, which is held again",
    "release_forgotten": "Slurm lost the release of the job, which is reshaped and released again",
    "run_ended": "its run ended before it was drained",
    "switched_off": "resizing was switched off",
    "held_while_running": "it was held while it ran",
    "order_not_written": "no order could be given: {problem}",
    "no_checkpoint": "no checkpoint in time",
    "released_before_reshape": "it was released before it could be reshaped",
    "started_before_reshape": "it started before it could be reshaped",
    "released_before_parking": "it was released before it could be parked",
    "not_requeued_in_time": "it was not requeued in time and trains on",
    "drain_cancelled": "its drain was cancelled",
    "requeue_refused": "Slurm did not requeue it: {answer}",
    "hold_refused": "Slurm did not hold it: {answer}",
    "defer_refused": "Slurm did not defer it: {answer}",
    "shape_refused": "the new shape was refused: {answer}",
    "old_shape_refused": "the old shape was refused: {answer}",
    "release_refused": "Slurm does not release it at this shape: {answer}",
    "never_starts": "Slurm never starts it at this shape: {cause}",
    "limit_reached": "Slurm lets it wait for a limit, not for room: {cause}",
    "waits_for_other": "it waits for its earliest start, or for another job",
    "queued_too_long": "it waited longer than {seconds:.0f} s",
    "parked": "it is parked",
    "block_ended": "block {task} ended before it joined: it is {state}",
    "block_preempted": "block {task} was preempted before it joined",
    "base_ended": "a base block ended before its guests joined",
    "block_unknown": "Slurm no longer knows block {task}",
    "block_held": "block {task} was held by others",
    "blocks_held": "blocks {tasks} were held by others",
    "block_taken": "block {task} was started by others",
    "blocks_not_ready": "its blocks were not prepared in time",
    "blocks_not_joined": "its blocks did not train together in time",
    "throttle_refused": "Slurm did not lift the throttle of its array: {answer}",
    "blocks_train": "these blocks train together",
    "blocks_linger": "these blocks train together, and block {task} has not ended yet",
    "blocks_joined": "its blocks trained together before the change could be cancelled",
    "stands": "it {now} at {shape}",
    "stands_held": "it {now} at {shape}, held by {holder}",
    "stands_run_ended": "it {now} at {shape}, and that run ended before it reported its start",
    "stands_no_start_report": "it {now} at {shape}, and has not reported its start",
}
"""Sentence of each code. ``{gpus:GPU|GPUs}`` is a number with the singular or plural of a word, ``{until:clock}``
a Unix time as local date and time, and ``{seconds:.0f}`` is as in `str.format`."""

WRONG = frozenset({"gpus_idle", "gpus_shared", "batch_misses"})
"""Codes of mistakes in how a job was started. The job's owner is notified of them."""

SITE_LIMITS = frozenset(_LIMITS)
"""Codes of reasons that are limits of the site."""

CAUSES = {
    "account_cap": "capped by account",
    "user_cap": "capped by user",
    "partition_share": "capped by the partition's share",
    "no_room_under_cap": "kept in place by a cap of others",
    "reserved_ahead": "with a reservation ahead",
    "partition_closed": "in a partition that starts no jobs",
    "licenses_lost": "with licences that a requeue would lose",
    "quota": "at a limit of Slurm's",
    "quota_of_job": "at a limit of Slurm's",
    "partition_nodes": "at the size of the partition's jobs",
    "growth_cost": "at the cost that growth may have",
    "near_time_limit": "near the time limit",
    "near_end": "near the end",
    "resizes_per_job": "resized as often as allowed",
    "resizes_per_hour": "resized as often as allowed in an hour",
    "dwell_time": "within the dwell time",
    "dwell_failures": "waiting longer after resizes without effect",
    "max_open": "waiting for other resizes",
    "gpus_not_free": "waiting for GPUs",
    "no_moves": "waiting for GPUs for a new block",
    "blocks_not_parked": "not stopped: made of blocks",
    "kept_waiting": "kept from starting",
    "preempting_off": "not stopped: preempting is off",
    "shrinking_off": "not shrunk: shrinking is off",
    "stop_file": "stopped by the stop file",
    "held_by_operator": "held by an operator",
    "held_by_owner": "held by the owner",
    "nothing_reported": "without reports",
    "gpus_idle": "with GPUs that no rank uses",
    "idle_returns": "with idle GPUs",
    "idle_stays": "with idle GPUs",
    "batch_misses": "with a batch range that misses the script's",
    "gpus_shared": "with more ranks than GPUs",
    "other_user": "of other users",
    "job_array": "heterogeneous jobs",
    "task_waits": "tasks that wait in their job array",
    "task_named_as_array": "tasks with their job array's number",
    "task_throttled": "tasks of throttled job arrays",
    "blocks_no_array": "array=blocks without a job array",
    "blocks_unthrottled": "blocks without a throttle",
    "blocks_depend": "blocks that depend on each other",
    "blocks_differ": "blocks that are not alike",
    "blocks_many": "more blocks than a job can have",
    "interactive": "interactive",
    "not_requeueable": "not requeueable",
    "slurm_deadline": "with a deadline of Slurm's",
    "task_counts": "submitted with task counts",
    "gpus_unknown": "in a partition without known GPUs",
    "gpus_per_job": "asking for GPUs per job",
    "kinds_nowhere": "allowing no type of GPU that their partition has",
    "several_gpu_types": "asking for GPUs of several types",
    "resize_off": "measured only (resize=off)",
    "fused": "trained within others of their sweeps",
    "no_files": "without files that can be read",
    "files_silent": "whose files do not answer",
    "spool_not_read": "that do not read the spool",
    "bad_comment": "with a comment that is not understood",
    "site_acts": "left to this site's companion",
    "owner_acts": "left to their owners' companions",
    "near_comment": "with a comment that nearly opts in",
    "size_kept": "kept at a size that the owner asks for",
    "size_waits": "waiting for GPUs that the owner asks for",
    "size_not_possible": "asked for a size that it cannot have",
    "strategy_size": "asked for a size that their strategy cannot use",
    "strategy_nowhere": "at the only size that their strategy can use here",
    "strategy_together": "at a size that would part ranks that share a node",
    "strategy_memory": "without memory for a smaller size",
    "strategy_takes": "with a batch that their strategy does not take there",
    "strategy_batch": "with a batch that their strategy keeps",
    "strategy_steps": "with steps to take before their next resize",
    "opted_out": "no longer opted in",
    "blocks_no_more": "no longer blocks by their comment",
}
"""Phrase for each code in counts of the jobs that keep their size, such as "3 within the dwell time"."""


def cause_of(refusal: str, outcome: str, given: str) -> str:
    """Return the code in `CAUSES` for a job that keeps its size; empty if there is none.

    `refusal` is the code of the reason why the job is not elastic; empty if it is. `outcome` and `given` are the codes
    of its newest decision: what came of it, and why it was made.
    """
    code = refusal or outcome or (given if given in WRONG else "")
    return code if code in CAUSES else ""


@dataclass(frozen=True)
class Reason:
    """A code of `SENTENCES` with its arguments. `reason` makes it. It is false if the code is empty.

    A number that is infinite or NaN comes back from the database as text.
    """

    code: str
    arguments: tuple[tuple[str, Argument], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.code)

    def __str__(self) -> str:
        return render(self.code, dict(self.arguments))


NO_REASON = Reason("")
"""The empty reason, which is false."""


def reason(code: str, **arguments: Argument) -> Reason:
    """Return the reason with this code. Raises KeyError if no sentence has this code, or if its arguments differ."""
    wanted = _arguments_of(code)
    if wanted != arguments.keys():
        raise KeyError(f"reason {code}: takes {sorted(wanted)}, not {sorted(arguments)}")
    return Reason(code, tuple(arguments.items()))


def alone(found: Reason) -> Reason:
    """Return the reason for a cluster's only elastic job: its code with `_alone`, if there is such a code."""
    code = f"{found.code}_alone"
    if code not in SENTENCES:
        return found
    wanted = _arguments_of(code)
    return Reason(code, tuple((name, value) for name, value in found.arguments if name in wanted))


@cache
def _arguments_of(code: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in string.Formatter().parse(SENTENCES[code]) if name)


def render(code: str, arguments: Mapping[str, Argument]) -> str:
    """Return the sentence of a code with its arguments.

    For an unknown code, such as a newer version's, return the code and its arguments as text.
    """
    if sentence := SENTENCES.get(code):
        # What another version stored may lack an argument, or have text for a number.
        with suppress(KeyError, ValueError):
            return _PLURALS.vformat(sentence, (), arguments)
    shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{code} ({shown})" if shown else code


class _Plurals(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "clock":
            return value if isinstance(value, str) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        if "|" in format_spec:
            one, many = format_spec.split("|")
            return f"{value} {one if value == 1 else many}"
        return str(super().format_field(value, format_spec))


_PLURALS = _Plurals()
