"""A batch script before it is submitted: its directives, how far its job would be elastic, and what prevents that.

Only the script is read: options of the command line, of the environment and of a site's plugins are not seen.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from slurm_ones.jobs.optin import ANY, BadComment, OptIn, meant, near_miss, parse_comment
from slurm_ones.slurm.fields import tasks_of

LONG = {
    "-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-a": "--array", "-d": "--dependency", "-D": "--chdir",
    "-t": "--time", "-p": "--partition",
}  # fmt: skip
"""Short options of sbatch that matter here."""
PLACEHOLDER = "EDIT"
"""Value in our scripts that the user is to fill in; Slurm refuses it."""

_DIRECTIVE = re.compile(r"#SBATCH(?:\s+(.*))?")
_NEARLY = re.compile(r"#\s+SBATCH\b|#SBATCH-|#sbatch\b", re.ASCII)
_NEAR_COMMENT = re.compile(r"\bones\b\s*[:=]?|\b(?:gpus|nodes|batch)=\d", re.IGNORECASE)
_GPUS = re.compile(r"(?:gres[/:])?gpu(?::(?!\d+\Z)([\w.-]+))?:(\d{1,6})")
_PER_NODE = re.compile(r"(?:([\w.-]+):)?(\d{1,6})")
"""Type and number in `--gpus-per-node`."""
_JOB_DIR = re.compile(r"^(?:[^#]*\s)?ONES_JOB_(DIR|ROOT)=(\S+)")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_LAUNCHER = re.compile(r"(exec\s+)?(srun|ibrun|mpirun|torchrun)\b")


class Weight(str, Enum):
    """Meaning of a finding for the job."""

    WARNING = "warning"
    ERROR = "error"
    """It is not resized, or does not do what its owner means."""


@dataclass(frozen=True)
class ScriptFinding:
    """One thing that a script's owner should know."""

    weight: Weight
    line: int
    """Line of the script, from 1; 0 for the whole of it."""
    text: str


def _error(line: int, text: str) -> ScriptFinding:
    return ScriptFinding(Weight.ERROR, line, text)


def _warning(line: int, text: str) -> ScriptFinding:
    return ScriptFinding(Weight.WARNING, line, text)


@dataclass(frozen=True)
class Script:
    """Directives and commands of a batch script."""

    options: dict[str, tuple[int, str]]
    """Line and value of each long option; of one that stands twice the last, as sbatch takes it."""
    body: tuple[tuple[int, str], ...]
    """Lines that are neither empty nor comments, with their numbers."""
    findings: tuple[ScriptFinding, ...]

    def value(self, option: str) -> str:
        """An option's value; empty if the script does not give it."""
        return self.options.get(option, (0, ""))[1]

    def line(self, option: str) -> int:
        return self.options.get(option, (0, ""))[0]


def read_script(text: str) -> Script:
    """The directives and commands of a batch script, with the faults of their form."""
    options: dict[str, tuple[int, str]] = {}
    body: list[tuple[int, str]] = []
    findings: list[ScriptFinding] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        match = _DIRECTIVE.fullmatch(raw)
        if match is None:
            if _NEARLY.match(line):
                findings.append(_warning(number, f"Slurm does not read {line!r:.60}: write #SBATCH"))
            elif line and not line.startswith("#"):
                body.append((number, line))
            continue
        if body:
            findings.append(_error(number, "Slurm ignores #SBATCH after the first command: move it to the top"))
            continue
        try:
            words = shlex.split(match[1] or "", comments=True)
        except ValueError as error:
            findings.append(_error(number, f"its quotes do not match: {error}"))
            continue
        options.update({name: (number, value) for name, value in _options(words)})
        if _VARIABLE.search(match[1] or ""):
            findings.append(_warning(number, "Slurm does not replace variables in #SBATCH lines"))
    return Script(options, tuple(body), tuple(findings))


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, equals, value = LONG.get(word[:2], word[:2]), word[2:], word[2:]
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield name, value


@dataclass(frozen=True)
class Verdict:
    """Prospects of a job."""

    optin: OptIn | None
    shape: tuple[int, int] | None
    """Nodes and GPUs per node of its first run; None if the script does not give them. 0 GPUs: whole nodes."""
    directory: str
    """Place of its reports and checkpoints."""
    findings: tuple[ScriptFinding, ...]

    @property
    def elastic(self) -> bool:
        """The companion may resize it, as far as the script shows."""
        wanted = self.optin is not None and self.optin.resize
        return wanted and not any(finding.weight is Weight.ERROR for finding in self.findings)


def comment_findings(comment: str | None, line: int = 0) -> tuple[OptIn | None, list[ScriptFinding]]:
    """A comment's opt-in, and its faults, with its `line`."""
    if comment is None:
        return None, [_error(line, 'it does not opt in: add #SBATCH --comment="ones: gpus=1-16"')]
    try:
        optin = parse_comment(comment)
    except BadComment as error:
        return None, [_error(line, f"its comment is not understood: {error}")]
    if optin is not None:
        return optin, []
    text = "its comment does not opt in"
    if near_miss(comment) or _NEAR_COMMENT.search(comment):
        text += f": it must begin with ones:, so write {meant(comment)}"
    return None, [_error(line, text)]


def examine(text: str) -> Verdict:
    """Prospects of a batch script's job."""
    script = read_script(text)
    given = script.options.get("--comment")
    optin, found = comment_findings(given and given[1], script.line("--comment"))
    nodes = (script.value("--nodes") or "1").split("-")[0]
    shape = (int(nodes), _gpus_asked(script)[1]) if nodes.isdigit() else None
    findings = [*script.findings, *found, *_form(script), *_array(script, optin), *_launch(script, optin)]
    if optin is not None:
        findings += _kinds(script, optin)
        findings += _range(script, optin, shape) if shape is not None else []
    return Verdict(optin, shape, _directory(script, optin), tuple(sorted(findings, key=lambda one: one.line)))


REFUSED = {
    "--ntasks": "Slurm does not let its user change task counts; leave it out",
    "--no-requeue": "Slurm may not requeue it",
    "--gpus": "say how many a node takes: --nodes and --gres=gpu:N",
    "--gpus-per-task": "say how many a node takes: --nodes and --gres=gpu:N",
    "--gpus-per-socket": "say how many a node takes: --nodes and --gres=gpu:N",
}
"""Options with which a job is not resized, and the reason; every option that begins with --ntasks is one."""
WANTED = {
    "--requeue": ("", "no --requeue: whether Slurm may requeue it depends on the site"),
    "--open-mode": ("append", "no --open-mode=append: each start truncates the job's log"),
    "--signal": ("B:USR2", "no --signal=B:USR2@120: its time limit ends it without a checkpoint"),
}
"""Beginning of an option's value that an elastic job should have, and what is lost otherwise."""


def _form(script: Script) -> Iterator[ScriptFinding]:
    for option, (line, value) in script.options.items():
        refused = REFUSED.get("--ntasks" if option.startswith("--ntasks") else option)
        if refused is not None:
            yield _error(line, f"{option}: {refused}")
        if value == PLACEHOLDER:
            yield _error(line, f"{option}={PLACEHOLDER}: fill it in")
    for option, (value, lost) in WANTED.items():
        given = option in script.options and script.value(option).startswith(value)
        if not given and not (option == "--requeue" and "--no-requeue" in script.options):
            yield _warning(script.line(option) if option == "--signal" else 0, lost)


def _array(script: Script, optin: OptIn | None) -> Iterator[ScriptFinding]:
    array, line = script.value("--array"), script.line("--array")
    if optin is not None and optin.blocks:
        if "--array" not in script.options:
            yield _error(0, "array=blocks, and no --array: add #SBATCH --array=0-7%1")
            return
        if not array.endswith("%1"):
            yield _error(line, f"--array={array}: end it with %1, or all blocks start at once")
        if "--dependency" in script.options:
            text = "--dependency: it must not be one between the tasks of this array"
            yield _warning(script.line("--dependency"), text)
    elif "--array" in script.options:  # each task is an elastic job (`eligibility`)
        if len(tasks_of(array)) == 1:
            yield _error(line, f"--array={array}: the one task of an array keeps its size: leave --array out")
            return
        text = "its array's tasks are jobs of their own, and the last of them keeps its size; as parts of one: "
        yield _warning(line, f"{text}array=blocks")
        if "%" in array:
            yield _warning(line, f"--array={array}: while tasks wait for this throttle the others keep their sizes")


def _launch(script: Script, optin: OptIn | None) -> Iterator[ScriptFinding]:
    launches = [(number, line) for number, line in script.body if re.search(r"\bones-run\b", line)]
    if not launches:
        yield _error(0, "it does not call ones-run, so it reports nothing and takes no orders")
        return
    number, line = launches[-1]
    if _LAUNCHER.match(line):
        yield _error(number, "ones-run starts the ranks itself: call it without a launcher")
    if optin is None:
        return
    blocks = "--blocks" in line.split() or any("ONES_BLOCKS=1" in text for _, text in script.body)
    if optin.blocks and not blocks:
        yield _error(number, "array=blocks needs ones-run --blocks")
    if blocks and not optin.blocks:
        yield _error(number, "ones-run --blocks needs array=blocks in the comment")
    if optin.blocks and script.body[-1][0] > number:
        yield _warning(script.body[-1][0], "what follows ones-run is run by every block")


def _gpus_asked(script: Script) -> tuple[str, int]:
    """Type of GPU and number on each node; no type if any will do, and 0 if it asks for whole nodes."""
    match = _GPUS.fullmatch(script.value("--gres")) or _PER_NODE.fullmatch(script.value("--gpus-per-node"))
    return (match[1] or "", int(match[2])) if match else ("", 0)


def _kinds(script: Script, optin: OptIn) -> Iterator[ScriptFinding]:
    (kind, gpus), line = _gpus_asked(script), script.line("--comment")
    if optin.kinds and not gpus:
        yield _warning(line, "kinds= does nothing for it: it does not ask for GPUs by --gres or --gpus-per-node")
    if optin.kinds and kind and ANY not in optin.kinds and kind not in optin.kinds:
        yield _warning(line, f"it asks for {kind} GPUs, which its kinds={','.join(optin.kinds)} leaves out")


def _range(script: Script, optin: OptIn, shape: tuple[int, int]) -> list[ScriptFinding]:
    nodes, each = shape
    asked, name, limits = (nodes, "nodes", optin.nodes) if optin.nodes else (nodes * each, "gpus", optin.gpus)
    step = 1 if optin.nodes else optin.step
    if limits is None or not asked or (limits[0] <= asked <= limits[1] and (asked - limits[0]) % step == 0):
        return []
    low, high = limits
    text = f"it starts with {asked} {name}, outside its {name}={low}-{high}{f':{step}' if step > 1 else ''}"
    return [_warning(script.line("--comment"), text)]


def _directory(script: Script, optin: OptIn | None) -> str:
    given = {match[1]: match[2].strip("\"'") for _, line in script.body if (match := _JOB_DIR.search(line))}
    job = "ARRAY-ID" if optin is not None and optin.blocks else "JOB-ID"
    root = given.get("ROOT") or script.value("--chdir") or "where you call sbatch"
    return given.get("DIR") or f"{root}/ones-{job}"
