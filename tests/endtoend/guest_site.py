"""A real Slurm on which one elastic job has grown by guests, or without, and what others then get: see `guest_rows`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from ones_wrapper.protocol import Membership, Throughput
from tests.cluster import Cluster
from tests.endtoend.block_site import Site
from tests.endtoend.guest_rows import GROWN, IMPOSSIBLE, OPEN, GrownJob, GuestRow, GuestVariant
from tests.endtoend.harness import BLOCKS, TEMPLATE, TRAIN, WAIT_S, WHOLE_NODE_BLOCKS, Harness
from tests.waiting import until
from tests.wrapper.runs import samples_wrong, steps_undone

TICK_S = 1.0
SAMPLES = 640
IN_VAIN_S = 15.0
"""For so long nothing is taken for a job that cannot start anyway."""
SACCT_S = 30.0
"""Slurm records what ends within seconds."""
QUIET_TICKS = 8
"""For so long a job that would grow has not."""
CHARGED_S = 15.0
"""For so long a job trains on once it has grown: a part of what it has left."""
POLL_S = 0.15
STARTS = "date +%s.%N > {file}; exec sleep 600"
RESIZE = f"max_wait_s = {WAIT_S:.0f}\nblocks_wait_s = 20\nadvance_s = 0.2\ndwell_s = 0"


@dataclass
class RowOutcome:
    served_s: float | None = None
    """From before sbatch to the job's first line."""
    taken: int = 0
    """Blocks that went."""
    pauses_s: list[float] = field(default_factory=list)
    """Of each membership until all of them had left, as the training reported it."""
    reuse_s: list[float] = field(default_factory=list)
    """Of each block that went: from when Slurm had ended it until it was held, or ran, again."""
    base_taken: int = 0
    requeues: int = 0
    """Of a plain job, or of the base."""
    wrong: str = ""
    """Why the row does not hold."""


class Before(NamedTuple):
    """The job before somebody wants something."""

    time: float
    blocks: tuple[int, ...]
    base: set[int]
    generation: int
    restarts: int
    starts: dict[int, str] | None = None
    """Of guests, if the youngest is to go."""


class GuestStage:
    """One cluster, its companion, and the job that has grown."""

    def __init__(self, cluster: Cluster, variant: GuestVariant, *, trains: bool) -> None:
        self.cluster, self.variant, self.trains = cluster, variant, trains
        self.harness = Harness(cluster)
        self._settings = ""
        self._site = Site(self.harness, owner=False)
        self._folder = self.harness.folder("guests")
        self._name = ""
        self._job = self._other = self._count = 0

    # -- the job that has grown ----------------------------------------------------------------------------------------

    @property
    def _grown(self) -> GrownJob:
        return GROWN[self._name]

    def grow(self, name: str) -> None:
        """Begin a job that is to have grown so, unless there is one; returns at its full size."""
        if name == self._name:
            self.full()
            return
        self.end()
        self._begin(name)
        self.full()
        if self._grown.late and self.variant.queue is not None:
            self._switch_guests_on()
        elif self._grown.guests and self.variant.queue is not None:
            tasks = self.harness.tasks(self._job)
            sizes = sorted((tasks[n].gpus for n in self.guests()), reverse=True)
            assert sizes == [*self._grown.guests], sizes

    def _begin(self, name: str) -> None:
        self._name, grown, self._settings = name, GROWN[name], ""
        self._site = Site(self.harness, owner=False, whole=1 if grown.whole else 0)
        self._folder = self.harness.folder("guests")
        self._run(grown.admin)
        self._job = self._submit()
        self._other = self._submit(LIGHT_TERMS="") if grown.pair else 0
        self._run(grown.grows)
        top = {"tick_s": str(TICK_S), "limits": f"near_limit_s = {grown.near_s}"}
        queue = {} if grown.late else self._queue()
        if grown.pair:
            # What a change costs is weighed as ever, but at each tick, and without having run for long before one.
            top |= {"policy": '"ones"', "options": "tenure = 10.0\nstand = false"}
        self._settings = self._site.settings(f"{RESIZE}\npreempted_s = {grown.rest_s}", **top, **queue)
        self._start()

    def _start(self) -> None:
        self.harness.stay(self._settings).touch()
        jobs = filter(None, (self._job, self._other))
        self._companion = self._site.start(self._settings, {job: self._steps() for job in jobs})

    def _stop(self) -> None:
        self._companion.terminate()
        self._companion.wait(WAIT_S)

    def _switch_guests_on(self) -> None:
        """As an administrator does: another line of the settings, and the companion again."""
        self._stop()
        path = self.harness.stay(self._settings).with_name("ones.toml")
        path.write_text(f"guests = {self._queue()['guests']}\n{path.read_text()}")
        assert not self.guests()
        self._start()

    def _steps(self) -> list[list[int]]:
        batch = self._grown.batch[1]
        if self.variant.plain:
            return [[*(self._grown.plain or (1, 1)), batch]]
        return [[0, gpus, batch] for gpus in self._grown.gpus]

    def _queue(self) -> dict[str, str]:
        queue, grown = self.variant.queue, self._grown
        if queue is None:
            return {}
        name = "whole" if grown.whole else "gpu"
        partition = f"{queue.partition}-whole" if grown.whole and queue.partition else queue.partition
        words = {"qos": queue.qos, "partition": partition, "account": grown.account}
        given = ", ".join(f'{key} = "{one}"' for key, one in words.items() if one)
        return {"guests": f"{{{name} = {{{given}}}}}"}

    @property
    def _comment(self) -> str:
        # On one GPU a job that trains nothing has a batch of 16 at most.
        words = [f"ones: gpus=1-{self._grown.most} batch={self._grown.batch[0]}-{self._grown.batch[1]}"]
        words += [] if self.variant.plain else ["array=blocks"]
        return " ".join([*words, f"cost={self._grown.cost}"] if self._grown.cost else words)

    def _submit(self, **more: str) -> int:
        plain = self.variant.plain
        options, env = self._site.asked(self._grown.options, {})
        # Sbatch takes the last comment.
        options = (*options, f"--comment={self._comment}")
        env |= dict(word.split("=") for word in self._grown.env) | more
        env |= {"ONES_TRACE": f"{self._inside}/trace-{{restart}}-{{rank}}.jsonl"}
        if self._grown.env or not (self.trains or self._grown.trains):
            light = self.harness.light if plain else self.harness.blocks
            cpus = "--gres=none" if self._grown.whole else "--cpus-per-gpu=4"
            job_id = light(cpus, *options, **env)
        else:
            length = ("--epochs", 100_000, "--samples", SAMPLES, "--batch", 32, "--step-ms", self._grown.step_ms)
            whole = WHOLE_NODE_BLOCKS if self._grown.whole else BLOCKS
            template = TEMPLATE if plain else whole
            job_id = self.harness.submit(str(TRAIN), *map(str, length), options=options, template=template, **env)
        if plain:
            self.harness.trains(job_id)
        else:
            self.harness.membership(job_id, lambda m: m.why == "first", "first membership")
        return job_id

    def full(self) -> None:
        """Wait until the job has its full size, and all of it trains together."""
        if not self.variant.plain:
            gpus = self._grown.gpus[-1]
            self.harness.membership(self._job, lambda m: m.world == gpus and self._steady(m), f"{gpus} GPUs")
            if self._other:
                self.harness.membership(self._other, lambda m: m.world == gpus, f"{gpus} GPUs, too")
            return
        nodes, each = self._grown.plain or (1, 1)
        gpus = 0 if self._grown.whole else each
        job = self.harness.wait(
            self._job, lambda job: job.running and (job.nodes, job.gpus_per_node) == (nodes, gpus), "grown"
        )
        self.harness.trains(self._job, restart=job.restart)

    def _steady(self, now: Membership) -> bool:
        return {*now.blocks} == {n for n, task in self._tasks().items() if task == "RUNNING"}

    @property
    def _inside(self) -> str:
        return f"/scratch/{self._folder.name}"

    def _tasks(self) -> dict[int, str]:
        """State of each task; held if it waits so."""
        if self.variant.plain:
            return {}
        return {n: "held" if one.held else one.state for n, one in self.harness.tasks(self._job).items()}

    def guests(self) -> set[int]:
        """Tasks of the job that run in the queue of guests."""
        command = ["squeue", "-h", "--array", "--states=RUNNING", f"--jobs={self._job}", "-o", "%K|%P|%q"]
        queue = self.variant.queue
        if queue is None:
            return {*self._members().blocks[1:]}
        found = [line.split("|") for line in self._root(command).splitlines()]
        return {int(n) for n, partition, qos in found if qos == queue.qos or queue.partition in partition.split("-")}

    def _members(self) -> Membership:
        return self.harness.memberships(self._job)[-1]

    # -- what others get -----------------------------------------------------------------------------------------------

    def judge(self, row: GuestRow) -> RowOutcome:
        """Have somebody want that, and the job grow again afterwards."""
        self.grow(row.grown)
        places = self._places()
        self._run([line.format(**places) for line in row.admin])
        others = [self._first(row.first)] if row.first else []
        try:
            if row.judged == "limits":
                return self._limits()
            if row.judged == "renewed":
                return self._renewed(closed=bool(row.admin))
            if row.judged == "cost":
                return self._charged()
            before = self._now()
            if row.any_guest and self._youngest_first:
                before = before._replace(starts=self._starts())
            others.append(self._rigid(row, places))
            if row.judged == "rests":
                return self._rests(row, before, others)
            if row.judged == "worth":
                return self._worth(row, before, others[-1])
            waits = row.judged == "waits" or (row.plain_waits and self.variant.plain)
            found = self._waits(before, others[-1]) if waits else self._served(row, before, others[-1])
            if self._grown.late and not found.wrong:
                self._run([f"scancel {others[-1]}"])
                self.full()
                found.wrong = "" if self.guests() else "it grew by no guests once they were switched on"
            return found
        finally:
            self._run([f"scancel {' '.join(map(str, others))}"] if others else ())
            self._run([line.format(**places) for line in row.undo])

    def _places(self) -> dict[str, str]:
        """The nodes of the base, and one that has none of it."""
        if self.variant.plain:
            nodes = self.harness.job(self._job).node_list
            return {"base": nodes[0], "other": nodes[-1]}
        tasks = self.harness.tasks(self._job)
        base = {tasks[n].node_list for n in self._base()}
        other = {tasks[n].node_list for n in self.guests() if "[" not in tasks[n].node_list} - base
        return {"base": min(base), "other": max(other, default="n4")}

    def _base(self) -> set[int]:
        if self._grown.late:  # what it grew by before guests is not its own
            return {*self._members().blocks[:1]}
        return set() if self.variant.plain else {*self._members().blocks} - self.guests()

    def _rigid(self, row: GuestRow, places: dict[str, str]) -> int:
        self._count += 1
        options = [option.format(**places) for option in row.options]
        script = STARTS.format(file=f"{self._inside}/started-{self._count}")
        return self.harness.rigid(*options, user=row.user, script=script)

    def _first(self, what: str) -> int:
        if what == "impossible":
            return self.harness.rigid(*IMPOSSIBLE)
        queue = self.variant.queue
        assert queue is not None
        job_id = self.harness.rigid("--hold", "--gres=gpu:4")
        word = f"QOS={queue.qos}" if queue.qos else f"Partition={queue.partition}"
        self._run([f"scontrol update JobId={job_id} {word}", f"scontrol release {job_id}"])
        return job_id

    def _now(self) -> Before:
        members = () if self.variant.plain else self._members().blocks
        restarts = self.harness.job(self._job).restart if self.variant.plain else 0
        generation = 0 if self.variant.plain else self._members().generation
        return Before(time.time(), members, self._base(), generation, restarts)

    def _served(self, row: GuestRow, before: Before, rigid: int) -> RowOutcome:
        """Follow what goes, and who starts, until both are over."""
        gone, again = dict[int, float](), dict[int, float]()
        while time.time() < before.time + row.within_s:
            states, now = self._tasks(), time.time()
            for task in before.blocks:
                state = states.get(task, "")
                if state == "COMPLETING" or (task not in gone and state != "RUNNING"):
                    gone[task] = now
                if task in gone and state in ("held", "RUNNING"):
                    again.setdefault(task, now)
            started = self._started()
            if started is not None and now > started + TICK_S and gone.keys() == again.keys():
                break
            time.sleep(POLL_S)
        found = RowOutcome(taken=len(gone), base_taken=len(before.base & gone.keys()))
        if (started := self._started()) is None:
            found.wrong = f"not served: {self._root(['squeue', '-h', f'--jobs={rigid}', '-o', '%T %r']).strip()}"
        else:
            found.served_s = round(started - before.time, 2)
        found.reuse_s = [round(again[task] - at, 2) for task, at in gone.items() if task in again]
        if gone.keys() != again.keys():
            found.wrong += f" not used again: {sorted(gone.keys() - again.keys())}"
        found.pauses_s = self._pauses(before, {*gone}) if gone else []
        found.requeues = self._now().restarts - before.restarts
        starts = before.starts or {}
        if starts and max(starts.values()) not in {starts.get(task) for task in gone}:
            found.wrong += f" not the youngest: {sorted(gone)} of {starts}"
        if starts and self.cluster.accounting:
            until(self._recorded, "a guest that was preempted, in sacct", SACCT_S)
        free = row.unheld and self.variant.queue is not None
        if not (free or found.taken or found.requeues or found.wrong):
            found.wrong = "it was served by what was free"
        return found

    def _pauses(self, before: Before, gone: set[int]) -> list[float]:
        """How long no rank trained, at each change until these had left."""
        later = [m for m in self.harness.memberships(self._job) if m.generation > before.generation]
        left = len([*takewhile(lambda m: not gone.isdisjoint(m.blocks), later)]) + 1
        return [round(m.pause_s, 4) for m in later[:left]]

    def _started(self) -> float | None:
        with suppress(OSError, ValueError):
            return float((self._folder / f"started-{self._count}").read_text())
        return None

    def _waits(self, before: Before, rigid: int) -> RowOutcome:
        time.sleep(IN_VAIN_S)
        same = self._now()._replace(time=before.time) == before
        waits = "PENDING" in self._root(["squeue", "-h", f"--jobs={rigid}", "-o", "%T"])
        return RowOutcome(wrong="" if same and waits else "something was taken in vain")

    def _limits(self) -> RowOutcome:
        shown = self._root(["scontrol", "-o", "show", "reservations"])
        starts = _seconds(shown.partition("StartTime=")[2].split()[0])
        command = ["squeue", "-h", "--array", "--states=RUNNING", f"--jobs={self._job}", "-o", "%K|%e"]
        ends = dict(line.split("|") for line in self._root(command).splitlines())
        late = sorted(n for n in self.guests() if _seconds(ends[str(n)]) > starts)
        return RowOutcome(wrong=f"these guests end within the reservation: {late}" if late else "")

    def _renewed(self, closed: bool) -> RowOutcome:
        """Have the limit of the base near its end. A new base joins before the old one leaves; if none may start, the
        job goes on with its guests until one may."""
        before, guests = self._now(), self.guests()
        for task in before.base:
            self._run([f"scontrol update JobId={self._job}_{task} TimeLimit={3 if guests else 2}"])
        if not guests:
            return self._from_checkpoint(before)
        now = self.harness.membership(self._job, lambda m: before.base.isdisjoint(m.blocks), "without the old base")
        if closed:
            alone = {*now.blocks} <= self.guests()
            self._run([OPEN])
            self.harness.membership(self._job, lambda m: bool({*m.blocks} - self.guests()), "a new base")
            self.full()
            return RowOutcome(wrong="" if alone else "a new base had started in time")
        later = [m for m in self.harness.memberships(self._job) if m.generation > before.generation]
        guests = self.guests()
        bare = [m for m in later if {*m.blocks} - before.base <= guests and before.base.isdisjoint(m.blocks)]
        wrong = f"without base: {bare}" if bare else ""
        if now.blocks[0] in guests:
            wrong += f" guest {now.blocks[0]} leads"
        self.full()
        return RowOutcome(wrong=wrong)

    def _from_checkpoint(self, before: Before) -> RowOutcome:
        """Wait until the base has ended; another was released before that. Once it may start, it goes on where the
        first ended, without guests; no step is taken twice, and no sample of an epoch."""
        until(lambda: not {*self._tasks().values()} & {"RUNNING", "COMPLETING"}, self._tasks, WAIT_S)
        with self.harness.store(self._settings) as store:
            released = any(one.added for one in store.resizes(self._job))
        epochs, *_ = samples_wrong(self._folder, SAMPLES)
        self._run([OPEN])
        self.harness.membership(self._job, lambda m: m.generation > before.generation, "a new base")
        until(lambda: samples_wrong(self._folder, SAMPLES)[0] > epochs + 1, "the next epoch", WAIT_S)
        self.full()
        _, lost, repeated = samples_wrong(self._folder, SAMPLES)
        again = steps_undone(self._folder)
        wrong = f"{lost} samples lost, {repeated} repeated, {again} steps again; " if lost or repeated or again else ""
        return RowOutcome(wrong=wrong if released else f"{wrong}no new base was released in time")

    def _worth(self, row: GuestRow, before: Before, rigid: int) -> RowOutcome:
        """Have guests taken that lived for seconds. The job, which loses work with each, takes none any more; the other
        one, which loses none, does."""
        found = self._served(row, before, rigid)
        self._stop()
        self._run([f"scancel {rigid}"])
        with self.harness.running(self._settings, "--act", user=self._site.user):
            self.harness.membership(self._other, lambda m: m.world == self._grown.most, "grown by guests again")
            self.harness.ticks(self._settings, QUIET_TICKS)
            worlds = [self.harness.memberships(job)[-1].world for job in (self._job, self._other)]
        found.wrong += "" if worlds == [1, self._grown.most] else f" {worlds} GPUs after {found.taken} guests went"
        return found

    def _charged(self) -> RowOutcome:
        """Have the job end, whose guests cost nothing, and another of its script grow by guests that are charged. It
        does so later, and no further than its whole progress may cost. Its owner reads so before and after."""
        self._ends()
        self._run(self._grown.undo)
        job = self._job = self._submit()
        self.harness.report(job, 0, lambda report: isinstance(report, Throughput), "its speed at the size asked for")
        self._start()
        self.harness.membership(job, lambda m: m.world > 1, "grown")
        time.sleep(CHARGED_S)
        read = ("--config", self._settings, "--json")
        why = json.dumps(self.harness.why(self._settings, job, self._site.user))
        self._ends()
        done = self.cluster.run(["slurm-ones", "report", str(job), *read], user=self._site.user)
        (used,) = json.loads(done.stdout)
        times = used["job"]["gpu_hours"] / used["asked_gpu_hours"]
        check = self.cluster.run(["slurm-ones", "check", self._comment], check=False).stdout
        cost = self._grown.cost
        said = f"up to {cost:g} times the GPU hours" in check and f"over {cost:.2f} times the GPU hours" in why
        wrong = "" if times <= cost and said else f"it cost {times:.3f} times as much: {check} {why}"
        return RowOutcome(wrong=wrong)

    def _ends(self) -> None:
        """Let the job end, and the companion see it."""
        self._stop()
        self.harness.stay(self._settings).unlink()
        self._site.ends(self._job, self._settings)

    def _rests(self, row: GuestRow, before: Before, others: list[int]) -> RowOutcome:
        """Have a guest taken, and another once the job has grown again: the second rest is longer."""
        rests = list[float]()
        for again in (False, True):
            if again:
                before = self._now()
                others.append(self._rigid(row, {}))
            found = self._served(row, before, others[-1])
            served = before.time + (found.served_s or 0.0)
            if found.wrong:
                return found
            self._run([f"scancel {others[-1]}"])
            self.full()
            rests.append(time.time() - served)
        least = self._grown.rest_s
        held = least <= rests[0] and 2 * least <= rests[1]
        return RowOutcome(found.served_s, wrong="" if held else f"it rested for {rests} s")

    def _starts(self) -> dict[int, str]:
        """When each guest started."""
        command = ["squeue", "-h", "--array", "--states=RUNNING", f"--jobs={self._job}", "-o", "%K|%S"]
        started = dict(line.split("|") for line in self._root(command).splitlines())
        return {n: started[str(n)] for n in self.guests()}

    def _recorded(self) -> bool:
        """Whether sacct shows the start of a guest that was preempted."""
        command = ["sacct", "-D", "-X", "-n", "-P", f"--jobs={self._job}", "--format=State,QOS,Partition"]
        queue = self.variant.queue
        assert queue is not None
        starts = [line.split("|") for line in self._root(command).splitlines()]
        return any(
            state == "PREEMPTED" and (qos == queue.qos or name == queue.partition) for state, qos, name in starts
        )

    @property
    def _youngest_first(self) -> bool:
        """Whether Slurm is asked for that, and there are guests."""
        return self.variant.queue is not None and any("youngest_first" in line for line in self.variant.site.conf)

    def companion_log(self) -> str:
        return self.harness.companion_log(self._settings)[-6000:] if self._settings else ""

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> dict[str, int]:
        """Clear up. Samples lost and repeated in whole epochs, and steps taken again, if it trained."""
        if not self._name:
            return {}
        self.harness.clear()
        self._run(self._grown.undo)
        self._name = ""
        if not self.trains:
            return {}
        epochs, lost, repeated = samples_wrong(self._folder, SAMPLES)
        return {"epochs": epochs, "lost": lost, "repeated": repeated, "steps_again": steps_undone(self._folder)}

    def _run(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._root(shlex.split(line))

    def _root(self, command: list[str]) -> str:
        return self.cluster.run(command, user="root").stdout


def _seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
