"""Where faults happen: a real Slurm with jobs of all kinds, and companions that something like systemd starts again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from ones_db import Store
from ones_wrapper.protocol import directory_name
from slurm_ones.jobs.elastic import whole_job
from slurm_ones.slurm.model import JobState, SlurmJob
from slurm_ones.slurm.parse import parse_jobs
from tests.cluster import Cluster, interpreter, linux, paths
from tests.cluster.spec import Bind
from tests.db.server import ADMIN, Server
from tests.endtoend.harness import DATABASE, LAUNCHER, TRAIN, BlockTask, Harness, processes
from tests.endtoend.random_policy import AWAY, GATE, QUIET, REACHED, RandomPolicy
from tests.guide.host import Host
from tests.slurm.whole import as_one

ELASTIC = "ones: gpus=1-8 batch=16-64"
ELASTIC_BLOCKS = f"{ELASTIC} array=blocks"
SMALL, FULL = "/small", "/full"
"""Small file systems inside: of the companion (database and spool), and of a job."""
SIZES = {SMALL: "32m", FULL: "2m"}
SETTINGS = """
database = "{database}"
cluster = "here"
mode = "act"
scope = "{scope}"
tick_s = 0.5
timeout_s = 5
policy = "{policy}"
stop_file = "{inside}/stop"
takeover_s = 3
{spool}
[policy_options]
folder = "{inside}"
[resize]
dwell_s = 0.1
max_wait_s = 4
drain_timeout_s = 6
start_timeout_s = {start_s}
advance_s = 0.1
preempted_s = 1
max_open = 6
park_lease_s = 20
blocks_wait_s = 5
blocks_dwell_s = 0.1
leave_s = 10
[limits]
near_end_s = 0
near_limit_s = 0
growth_cost = 1000
"""
GUEST = "guest"
"""The QOS of guests."""
GUEST_SETTINGS = f"""
[guests.gpu]
qos = "{GUEST}"
"""
AGAIN = signal.SIGUSR1
"""What ends a job so that it waits again, if preempted guests are cancelled (RequeueExit). With RequeueExit a companion
would hold no guest for its next start."""


@dataclass
class JobExpectation:
    """What may have become of a job, by what others than the companion did to it."""

    role: str
    """elastic, or one that is not the companion's to touch: stranger, rigid, bobs."""
    user: str
    first: SlurmJob | None = None
    """An untouchable job as it was at first."""
    ends: set[JobState] = field(default_factory=set)
    """States in which it may have ended."""
    others: int = 0
    """How often others may have had it requeued."""
    hold: str = ""
    """Who holds it: its owner, or an operator."""
    hold_sure: bool = False
    """Nobody had reason to end that hold."""
    begin: bool = False
    """Its owner gave it an earliest start."""
    impossible_request: bool = False
    """Its owner asked Slurm for what it cannot have."""
    opted_out: bool = False
    at_opt_out: SlurmJob | None = None
    """As it was when its owner had opted out and all was quiet."""
    done: bool = False
    """It has ended, as it may."""
    others_at_opt_out: int = 0
    """`others` at that time."""
    blocks: bool = False
    """It is a job of blocks."""
    full: bool = False
    """Its directory lies on the small disk: reports may be missing."""
    kept: set[int] = field(default_factory=set)
    """Tasks that its owner has held."""


@contextmanager
def small_disks(sizes: Mapping[str, str] = SIZES) -> Iterator[dict[str, Path]]:
    """The small file systems by their names inside. From here on this process and those that it starts have mounts of
    their own, so that nobody else sees these, and they go with it. It must not have threads yet."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    with tempfile.TemporaryDirectory(prefix="ones-disks-") as folder:
        disks = {}
        for place, size in sizes.items():
            disks[place] = Path(folder) / place.lstrip("/")
            disks[place].mkdir()
            linux.mount("tmpfs", str(disks[place]), "tmpfs", 0, f"size={size},mode=1777")
        try:
            yield disks
        finally:
            for disk in disks.values():
                linux.detach(str(disk))


class Companion:
    def __init__(self, supervisor: subprocess.Popen[str], folder: Path) -> None:
        self._supervisor = supervisor
        self._folder = folder

    @property
    def pid(self) -> int | None:
        """The companion's own process, as the host numbers it; None while there is none."""
        pid = self._supervisor.pid
        with suppress(OSError, ValueError, IndexError):
            # The process that entered the box, the supervisor in there, the companion.
            for _ in range(2):
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            return pid
        return None

    def signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, absent_s: float = 0.0) -> None:
        """SIGKILL; it stays away for so long at least."""
        (self._folder / AWAY).write_text(str(time.time() + absent_s))
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        self._supervisor.kill()
        self._supervisor.wait()


UNIT = paths.REPOSITORY / "slurm_ones/service/units/slurm-ones.service"
DROP_IN = f"""
[Service]
ExecStart=
ExecStart={{python}} -m tests.endtoend.random_policy {{inside}} --config {{inside}}/ones.toml --act --verbose
WorkingDirectory={paths.REPOSITORY}
User={{user}}
Group={{user}}
Environment=PYTHONDONTWRITEBYTECODE=1
ReadWritePaths=/scratch {SMALL} {FULL}
StandardOutput=append:{{inside}}/companion.log
StandardError=inherit
RestartSec=0.5s
# SIGTERM is a fault here, and not an administrator's wish.
Restart=always
"""


class Service(Companion):
    """One companion as the unit that sites install, on a host with a systemd of its own."""

    def __init__(self, host: Host, folder: Path, drop_in: str) -> None:
        self.host, self._folder = host, folder
        units = host.root / "etc/systemd/system"
        shutil.copy(UNIT, units)
        override = units / f"{UNIT.name}.d"
        override.mkdir()
        (override / "site.conf").write_text(drop_in)
        host.sh(f"systemctl daemon-reload && systemctl start --no-block {UNIT.name}")

    def signal(self, number: signal.Signals) -> None:
        self.host.ask(f"systemctl kill --kill-whom=main --signal={int(number)} {UNIT.name}")

    def end(self) -> None:
        self.host.stop()


class FaultSite:
    """One cluster with jobs, companions and a database. `random` decides all that is left open."""

    def __init__(
        self,
        cluster: Cluster,
        disks: Mapping[str, Path],
        choice: random.Random,
        *,
        own: bool = True,
        server: Server | None = None,
        companions: int = 1,
        torch: int = 0,
        blocks: int = 2,
        systemd: bool = False,
        guests: str = "",
    ) -> None:
        """`disks` are those of `small_disks`, which the cluster shows inside. `own`: user mode, by alice; else an
        operator's, with a spool. `torch` of the jobs train for real, `blocks` are jobs of
        blocks. With `systemd` each companion is a service on a host of its own. By `guests`, a PreemptMode, jobs of
        blocks grow by guests."""
        self.cluster, self.harness, self.random = cluster, Harness(cluster), choice
        self._disks = disks
        self.own, self.server, self._torch, self._blocks = own, server, torch, blocks
        self.guests = guests
        self.user = "alice" if own else self.harness.operator
        self.folder = self.harness.folder("faults")
        self.inside = f"/scratch/{self.folder.name}"
        self.expected: dict[int, JobExpectation] = {}
        self.repairs: list[Callable[[], None]] = []
        """What ends a fault, before all has to be quiet again."""
        self.undo_later: list[tuple[int, Callable[[], bool]]] = []
        """What people undo, after so many faults more."""
        self.acted_at = 0.0
        """When people last changed something in Slurm, in seconds since 1970."""
        self._log_read = 0
        self._clean()
        self.spool = f"{SMALL}/spool"
        self._database()
        (self.folder / QUIET).touch()
        start_s = 40 if torch else 12
        spool = "" if own else f'spool = "{self.spool}"'
        scope = "own" if own else "all"
        text = SETTINGS.format(
            database=self.database,
            scope=scope,
            policy=RandomPolicy.name,
            inside=self.inside,
            spool=spool,
            start_s=start_s,
        )
        if guests:
            self._admit_guests()
            text += GUEST_SETTINGS
        (self.folder / "ones.toml").write_text(text)
        self.settings = f"{self.inside}/ones.toml"
        make = self._service if systemd else self._supervised
        self.companions = [make(number) for number in range(companions)]

    # -- what is there -------------------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Empty the small disks, and make what has to be there."""
        box = self.cluster.box
        for place in SIZES:
            box.run(["find", place, "-mindepth", "1", "-delete"])
        box.run(["install", "-d", "-o", self.user, f"{SMALL}/db", f"{SMALL}/spool"])
        box.run(["install", "-d", "-o", "alice", f"{FULL}/alice"])

    def _database(self) -> None:
        if self.server is None:
            self.database = f"sqlite:///{SMALL}/db/{DATABASE}"
            self.database_outside = f"sqlite:///{self.outside(f'{SMALL}/db/{DATABASE}')}"
            return
        name = self.server.fresh()
        self.show_server()
        self.database = f"postgresql://{ADMIN}@/{quote(name)}?host={self.inside}"
        self.database_outside = self.server.url(name)

    def _admit_guests(self) -> None:
        """An operator's companion needs no user to have the QOS."""
        conf = self.cluster.root / "etc/slurm/slurm.conf"
        lines = [line for line in conf.read_text().splitlines() if not line.startswith("RequeueExit")]
        lines += [f"RequeueExit={128 + AGAIN}"] if self.guests == "cancel" else []
        conf.write_text("".join(f"{line}\n" for line in lines))
        self.cluster.run(["scontrol", "reconfigure"], user="root")
        users = f"normal,{GUEST}" if self.own else "normal"
        for change in (f"qos {GUEST} set preemptmode={self.guests}", f"user alice set qos={users}"):
            self.cluster.run(["sacctmgr", "-i", "modify", *change.split()], user="root", check=False)

    def show_server(self) -> None:
        """Show the server's socket inside: by a second name, anew after each start."""
        assert self.server is not None
        name = ".s.PGSQL.5432"
        (self.folder / name).unlink(missing_ok=True)
        os.link(self.server.place / name, self.folder / name)

    def outside(self, inside: str) -> Path:
        """The host's name of a path on a small disk."""
        _, place, *rest = inside.split("/")
        return self._disks[f"/{place}"].joinpath(*rest)

    def _supervised(self, number: int) -> Companion:
        command = [self.cluster.python, "-m", "tests.endtoend.random_policy", self.inside]
        command = [*command, "--config", self.settings, "--act", "--verbose"]
        return Companion(self.harness.start(command, self.settings, user=self.user, cwd=paths.REPOSITORY), self.folder)

    def _service(self, number: int) -> Companion:
        host = Host(self.cluster, f"h{number}")
        shown = {"/scratch": self.cluster.scratch} | {place: self._disks[place] for place in SIZES}
        shown |= {f"/home/{user}": self.cluster.home(user) for user in ("alice", "bob")}
        slurm = self.folder / "slurm"
        shutil.copytree(self.cluster.root / "etc/slurm", slurm, dirs_exist_ok=True)
        for key in slurm.glob("*.key"):
            shutil.copystat(self.cluster.root / "etc/slurm" / key.name, key)
            os.chown(key, *self.cluster.box.ids("slurm"))
        binds = [Bind(str(path), place, writable=True) for place, path in shown.items()]
        binds += [Bind(str(slurm), "/etc/slurm"), Bind(str(slurm / "hosts"), "/etc/hosts")]
        (slurm / "hosts").write_text(f"{(self.cluster.root / 'etc/hosts').read_text()}127.0.0.1 {host.full_name}\n")
        (slurm / host.name).write_text(f"{host.full_name}\n")
        binds += [Bind(str(slurm / host.name), "/etc/hostname"), *interpreter.environment_binds()]
        host.boot(binds, os.getpid())
        # As systemd has it on a machine that is no container: a service sees what is mounted after its start.
        host.sh("mount --make-rshared /")
        text = DROP_IN.format(python=self.cluster.python, inside=self.inside, user=self.user)
        return Service(host, self.folder, text)

    def store(self) -> Store:
        return Store.open(self.database_outside, "here", read_only=True)

    def companion_log(self) -> str:
        """What companions have said since the last call of `skip_log`."""
        path = self.folder / "companion.log"
        with path.open("rb") as log:
            log.seek(self._log_read)
            return log.read().decode(errors="replace")

    def skip_log(self) -> None:
        self._log_read = (self.folder / "companion.log").stat().st_size

    # -- jobs ----------------------------------------------------------------------------------------------------

    def populate(self) -> None:
        """Submit what is missing: five elastic jobs, and once those that are nobody's to touch."""
        if not self.expected:
            bobs = ("--comment=" + ELASTIC,)
            untouched = [
                (
                    self.light("--comment=gpus=1-16, but not for ones", "--nodelist=n1"),
                    JobExpectation("stranger", "alice"),
                ),
                (self.rigid("--nodelist=n1", "--gres=gpu:1"), JobExpectation("rigid", "bob")),
            ]
            if self.own:
                untouched.append((self.light(*bobs, "--nodelist=n1", user="bob"), JobExpectation("bobs", "bob")))
            for job_id, expected in untouched:
                expected.first = self.harness.wait(job_id, lambda job: job.running, "running")
                self.expected[job_id] = expected
        while len(self.elastic()) < 5:
            count = len(self.elastic())
            full = not any(expected.full for expected in self.elastic().values())
            in_blocks = sum(expected.blocks for expected in self.elastic().values())
            blocks = not full and in_blocks < self._blocks
            if full:
                self.outside(FULL).joinpath("ballast").unlink(missing_ok=True)
                job_id = self.light(f"--comment={ELASTIC}", f"--chdir={FULL}/alice", "--output=/dev/null")
            elif blocks:
                job_id = self.harness.blocks(f"--comment={ELASTIC_BLOCKS}", **self._light_env())
            elif count - in_blocks <= self._torch:
                job_id = self._trains()
            else:
                job_id = self.light(f"--comment={ELASTIC}")
            self.expected[job_id] = JobExpectation("elastic", "alice", blocks=blocks, full=full)

    def elastic(self) -> dict[int, JobExpectation]:
        """The jobs that the companion looks after."""
        return {
            id_: expected for id_, expected in self.expected.items() if expected.role == "elastic" and not expected.done
        }

    def _spooled(self) -> dict[str, str]:
        return {} if self.own else {"ONES_SPOOL": self.spool}

    def light(self, *options: str, user: str = "alice") -> int:
        return self.harness.light(*options, user=user, **self._light_env())

    def _light_env(self) -> dict[str, str]:
        leaves = {"LIGHT_LEAVES": "1"} if self.guests else {}
        return {"LIGHT_AGAIN": "1", "LIGHT_STEP_S": "0.2", **leaves, **self._spooled()}

    def _trains(self) -> int:
        arguments = ("--epochs", "100000", "--samples", "640", "--batch", "16", "--step-ms", "200")
        options = ("--comment=ones: gpus=1-2 batch=16-32",)
        return self.harness.submit(str(TRAIN), *arguments, options=options, **self._spooled())

    def rigid(self, *options: str) -> int:
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", "exec sleep 86400"]
        return int(self.cluster.run(command, user="bob").stdout)

    def crowd(self, gpus: int) -> int:
        """Rigid jobs that come for so many GPUs, as an array."""
        return self.rigid("--gres=gpu:1", f"--array=1-{max(gpus, 1)}")

    def records(self) -> dict[int, SlurmJob]:
        """All jobs as Slurm has them."""
        command = ["squeue", "--json", "--states=all"]
        return parse_jobs(json.loads(self.cluster.run(command, user="root", timeout=30).stdout))

    def usable_nodes(self) -> list[str]:
        """Nodes of partition gpu on which jobs may start."""
        shown = self.cluster.run(["sinfo", "-hN", "-p", "gpu", "-o", "%N %T"], user="root").stdout.splitlines()
        return [name for name, state in map(str.split, shown) if state in ("idle", "mixed", "allocated", "completing")]

    def preempted(self) -> list[tuple[int, str]]:
        """The runs that Slurm has preempted so far: whose, by the own ids of blocks, and in which QOS."""
        command = "sacct -anPDX --starttime=now-1day --format=JobIDRaw,QOS,State"
        rows = [row.split("|") for row in self.cluster.run(command.split(), user="root").stdout.splitlines()]
        return [(int(job_id), qos) for job_id, qos, state in rows if state == "PREEMPTED"]

    def jobs(self) -> dict[int, SlurmJob]:
        """All jobs as Slurm has them; a job of blocks as one, in its newest term."""
        found = self.records()
        # Whatever their comment says by now.
        in_blocks = {job_id for job_id, expected in self.expected.items() if expected.blocks}
        records = [job for job in found.values() if job.array_id in in_blocks and job.array_tasks]
        folded = {
            array: as_one(
                whole_job(array, [job for job in records if job.array_id == array], term=self.terms(array) - 1)
            )
            for array in {job.array_id for job in records}
        }
        return {id_: job for id_, job in found.items() if job.array_id not in folded} | folded

    def tasks(self, job_id: int) -> dict[int, BlockTask]:
        return self.harness.tasks(job_id)

    def terms(self, job_id: int) -> int:
        """How many runs a job has reported of."""
        return max(len(list(self.directory(job_id).glob("reports-*.jsonl"))), 1)

    def directory(self, job_id: int) -> Path:
        """The host's name of a job's directory."""
        expected = self.expected[job_id]
        home = self.outside(f"{FULL}/alice") if expected.full else self.cluster.home(expected.user)
        return home / directory_name(job_id)

    def pids(self, job_id: int, task: int | None = None) -> list[int]:
        """The processes of a job, or of one of its blocks, that do its work, the youngest last."""
        named = [f"SLURM_JOB_ID={job_id}"]
        if self.expected[job_id].blocks:
            named = [f"SLURM_ARRAY_JOB_ID={job_id}", *([f"SLURM_ARRAY_TASK_ID={task}"] if task is not None else [])]
        return processes(self.cluster, named, (b"light", LAUNCHER))

    def scontrol(self, *arguments: str, user: str = "alice", timeout: float = 20.0) -> bool:
        """What a person types; whether Slurm took it."""
        try:
            return self.cluster.run([*arguments], user=user, check=False, timeout=timeout).returncode == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.acted_at = time.time()

    # -- moments -------------------------------------------------------------------------------------------------

    def set_quiet(self, on: bool) -> None:
        if on:
            (self.folder / QUIET).touch()
        else:
            (self.folder / QUIET).unlink(missing_ok=True)

    def await_gate(self, at: str, patience_s: float) -> int | None:
        """Wait until a companion stands at that gate; the job whose resize it is, None where nobody came."""
        gate, reached = self.folder / GATE, self.folder / REACHED
        reached.unlink(missing_ok=True)
        half = self.folder / "gate.new"
        half.write_text(at)
        half.chmod(0o666)
        half.rename(gate)
        until = time.monotonic() + patience_s
        while not reached.exists() and time.monotonic() < until:
            time.sleep(0.02)
        gate.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            return int(json.loads(reached.read_text())["job"])
        return None

    @property
    def at_gate(self) -> bool:
        """A companion stands there."""
        return (self.folder / REACHED).exists()

    def open_gate(self) -> None:
        (self.folder / GATE).unlink(missing_ok=True)
        (self.folder / REACHED).unlink(missing_ok=True)

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Take down all but the cluster."""
        for companion in self.companions:
            companion.end()
        self.harness.clear()
