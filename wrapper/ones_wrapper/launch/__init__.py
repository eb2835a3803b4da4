"""`ones-run`: starts the ranks on the present allocation, and starts them again after a crash.

`ones-run` runs in the batch script, in place of `srun`, and gets Slurm's signals to the batch script. It imports only
the standard library, to start fast.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ones_wrapper.files.claim import Claim, ClaimedError
from ones_wrapper.files.job_lock import holder
from ones_wrapper.files.node_memory import FOLDER
from ones_wrapper.files.places import find_job_directory, find_spool, own_job
from ones_wrapper.files.resume import find_earlier, prepare_job_directory
from ones_wrapper.files.run_id import run_id, seeds
from ones_wrapper.launch import bytecode, container
from ones_wrapper.launch.blocks import FIRST_WAIT_S, OtherBlocks
from ones_wrapper.launch.fused_start import FUSED, before_ranks
from ones_wrapper.launch.launchers import LAUNCHERS, MPI_TYPES, Ask, Find, Layout, Started, ask, launcher_named
from ones_wrapper.launch.main_module import MODULE
from ones_wrapper.launch.restart_policy import RestartLimits
from ones_wrapper.launch.supervise import Supervisor
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.network.job_network import PLACE, STORE, JobNetwork, node_name
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.block import Block, own_block
from ones_wrapper.process.exit_codes import USAGE_ERROR
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import (
    LaunchError,
    allocation,
    contract,
    free_port,
    number,
    require_torch,
    without_stale,
)
from ones_wrapper.protocol import HOT, directory_name
from ones_wrapper.protocol.choices import near

BACKENDS = ("nccl", "gloo", "mpi")

_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS")
"""Environment variables besides ours that a launcher must pass to all nodes."""
_PREFIXES = (
    *("PYTHONHASHSEED", "ONES_", "SLURM_RESTART", "SLURM_ARRAY_"),
    *("NCCL_", "GLOO_", "CUDA_", "TORCH_", "PYTORCH_", "UCX_", "FI_"),
)
"""Prefixes of further variables to pass, since nodes with different NCCL settings, for example, hang.
CUDA_VISIBLE_DEVICES is not passed."""
_OURS = "ONES_OURS"
"""Name of the variable that lists the variables set for the ranks by `ones-run`, and not by the user."""
_BY_JOB = re.compile(rf"{directory_name(0)[:-1]}\d+", re.ASCII)
"""Pattern of the names of job directories that `ones-run` chose, and not the user."""


@dataclass(frozen=True)
class LaunchOptions:
    """The user's options for starting ranks; None for an option not given."""

    launcher: str | None = None
    mpi: str | None = None
    backend: str | None = None
    ranks_per_node: int | None = None
    container: tuple[str, ...] = ()
    """Words in front of a command that run it in a container; empty if no container is used."""

    @property
    def talks_mpi(self) -> bool:
        """True if ranks are processes that an MPI's process manager starts."""
        return self.mpi not in (None, "none") or self.backend == "mpi"

    @classmethod
    def of(cls, env: Mapping[str, str], args: argparse.Namespace) -> LaunchOptions:
        """Return the options from the command line, or else from the environment. Raises `LaunchError`."""
        return cls(
            args.launcher or env.get("ONES_LAUNCHER") or None,
            args.mpi or _choice(env, "ONES_MPI", MPI_TYPES),
            args.backend or _choice(env, "ONES_BACKEND", BACKENDS),
            args.ranks_per_node or number(env, "ONES_GPUS_PER_NODE"),
            tuple(container.words_of(args.container or env.get(container.CONTAINER))),
        )


def _choice(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str | None:
    value = env.get(name)
    if value and value not in choices:
        raise LaunchError(f"{name}={value!r} is none of {', '.join(choices)}")
    return value or None


def plan(
    env: Mapping[str, str],
    script: str,
    arguments: Sequence[str],
    *,
    job_dir: Path,
    options: LaunchOptions = LaunchOptions(),
    find: Find = shutil.which,
    ask: Ask = ask,
    now: float = 0.0,
    attempt: int = 0,
    retries: int = 3,
) -> Started:
    """Return the command and environment that start SCRIPT on the allocation in `env`.

    `find` returns a program's path, `ask` runs a program and returns its output. `now` is the Unix time at which
    `ones-run` began. `attempt` is the number of earlier starts of the ranks, and `retries` is as in `RestartLimits`.
    Raises `LaunchError`.
    """
    has = allocation(env, options.ranks_per_node)
    mpi, direct = options.mpi or "none", options.talks_mpi
    name = options.launcher or ("srun" if has.slurm else "mpirun" if direct else "local")
    if name == "srun" and direct and mpi == "none":
        raise LaunchError("with srun, MPI needs --mpi pmi2 or pmix, whichever the MPI was built for (srun --mpi=list)")
    if name != "srun" and mpi != "none":
        raise LaunchError(f"--mpi {mpi} is for srun; with {name} say --backend mpi")
    if options.container and direct:
        raise LaunchError("--container: ranks that talk MPI are not started in containers; use gloo or nccl")
    own = {
        "MASTER_ADDR": has.address,
        "MASTER_PORT": str(free_port()),
        "ONES_NODES": str(has.nodes),
        "ONES_GPUS_PER_NODE": str(has.ranks_per_node),
        "ONES_JOB_DIR": str(job_dir),
        "ONES_LAUNCHED": f"{now:.3f}",
        "ONES_LAUNCHER": name,
        "ONES_ATTEMPT": str(attempt),
        **contract(has, attempt, retries),
    }
    if backend := options.backend or ("mpi" if direct else ""):
        own["ONES_BACKEND"] = backend
    if options.container:
        own |= container.outside(options.container)
    own[_OURS] = " ".join(sorted({name for name in own if name not in env} | {*env.get(_OURS, "").split()}))
    clean = without_stale(env) | own
    exported = sorted(
        k for k in clean if k in _EXPORTED or k in own or (k.startswith(_PREFIXES) and k != "CUDA_VISIBLE_DEVICES")
    )
    module = "ones_wrapper.launch.rank" if direct else "ones_wrapper.launch.node"
    command = [sys.executable, "-m", module, script, *arguments]
    if options.container:
        command = container.command(options.container, [module, script, *arguments])
    started = launcher_named(name)(Layout(has, command, direct, mpi, exported), find, ask)
    return replace(started, env=clean | started.env, launcher=name)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"ones-run {container.own_version()}")
        parser.exit()


class _NewSecret(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: object, job: object, *_: object) -> None:
        try:
            new_secret(str(job), os.environ, Path.cwd())
        except LaunchError as error:
            log(str(error), "ones-run")
            parser.exit(USAGE_ERROR)
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Parser that names the option closest to an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        super().error(message + (near(unknown[1], _HELP) if unknown else ""))


_HELP = {
    "--gpus-per-node": "ranks per node where Slurm does not know of GPUs (whole nodes), and outside Slurm",
    "--launcher": f"what starts processes on the nodes: {', '.join(LAUNCHERS)}, one that a package adds, or "
    "package.module:function (srun; outside Slurm local)",
    "--mpi": "start MPI ranks with srun, by this plugin of Slurm (none)",
    "--container": "start the ranks in a container on each node: the words that stand before a command, such as "
    "'apptainer exec --nv image.sif' (also ONES_CONTAINER)",
    "--backend": "what ranks exchange gradients by; mpi starts MPI ranks",
    "--retries": "starts of the ranks in a row after a crash, without a newer checkpoint (3)",
    "--requeues": "requeues of the job when its time is over (20)",
    "--blocks": "this is a task of a job array (sbatch --array=0-7%%1) whose tasks are blocks of one job: they can "
    "join and leave it while it trains (also ONES_BLOCKS=1)",
    "--fuse": "train other jobs of this sweep that wait within this one, or find that another has done so: for jobs "
    "with fuse=NAME in their comment, and scripts that call ones.strategies.sweep",
    "--resume-from": "begin with the newest good checkpoint of an earlier job, by its id or its directory, which stays "
    "as it is (also ONES_RESUME_FROM)",
    "--preload": "modules that the script imports (torchvision,sklearn.datasets), to be imported once a node instead "
    "of once a rank; not any that initialise CUDA",
    "--new-secret": "give a job, by its id or its directory, another secret by which its processes know each other, "
    "and start nothing: after others saw the secret, and while the job does not run",
    "--version": "print the version and start nothing",
    "--dry-run": "print the command and start nothing",
    "-m": "SCRIPT is a module (package.module), run as by python -m",
    "script": "the training script",
    "arguments": "passed on to it",
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ones-run",
        description="Start SCRIPT on every GPU of this Slurm job, one rank a GPU, at the job's present size. "
        "Outside Slurm it runs the ranks on this machine.",
        epilog="The job's directory is ONES_JOB_DIR, or ones-<job id> in ONES_JOB_ROOT, or else in the working "
        "directory (of blocks ones-<array's job id>). Exit codes: the script's; 128+n after signal n (143: stopped, "
        "training is not finished); 100: not to be started again; 101: out of memory; 102: the ranks hung; 103: other "
        "blocks were lost again and again; 105: a GPU failed; 2: nothing could be started, or not on these GPUs. A "
        "block that left ends with 0.",
    )

    def add(*names: str, **how: Any) -> None:
        parser.add_argument(*names, help=_HELP[names[0]], **how)

    count, switch = {"type": int, "metavar": "N"}, {"action": "store_true"}
    add("--gpus-per-node", "--ranks-per-node", dest="ranks_per_node", **count)
    add("--launcher", metavar="NAME")
    add("--mpi", choices=MPI_TYPES)
    add("--container", metavar="WORDS")
    add("--backend", choices=BACKENDS)
    add("--retries", **count)
    add("--requeues", **count)
    add("--blocks", **switch)
    add("--fuse", **switch)
    add("--resume-from", metavar="JOB", default="")
    add("--preload", metavar="MODULES")
    add("--new-secret", action=_NewSecret, metavar="JOB")
    add("--version", action=_Version, nargs=0)
    add("--dry-run", **switch)
    add("-m", dest="module", **switch)
    add("script", metavar="SCRIPT")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return parser


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of another job, one of whose ranks submitted this job. Keeps what
    the user set."""
    own = {name: value for name, value in env.items() if name not in ("ONES_LAUNCHED", STORE, PLACE)}
    if "ONES_LAUNCHED" in env and env.get("TORCHELASTIC_RUN_ID") != env.get("SLURM_JOB_ID", "0"):
        for name in ("ONES_BLOCKS", "ONES_FORK", "ONES_OWN_CARD", FOLDER, FUSED, _OURS, *own.get(_OURS, "").split()):
            own.pop(name, None)
        if _BY_JOB.fullmatch(Path(own.get("ONES_JOB_DIR", "")).name):
            del own["ONES_JOB_DIR"]
    return own


def _limit(env: Mapping[str, str], option: str, given: int | None, default: int) -> int:
    if given is not None and given < 0:
        raise LaunchError(f"--{option} {given}: must be 0 or more")
    found = number(env, f"ONES_{option.upper()}") if given is None else given
    return default if found is None else found


def wanted_block(env: dict[str, str], asked: bool, options: LaunchOptions) -> Block | None:
    """Return this task's block if the user wants blocks; else None, and remove ONES_BLOCKS from `env`."""
    given = env.pop("ONES_BLOCKS", "")
    if given not in ("", "0", "1"):
        raise LaunchError(f"ONES_BLOCKS={given!r}: must be 1 or 0")
    if not (asked or given == "1"):
        return None
    block = own_block(env | {"ONES_BLOCKS": "1"})
    if block is None:
        log("--blocks: this is no task of a job array, so it trains as a plain job", "ones-run")
        return None
    # Each task would train by itself: MPI's ranks are started as one, and can't join others later.
    if options.talks_mpi:
        raise LaunchError(
            "--blocks: ranks that talk MPI can't join or leave a job; submit without --array and --blocks"
        )
    env["ONES_BLOCKS"] = "1"
    return block


def serve(job_dir: Path, env: Mapping[str, str]) -> str:
    """Serve a store to the ranks for as long as this process lives; return its host and port. Raises `LaunchError`."""
    folder = HotFolder(job_dir, 0)
    folder.prepare()
    try:
        network = JobNetwork.here(node_name(env), JobSecret.make(folder.path))
    except OSError as error:
        raise LaunchError(error.strerror) from None
    return f"{network.host}:{network.port}"


def new_secret(source: str, env: Mapping[str, str], cwd: Path) -> None:
    """Replace the secret of a job that does not run; `source` is its id or directory. Raises `LaunchError`."""
    what = f"--new-secret {source}"
    path = find_earlier(source, what, cwd / directory_name(0), env, cwd)
    if running := holder(path):
        raise LaunchError(f"{what}: {running} still runs in {path} with the old secret; end it, or requeue and hold it")
    try:
        JobSecret.renew(path / HOT)
    except OSError as error:
        raise LaunchError(f"{what}: {path / HOT}: {error.strerror}") from None
    log(f"{path / HOT} has a new secret, which the job's next start uses", "ones-run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ones-run`; return the script's exit code, or 2 if nothing could be started."""
    now = time.time()
    args = _parser().parse_args(argv)
    env = own_environment(os.environ)
    resume_from = env.pop("ONES_RESUME_FROM", "")  # not for jobs that this one submits
    claim: Claim | None = None
    try:
        if args.ranks_per_node is not None and args.ranks_per_node < 1:
            raise LaunchError(f"--gpus-per-node {args.ranks_per_node}: must be 1 or more")
        if args.preload:
            env["ONES_PRELOAD"] = args.preload
        limits = RestartLimits(_limit(env, "retries", args.retries, 3), _limit(env, "requeues", args.requeues, 20))
        options = LaunchOptions.of(env, args)
        if options.launcher:
            launcher_named(options.launcher)
        script, arguments = (MODULE, [args.script, *args.arguments]) if args.module else (args.script, args.arguments)
        if not (options.container or args.module) and not Path(args.script).is_file():
            raise LaunchError(f"script {args.script}: there is no such file (looked from {Path.cwd()})")
        block = wanted_block(env, args.blocks, options)
        job_dir = find_job_directory(env, Path.cwd())
        if spool := find_spool(env):
            env["ONES_SPOOL"] = str(spool)
        start = partial(plan, env, script, arguments, job_dir=job_dir, options=options, now=now, retries=limits.retries)
        if args.dry_run:
            launch = start()
            added = {k: v for k, v in launch.env.items() if "TASKS_PER_NODE" in k and k.startswith(("TACC", "IBRUN"))}
            print(*[f"{k}={v}" for k, v in added.items()], *launch.command)
            return 0
        if not options.container:  # its image has torch and the script
            require_torch()
        claim = prepare_job_directory(job_dir, env, Path.cwd(), args.resume_from or resume_from, block)
        try:
            env |= seeds(run_id(job_dir, env, own_job(env)), env)
        except (OSError, ValueError) as error:
            raise LaunchError(str(error)) from None
        if args.fuse and not block and (code := before_ranks(job_dir, env, script, arguments)) is not None:
            return code
        blocks = OtherBlocks(block, job_dir, env) if block else None
        if blocks and (why := blocks.not_wanted(FIRST_WAIT_S)):
            log(why, "ones-run")
            return 0
        if not options.container and (slow := bytecode.note(env)):
            log(slow, "ones-run")
        has = allocation(env, options.ranks_per_node)
        if not options.talks_mpi and (blocks or has.nodes * has.ranks_per_node > 1):
            env[STORE] = serve(job_dir, env)
        if blocks and not options.talks_mpi:
            blocks.keep_guests(has.nodes, has.ranks_per_node)
        return Supervisor(job_dir, env, has, limits, blocks).run(start)
    except (LaunchError, ClaimedError) as error:
        log(str(error), "ones-run")
        return USAGE_ERROR
    finally:
        if claim is not None:
            claim.release()
