"""A site's own Slurm as what runs a study's parts: submitit sends them, and one squeue asks for all of them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pwd
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.study.elsewhere import Call, Seen, Task
from slurm_ones.simulate.study.runs import THREADS
from slurm_ones.slurm.client import SlurmMissing, Unreachable
from slurm_ones.slurm.command import CommandClient, error_of, with_retries
from slurm_ones.slurm.model import JobState

USUAL_MIN = 120
"""Minutes a part may take where `--sbatch` does not say."""
SHORT = {
    "-A": "account", "-C": "constraint", "-L": "licenses", "-N": "nodes", "-c": "cpus-per-task", "-n": "ntasks",
    "-p": "partition", "-q": "qos", "-t": "time", "-w": "nodelist", "-x": "exclude",
}  # fmt: skip
OWN = (
    "array", "chdir", "clusters", "comment", "error", "input", "job-name", "open-mode", "output", "parsable", "quiet",
    "test-only", "wait", "wrap",
)  # fmt: skip
"""Options that a study's jobs need as they are: no comment, so that no companion ever takes them for elastic ones."""
ELASTIC = ("elastic-gpus", "elastic-nodes", "elastic-batch", "elastic-deadline")
"""Options of our Slurm plugin, which makes a comment of them."""
KEPT = ("SLURM_CONF", "SLURM_JWT")
"""Variables of Slurm's that lead to it; all others belong to a job from which a study may be started."""

_OPTION = re.compile(r"[a-z][a-z0-9-]{0,40}")
_UNSENT = re.compile(r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh")
"""Files of submitit's for jobs that Slurm did not take; those of others bear their ids."""
_WHERE = "%F|%K|%T|%j"
"""Of a job: its id or its array's, its place in the array, its state and its name."""


def parse_sbatch(text: str) -> dict[str, str | bool]:
    """sbatch's options by their long names, from `--partition=cpu -t 2:00:00 --exclusive`. Raises `BadInput`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"--sbatch: {text!r:.80}: {error}") from None
    found: dict[str, str | bool] = {}
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        name, equals, value = word.partition("=")
        if name in SHORT and not equals:
            name = f"--{SHORT[name]}"
        elif word[:2] in SHORT and not word.startswith("--"):
            name, equals, value = f"--{SHORT[word[:2]]}", "=", word[2:].removeprefix("=")
        option = name[2:]
        if not name.startswith("--") or not _OPTION.fullmatch(option):
            raise BadInput(f"--sbatch: {word!r:.60} is no option of sbatch's, such as --partition=cpu")
        # sbatch takes an option's beginning for the option; and one of ours would make a comment.
        if own := next((own for own in (*OWN, *ELASTIC) if own.startswith(option)), None):
            short = f", which sbatch may take --{option} for," if own != option else ""
            raise BadInput(f"--sbatch: --{own}{short} is the study's own to say")
        if not equals and at < len(words) and not words[at].startswith("-"):
            equals, value, at = "=", words[at], at + 1
        if equals and (not value or not value.isprintable()):
            raise BadInput(f"--sbatch: --{option} has no value that sbatch could read")
        found[option] = value if equals else True
    return found


class SlurmSite:
    """See `elsewhere.Site`. The directory must be seen by the site's nodes, at the same path."""

    def __init__(self, folder: Path, options: Mapping[str, str | bool]) -> None:
        """`folder` takes scripts and logs. Raises `BadInput` where submitit is missing."""
        if importlib.util.find_spec("submitit") is None:
            raise BadInput("--executor slurm needs submitit: pip install 'slurm-ones[studies]'")
        self._folder = folder
        self._options = options
        with _outside_of_jobs():  # it asks the very cluster that sbatch sends to
            self._client = CommandClient()

    def submit(self, name: str, calls: Sequence[Call]) -> str:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        with _outside_of_jobs(), contextlib.redirect_stderr(io.StringIO()):
            try:
                executor = submitit.SlurmExecutor(self._folder)
                executor.update_parameters(
                    job_name=name,
                    time=USUAL_MIN,
                    wckey=None,
                    use_srun=False,
                    setup=[f"export {variable}=${{{variable}:-1}}" for variable in THREADS],
                    additional_parameters=dict(self._options),
                )
                jobs: list[submitit.Job[Any]] = executor.submit_array(calls)
            except FailedSubmissionError as error:
                # sbatch took them, and its answer has no number.
                raise Unreachable(f"sbatch: {' '.join(str(error).split())[:200]}") from None
            except FailedJobError as error:
                for path in self._folder.iterdir():
                    if _UNSENT.fullmatch(path.name) and not path.is_symlink():
                        path.unlink()
                raise error_of("sbatch", str(error)) from None
            except (FileNotFoundError, RuntimeError) as error:
                raise SlurmMissing(f"sbatch: {error}") from None
        return f"job {jobs[0].job_id.partition('_')[0]}"

    def states(self, names: Collection[str]) -> Mapping[Task, Seen]:
        question = ["squeue", "--noheader", "--array", "--states=all", f"--user={_user()}"]
        answer = with_retries(lambda: self._client.run([*question, f"--name={','.join(sorted(names))}", "-o", _WHERE]))
        found = {}
        for line in answer.splitlines():
            job, index, state, name = line.strip().split("|", 3)
            place = int(index) if index.isdecimal() else 0
            shown = f"{job}_{index}" if index.isdecimal() else job
            known = state if state in JobState.__members__ else "UNKNOWN"
            found[Task(name, place)] = Seen(JobState[known], shown, self._folder / f"{shown}_0_log.err")
        return found

    def cancelling(self, names: Collection[str]) -> str:
        return f"scancel --user={_user()} --name={','.join(sorted(names))}"


def _user() -> str:
    """Whose jobs they are. What LOGNAME says may be another: then none would be found, and all be sent again."""
    return pwd.getpwuid(os.geteuid()).pw_name


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Without the variables of a job that this process may be in, and of sbatch, which would override the options."""
    hidden = {k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "SBATCH_")) and k not in KEPT}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
