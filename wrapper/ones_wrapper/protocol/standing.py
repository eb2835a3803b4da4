"""Standing guests: a job of blocks borrows GPUs by itself, without a companion.

The job's owner writes `guests=partition:NAME`, or `guests=qos:NAME`, into its comment. With the owner's rights, the job
then moves the array's waiting tasks to that queue. It writes one order that names all tasks, and lifts the array's
throttle. From then on Slurm starts these tasks when GPUs are free, and preempts them for other jobs. One task stays in
the job's own queue, and may start as the next base block shortly before the present one's time limit.

No task is ever held, so none has to be released. A task that must not start yet waits for the array's throttle, or has
a later start time. Each `look` reads the state from Slurm and makes the changes that are missing. So the process may
end between any two commands, and two processes may do this at once. This module itself opens no file and starts no
process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ones_wrapper.protocol.fields import MAX_BLOCKS
from ones_wrapper.protocol.optin import BadComment, GuestQueue, OptIn, parse_comment
from ones_wrapper.protocol.slurm_commands import (
    ALREADY_ENDED,
    UNCHANGED,
    QueueWords,
    again_command,
    defer_command,
    move_command,
    throttle_command,
)

ORDER = 1
"""Number of this module's order. It is smaller than any number of a companion (milliseconds since 1970), so a
companion's order replaces this one."""
NEAR_S = 900.0
"""Seconds before the base block's time limit at which the next base block may start."""
AGAIN_S = 60.0
"""Fewest seconds between two requeues of the same guest."""
_WAITS, _RUNS = "PENDING", frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "STAGE_OUT"})
_LEFT = frozenset({"PREEMPTED", "COMPLETED"})
_ENDED = _LEFT | {"CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE", "REVOKED"}
_LATER = re.compile(r"contact|timed out|no answer|connect|communication|transition|try again", re.IGNORECASE)
"""Pattern of Slurm's errors after which the same command may succeed later."""

Run = Callable[[list[str]], tuple[str, str]]
"""Function that runs a Slurm command and returns its output and its error; the error is empty on success."""


class QueueLine(NamedTuple):
    """A task of an array, as squeue prints it."""

    task: int
    state: str
    partition: str
    qos: str
    limit_s: float
    """Time limit in seconds; 0 for none."""
    end: float
    """Latest end of the task, as Unix time in seconds; 0 if unknown."""
    reason: str
    comment: str

    def among(self, queue: GuestQueue) -> bool:
        """Return True if the task is in the partition, or has the QOS, that `queue` names."""
        return (self.partition if queue.kind == "partition" else self.qos) == queue.name

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


def look_command(array: int) -> list[str]:
    """Return the squeue command that lists an array's tasks. Run it with SLURM_TIME_FORMAT=%s, and without the user's
    SQUEUE_FORMAT."""
    return ["squeue", "--noheader", "--array", "--states=all", f"--jobs={array}", "--format=%K|%T|%P|%q|%l|%e|%r|%k"]


def lines_of(text: str) -> list[QueueLine]:
    """Return the tasks in the output of `look_command`."""
    found = []
    for line in text.splitlines():
        task, *words = line.split("|", 7)
        if len(words) == 7 and task.isdecimal():
            state, partition, qos, limit, end, reason, comment = words
            when = float(end) if end.isdecimal() else 0.0
            found.append(QueueLine(int(task), state, partition, qos, _seconds(limit), when, reason, comment))
    return found


def _seconds(text: str) -> float:
    """Parse Slurm's [days-][[hours:]minutes:]seconds; 0 for no limit."""
    days, _, rest = text.rpartition("-")
    parts = [days or "0", *(["0"] * (3 - len(rest.split(":")))), *rest.split(":")]
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        return 0.0
    return sum(int(part) * each for part, each in zip(parts, (86400, 3600, 60, 1), strict=True)) * 1.0


def chosen(lines: Iterable[QueueLine]) -> tuple[OptIn, GuestQueue] | None:
    """Return the opt-in in the job's comment, and the guest queue that it names; None if it names none. Raises
    `BadComment`."""
    for line in lines:
        optin = parse_comment(line.comment)
        if optin is not None and optin.blocks and isinstance(optin.guests, GuestQueue):
            return optin, optin.guests
    return None


def most_guests(optin: OptIn, nodes: int, gpus_per_node: int) -> int:
    """Return the largest number of guests that the job may have besides its base block, all of the requested shape."""
    most, each = (optin.gpus[1], nodes * gpus_per_node) if optin.gpus else ((optin.nodes or (1, 1))[1], nodes)
    return most // each - 1 if each else 0


def is_companions(number: int) -> bool:
    """Return True if this is the number of a companion's order."""
    return number >= 10**9


class StandingGuests:
    """Manager of the standing guests of one job, in one process."""

    def __init__(
        self,
        array: int,
        shape: tuple[int, int],
        run: Run,
        order: Callable[[tuple[int, ...]], str],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`shape` is (nodes, GPUs per node) of a block. `order` writes an order that names the given tasks, unless
        there is a newer order; it returns an error, or ''. `say` writes a line to the log."""
        self._array, self._shape = array, shape
        self._run, self._order, self._say, self._clock = run, order, say, clock
        self._said: set[str] = set()
        self._kept: dict[int, float] = {}
        """Earliest start of each task that must wait, as Unix time in seconds."""
        self._again: dict[int, float] = {}
        """Unix time at which this object last requeued each task; infinity if Slurm refused for good."""
        self._home = UNCHANGED
        """Queue of the base block."""
        self._most = -1
        self._open = False
        """True after the array's throttle was lifted."""

    def look(self) -> bool:
        """Read the job's tasks from Slurm, and make the missing changes. Return False when no further call is
        needed."""
        text, why = self._run(look_command(self._array))
        if why:
            self._tell(f"the job's tasks could not be asked for ({why})")
            return True
        lines = lines_of(text)
        try:
            found = chosen(lines)
        except BadComment as error:
            self._tell(f"the job's comment is not understood: {error}")
            return False
        if found is None:
            return False
        optin, queue = found
        if self._most < 0:
            self._most = max(0, most_guests(optin, *self._shape))
        if any(line.state in _RUNS and not line.among(queue) for line in lines):
            return self._most > 0 and self._with_base(lines, queue)
        self._without_base(lines, queue)
        return True

    def _with_base(self, lines: Sequence[QueueLine], queue: GuestQueue) -> bool:
        base = max((one for one in lines if one.state in _RUNS and not one.among(queue)), key=lambda one: one.end)
        self._home = _home(base, queue)
        guests = [one for one in lines if one.among(queue) and not one.ended]
        back = [
            one for one in lines if one.among(queue) and one.state in _LEFT and self._again.get(one.task) != math.inf
        ]
        back = back[: max(0, self._most - len(guests))]
        # Tasks that wait for a start time come last, and so stay.
        own = sorted(self._startable(lines, queue, lent=False), key=lambda one: (self._waits_for_a_time(one), one.task))
        kept_back = min(1, len(own) - 1) if not guests else 1
        moving = own[: max(0, min(self._most - len(guests) - len(back), len(own) - kept_back))]
        limit_s = self._limit_s(queue, base.limit_s) if moving else 0.0
        for number, one in enumerate(moving, len(guests)):
            if why := self._move(one, queue, limit_s):
                if not _LATER.search(why):
                    self._most = number
                return self._most > 0
        keep = own[len(moving) :]
        if not own and len(guests) > 1:
            keep = sorted(self._startable(lines, queue, lent=True), key=lambda one: one.task)[-1:]
        until = base.end - NEAR_S if base.end else math.inf
        right = all(self._keep(one, until, back=one.among(queue)) for one in keep)
        for one in back:
            self._start_again(one)
        if right and (guests or moving) and not self._open:
            self._begin(lines, queue, {one.task for one in (*guests, *back, *moving)})
        return self._most > 0

    def _without_base(self, lines: Sequence[QueueLine], queue: GuestQueue) -> None:
        """Let the next base block start now, because no base block runs."""
        own = self._startable(lines, queue, lent=False)
        if own:
            first = min(own, key=lambda one: (not self._waits_for_a_time(one), one.task))
            if self._waits_for_a_time(first) and not self._change(
                defer_command(self._name(first), "now"), f"task {first.task} is not the next base"
            ):
                self._kept.pop(first.task, None)
        elif self._home != UNCHANGED and (lent := self._startable(lines, queue, lent=True)):
            last = max(lent, key=lambda one: one.task)
            command = move_command(self._name(last), self._home)
            self._change(command, f"task {last.task} is not the next base")
        else:
            self._tell(f"{_shown(queue)}: no task waits in the job's own queue to be its next base")

    def _startable(self, lines: Iterable[QueueLine], queue: GuestQueue, *, lent: bool) -> list[QueueLine]:
        """Return the pending tasks that are not held, in the guests' queue if `lent`, else in other queues."""
        waiting = (one for one in lines if one.state == _WAITS and not one.reason.startswith("JobHeld"))
        return [one for one in waiting if one.among(queue) is lent]

    def _waits_for_a_time(self, one: QueueLine) -> bool:
        return one.task in self._kept or one.reason == "BeginTime"

    def _limit_s(self, queue: GuestQueue, limit_s: float) -> float:
        """Return a guest's time limit in seconds: the base block's `limit_s`, or the guest partition's if that is
        smaller."""
        if queue.kind != "partition":
            return limit_s
        text, _ = self._run(["sinfo", "--noheader", f"--partition={queue.name}", "--format=%l"])
        most_s = _seconds(text.partition("\n")[0].strip())
        return min(limit_s or most_s, most_s or limit_s)

    def _move(self, one: QueueLine, queue: GuestQueue, limit_s: float) -> str:
        """Move a task to the guests' queue; return the reason of a failure, or ''."""
        names = (queue.name, "") if queue.kind == "partition" else ("", queue.name)
        now = ("StartTime=now",) if self._waits_for_a_time(one) else ()
        command = move_command(self._name(one), (*names, "", limit_s, ""), *now)
        why = self._change(command, f"{_shown(queue)}: task {one.task} stays in its queue")
        if not why:
            self._kept.pop(one.task, None)
        return why

    def _keep(self, one: QueueLine, until: float, *, back: bool) -> bool:
        """Set the earliest start of a task that is to be the next base block; with `back`, first move it to the job's
        own queue. Return True if Slurm accepted that."""
        before = self._kept.get(one.task, 0.0)
        if not back and (before == until or abs(before - until) < 60.0):
            return True
        start = "now+30days" if until == math.inf else f"uts{until:.0f}" if until > self._clock() else "now"
        name, queue = self._name(one), self._home
        command = move_command(name, queue, f"StartTime={start}") if back else defer_command(name, start)
        why = self._change(command, f"task {one.task} is not kept as the next base")
        if not why:
            self._kept[one.task] = until
        return not why

    def _start_again(self, one: QueueLine) -> None:
        now = self._clock()
        if now - self._again.get(one.task, 0.0) >= AGAIN_S:
            why = self._change(again_command(self._name(one), hold=False), f"guest {one.task} does not come back")
            self._again[one.task] = now if not why or _LATER.search(why) else math.inf

    def _begin(self, lines: Sequence[QueueLine], queue: GuestQueue, lent: set[int]) -> None:
        """Write an order that names all tasks, guests last, and lift the array's throttle."""
        tasks = sorted((one.task for one in lines), key=lambda task: (task in lent, task))
        if why := self._order(tuple(tasks[:MAX_BLOCKS])):
            self._tell(f"{_shown(queue)}: no order could be written ({why}); the job trains on as it is")
            return
        why = self._change(throttle_command(self._array, 0), f"{_shown(queue)}: the throttle of the array stays")
        self._open = not why or ALREADY_ENDED in why
        if self._open:
            self._tell(
                f"{_shown(queue)}: up to {len(lent)} blocks join there as Slurm starts them, and leave as it takes them"
            )

    def _change(self, command: list[str], otherwise: str) -> str:
        """Run a Slurm command; return the reason of a failure, or ''."""
        _, why = self._run(command)
        if why and ALREADY_ENDED not in why:
            self._tell(f"{otherwise}: Slurm says: {why}")
        return why

    def _tell(self, text: str) -> None:
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            self._say(text)

    def _name(self, one: QueueLine) -> str:
        return f"{self._array}_{one.task}"


def _home(base: QueueLine, queue: GuestQueue) -> QueueWords:
    limit_s = base.limit_s or math.inf
    if queue.kind == "partition":
        return base.partition, "", "", limit_s, ""
    return "", base.qos, "", limit_s, ""


def _shown(queue: GuestQueue) -> str:
    return f"guests={queue.kind}:{queue.name}"
