"""What the command line says, as typed errors, and how often an unreachable controller is asked."""

from __future__ import annotations

import math
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from ones_db.shape import Shape
from ones_wrapper.protocol import slurm_commands
from slurm_ones.slurm.client import (
    NotPermitted,
    NotResizable,
    Refused,
    SlurmError,
    SlurmMissing,
    UnknownJob,
    Unreachable,
)
from slurm_ones.slurm.command import CommandClient, error_of, with_retries
from slurm_ones.slurm.model import Queue, Quota, Quotas, Task
from slurm_ones.slurm.sacct import Sacct


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Unreachable),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", Unreachable),
        ("Unexpected message received for job 1", Unreachable),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", Unreachable),
        ("slurm_load_jobs error: Invalid job id specified", UnknownJob),
        ("Invalid job id specified for job 9", UnknownJob),
        ("Access/permission denied for job 39", NotPermitted),
        ("Invalid user id for job 40 slurm_suspend error:Invalid user id", NotPermitted),
        ("Update of this parameter is not supported: NtasksPerNode=2", NotResizable),
        ("Node count specification invalid for job 6", NotResizable),
        ("Requested node configuration is not available for job 6", NotResizable),
        ("Invalid generic resource (gres) specification for job 6", NotResizable),
        ("Job is no longer pending execution for job 30", NotResizable),
        ("Job update not available right now, the DB index is being set, try again in a bit", Refused),
        ("scancel: error: Unknown job signal: FOO", Refused),
        ("", Refused),
    ],
)
def test_answers_of_slurm(answer: str, kind: type[SlurmError]) -> None:
    """The words of 22.05 and 26.05, as seen on both, are typed; what nobody knows is a plain error that quotes it."""
    error = error_of("scontrol update", answer)
    assert type(error) is kind
    assert answer in str(error)


def test_commands_keep_to_what_slurm_takes() -> None:
    """The pair N-N, a user hold, `Incomplete`, and GPUs only where Slurm knows of them."""

    def reshaped(*, whole: bool = False, **more: Any) -> list[str]:
        return slurm_commands.reshape_command(7, Shape(2, 4), whole_nodes=whole, **{"kind": "", **more})[3:]

    same = ["NumNodes=2-2", "NumCPUs=2"]
    assert reshaped() == [*same, "Gres=gpu:4"]
    assert reshaped(kind="a100") == [*same, "Gres=gpu:a100:4"]
    assert reshaped(kind="a100", others="nvme:2,tmp") == [*same, "Gres=gpu:a100:4,nvme:2,tmp"]
    assert reshaped(tasks=True, cpus_per_gpu=3) == [same[0], "NumCPUs=24", "NumTasks=2", "Gres=gpu:4"]
    assert reshaped(whole=True) == same
    assert reshaped(whole=True, tasks=True) == [*same, "NumTasks=2"]
    there = ["Partition=scavenge", "QOS=guest", "Account=guests", "TimeLimit=10"]
    assert reshaped(whole=True, queue=Queue("scavenge", "guest", "guests", 659.0)) == [*same, *there]
    for given, word in (("none", ""), ("matlab:2,idl:1", "matlab:2,idl:1"), ("nonesuch:1", "nonesuch:1")):
        assert reshaped(whole=True, queue=Queue(licenses=given)) == [*same, f"Licenses={word}"]
    for seconds, word in ((659.0, "10"), (math.inf, "UNLIMITED")):
        assert slurm_commands.move_command(7, Queue(time_limit_s=seconds))[-1] == f"TimeLimit={word}"
    assert slurm_commands.hold_command(7) == ["scontrol", "uhold", "7"]
    assert slurm_commands.requeue_command(7) == ["scontrol", "requeuehold", "Incomplete", "7"]
    assert slurm_commands.release_commands(7) == [["scontrol", "release", "7"]]
    assert slurm_commands.release_commands(7, start="now")[0][-1] == "StartTime=now"


def fake(directory: Path, name: str, text: str) -> None:
    """A command that does as the text says."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of the PATH, beside the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_no_slurm_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message asks the right question."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match="PATH"):
        CommandClient().version()


def test_a_command_that_cannot_be_started_is_unreachable(commands: Path) -> None:
    """As on a login node with too many processes: a companion that stops must not end in the middle of it."""
    for name in ("squeue", "scancel", "sacct"):
        (commands / name).write_bytes(b"no program")
        (commands / name).chmod(0o755)
    for call in (
        lambda: CommandClient().run(["squeue"]),
        lambda: CommandClient()._signal_once(["scancel", "7"]),
        lambda: Sacct(),
    ):
        with pytest.raises(Unreachable, match=r"^(squeue|scancel|sacct): cannot be started: Exec format error"):
            call()


def test_a_command_that_hangs_is_unreachable(commands: Path) -> None:
    """A tick does not wait for ever."""
    fake(commands, "scontrol", "sleep 60")
    with pytest.raises(Unreachable, match="no answer within"):
        CommandClient(timeout_s=0.2).version()


def test_every_try_is_a_sign_of_life(commands: Path) -> None:
    """A companion that waits for a slow controller, call after call, must not be taken for one that hangs."""
    fake(commands, "squeue", "sleep 60")
    keepalive: list[float] = []
    with pytest.raises(Unreachable):
        CommandClient(timeout_s=0.1, keepalive=lambda: keepalive.append(time.monotonic())).job(7)
    assert len(keepalive) == 4


def test_a_users_own_formats_are_not_used(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQUEUE_FORMAT, SCONTROL_ALL and the like would change what is read."""
    monkeypatch.setenv("SCONTROL_ALL", "1")
    monkeypatch.setenv("SCANCEL_INTERACTIVE", "1")  # scancel would ask for ever, of nobody
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    fake(
        commands, "scontrol", 'echo "slurm 22.05.8"; test -z "$SCONTROL_ALL$SCANCEL_INTERACTIVE" && test "$LC_ALL" = C'
    )
    assert CommandClient().version() == (22, 5)


def test_an_upgrade_of_slurm_changes_the_columns(commands: Path) -> None:
    """A companion runs on meanwhile; 26.05 shows in another column who has nodes to himself."""
    fake(commands, "squeue", f'echo "$SQUEUE_FORMAT2" >> {commands}/asked')
    client = CommandClient()
    for release in ("25.11.4", "26.05.0"):
        fake(commands, "scontrol", f"echo slurm {release}")
        assert client._queue() == {}
    asked = (commands / "asked").read_text().splitlines()
    assert [name in line for line in asked for name in ("OverSubscribe:", "Exclusive:")] == [True, False, False, True]


def test_json_that_is_none(commands: Path) -> None:
    """A Slurm without its JSON plugin is told what is missing."""
    fake(commands, "scontrol", "echo slurm 26.05.5")
    fake(commands, "squeue", "echo no serializer")
    with pytest.raises(Refused, match="serializer/json"):
        CommandClient().job(7)


def test_more_jobs_than_an_argument_holds(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects everybody's tick from whoever submits twenty thousand jobs at once. Unknown jobs hide no others."""
    monkeypatch.setattr(time, "sleep", lambda s: None)
    known = """printf '{"jobs":[{"job_id":10000000}]}'"""
    unknown = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    fake(commands, "squeue", f"case $* in *=10000000,*) {known};; *) {unknown};; esac")
    assert [*CommandClient().details(range(10_000_000, 10_020_000))] == [10_000_000]


def test_text_that_is_not_utf8_does_not_stop_a_tick(commands: Path) -> None:
    """A job's name may be of any encoding."""
    fake(commands, "scontrol", "echo slurm 26.05.5")
    fake(commands, "squeue", """printf '{"jobs":[{"job_id":7,"name":"gr\\374n"}]}'""")
    assert CommandClient().job(7).name == "gr\N{REPLACEMENT CHARACTER}n"


def test_a_silent_controller_is_asked_again(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the status does not tell is one all the same; the second answer counts."""
    monkeypatch.setattr(time, "sleep", lambda s: None)
    fault = '{"errors":[{"description":"Failed while looking for jobs","error":"x"}],"jobs":[]}'
    fine = '{"errors":[],"jobs":[{"job_id":7}]}'
    fake(commands, "scontrol", "echo slurm 26.05.5")
    fake(
        commands,
        "squeue",
        f"if test -e {commands}/asked; then echo '{fine}'; else echo '{fault}'; fi; : > {commands}/asked",
    )
    assert CommandClient().job(7).job_id == 7


class Flaky:
    """Fails a number of times, then answers."""

    def __init__(self, failures: int, error: SlurmError) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error
        return self.calls


def test_unreachable_is_asked_again_a_few_times() -> None:
    """The answer after two failures counts; after the last attempt the error is the caller's."""
    assert with_retries(Flaky(2, Unreachable("silent")), first_s=0.001) == 3
    deaf = Flaky(99, Unreachable("silent"))
    with pytest.raises(Unreachable, match="silent"):
        with_retries(deaf, attempts=3, first_s=0.001)
    assert deaf.calls == 3


def test_a_slow_controller_is_not_asked_for_ever() -> None:
    """Slurm's own commands wait, too: nothing is begun again after the limit."""
    deaf = Flaky(99, Unreachable("silent"))
    with pytest.raises(Unreachable):
        with_retries(deaf, attempts=50, first_s=0.02, most_s=0.02, give_up_s=0.05)
    assert deaf.calls < 50


def test_other_errors_are_not_asked_again() -> None:
    """A refusal stays a refusal."""
    refused = Flaky(1, NotPermitted("denied"))
    with pytest.raises(NotPermitted):
        with_retries(refused)
    assert refused.calls == 1


WAITS = '{"jobs":[{"job_id":7,"array_job_id":7,"array_task_string":"1-3","job_state":["PENDING"]}]}'


def runs(task: int, throttle: int, state: str = "RUNNING") -> str:
    return (
        f'{{"jobs":[{{"job_id":8,"array_job_id":7,"array_task_id":{{"set":true,"number":{task}}},'
        f'"array_max_tasks":{throttle},"job_state":["{state}"]}}]}}'
    )


def test_a_signal_to_a_task_is_sent_once(commands: Path) -> None:
    """scancel would send it for minutes: it is ended as soon as it begins to."""
    fake(commands, "squeue", f"echo '{runs(0, 0)}'")
    said = "echo 'scancel: Job is in transitional state, retrying' >&2"
    fake(commands, "scancel", f"echo sent >> {commands}/sent; {said}; sleep 60; echo sent >> {commands}/sent")
    began = time.monotonic()
    CommandClient().signal(Task(7, 0), "USR1")
    assert time.monotonic() - began < 40
    assert (commands / "sent").read_text() == "sent\n"


@pytest.mark.parametrize(
    ("text", "kind", "timeout_s"),
    [
        (
            "echo 'scancel: error: Kill job error on job id 7_0: Access/permission denied' >&2; exit 210",
            NotPermitted,
            30,
        ),
        ("exec sleep 60", Unreachable, 1),
        ("exit 1", Refused, 30),
    ],
)
def test_a_signal_to_a_task_fails_as_any_command(
    commands: Path, text: str, kind: type[SlurmError], timeout_s: float
) -> None:
    """What scancel says beside its errors is no answer."""
    fake(commands, "squeue", f"echo '{runs(0, 0)}'")
    fake(commands, "scancel", f"echo 'scancel: Signal 10 to job 7_0' >&2; {text}")
    with pytest.raises(kind):
        CommandClient(timeout_s=timeout_s).signal(Task(7, 0), "USR1")


def test_nothing_is_signalled_that_waits(commands: Path) -> None:
    """scancel would try for minutes."""
    fake(commands, "squeue", f"echo '{WAITS}'")
    with pytest.raises(Refused, match="waits"):
        CommandClient().signal(Task(7, 2), "USR1")


@pytest.mark.parametrize(("shown", "fine"), [(3, True), (1, False)])
def test_a_throttle_that_slurm_complains_of_is_read_back(commands: Path, shown: int, fine: bool) -> None:
    """Once a task has ended it says so, whether it did as it was told or not."""
    fake(commands, "scontrol", "echo '7_[3]: Job has already finished' >&2; exit 1")
    fake(commands, "squeue", f"echo '{runs(0, shown)}'")
    if fine:
        CommandClient().throttle(7, 3)
    else:
        with pytest.raises(Refused, match="already finished"):
            CommandClient().throttle(7, 3)


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED", "SUSPENDED", "COMPLETING"])
def test_what_may_not_be_used_again_is_not_touched(commands: Path, state: str) -> None:
    """The command would kill what runs, and bring back what its owner cancelled."""
    fake(commands, "scontrol", f"touch {commands}/touched")
    fake(commands, "squeue", f"echo '{runs(0, 0, state)}'")
    with pytest.raises(Refused, match=state):
        CommandClient().reuse(Task(7, 0))
    assert not (commands / "touched").exists()


def test_a_task_that_starts_between_look_and_hold_is_let_go(commands: Path) -> None:
    """A hold on it would keep it from coming back after a requeue."""
    later = runs(2, 0).replace('"job_state"', '"priority":0,"job_state"')
    fake(commands, "squeue", f"if test -e {commands}/said; then echo '{later}'; else echo '{WAITS}'; fi")
    fake(commands, "scontrol", f"echo $* >> {commands}/said")
    CommandClient().hold_waiting(7)
    assert (commands / "said").read_text() == "uhold 7_[1,2,3]\nrelease 7_2\n"


def test_of_what_waits_the_named_tasks_alone_are_held(commands: Path) -> None:
    """One that runs is not among those that wait, named or not."""
    fake(commands, "squeue", f"echo '{WAITS}'")
    fake(commands, "scontrol", f"echo $* >> {commands}/said")
    CommandClient().hold_waiting(7, [1, 3, 9])
    CommandClient().hold_waiting(7, [9])
    assert (commands / "said").read_text() == "uhold 7_[1,3]\n"


@pytest.mark.parametrize("sacctmgr", ["echo 'guest|0.000000'", "echo refused >&2; exit 1", "sleep 60"])
def test_quotas_without_slurmdbd(commands: Path, sacctmgr: str) -> None:
    """What the controller knows is enough; nobody is asked where there is no accounting."""
    known = "ClusterName=c Account=lab UserName= Partition= ParentAccount=root(1) GrpTRES=gres/gpu=12(2) MaxTRESPJ="
    fake(commands, "scontrol", f"echo '{known}'")
    fake(commands, "sacctmgr", sacctmgr)
    found = CommandClient(timeout_s=2.0 if "sleep" not in sacctmgr else 0.2).quotas(["alice"])
    assert found.all == (Quota("gres/gpu", 12, 2, account="lab"),)
    assert found.usage_factors == ({"guest": 0.0} if "guest" in sacctmgr else {})
    fake(commands, "scontrol", "echo 'No associations currently cached in Slurm.'")
    assert CommandClient().quotas(()) == Quotas()
