"""What a batch script asks for, read before it is submitted: how far it is elastic, and what stands against it.

Only the script is read: options of the command line, of the environment and of a site's plugins are not seen.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import Enum

from slurm_ones.observe.optin import ANY, BadComment, OptIn, meant, near_miss, parse_comment
from slurm_ones.slurm.fields import tasks_of

LONG = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-G": "--gpus",
    "-a": "--array",
    "-d": "--dependency",
    "-D": "--chdir",
    "-t": "--time",
    "-p": "--partition",
}
"""Short options of sbatch that matter here."""

PLACEHOLDER = "EDIT"
"""What our scripts say where their user is to fill something in; Slurm refuses it."""

_DIRECTIVE = re.compile(r"#SBATCH(?:\s+(.*))?")
_NEARLY = re.compile(r"#\s+SBATCH\b|#SBATCH-|#sbatch\b", re.ASCII)
_NEAR_COMMENT = re.compile(r"\bones\b\s*[:=]?|\b(?:gpus|nodes|batch)=\d", re.IGNORECASE)
_GPUS = re.compile(r"(?:gres[/:])?gpu(?::(?!\d+\Z)([\w.-]+))?:(\d{1,6})")
_PER_NODE = re.compile(r"(?:([\w.-]+):)?(\d{1,6})")
"""Type and number, as `--gpus-per-node` has them."""
_JOB_DIR = re.compile(r"^(?:[^#]*\s)?ONES_JOB_(DIR|ROOT)=(\S+)")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")


class Weight(str, Enum):
    """What a finding means for the job."""

    WARNING = "warning"
    ERROR = "error"
    """It is not resized, or does not do what its owner means."""


@dataclass(frozen=True)
class Finding:
    """One thing that its owner should know."""

    weight: Weight
    line: int
    """Line of the script, from 1; 0 for the whole of it."""
    text: str


@dataclass(frozen=True)
class Script:
    """What a batch script says."""

    options: dict[str, tuple[int, str]]
    """Line and value of each long option of its directives; of one that stands twice the last, as sbatch takes it."""
    body: tuple[tuple[int, str], ...]
    """Lines that are neither empty nor comments, with their numbers."""
    findings: tuple[Finding, ...]

    def value(self, option: str) -> str | None:
        """An option's value, None where the script does not give it."""
        return self.options[option][1] if option in self.options else None

    def line(self, option: str) -> int:
        return self.options[option][0] if option in self.options else 0


def read_script(text: str) -> Script:
    """The directives and commands of a batch script, with what is wrong with their form."""
    options: dict[str, tuple[int, str]] = {}
    body: list[tuple[int, str]] = []
    findings: list[Finding] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        match = _DIRECTIVE.fullmatch(raw)
        if match is None:
            if _NEARLY.match(line):
                findings.append(Finding(Weight.WARNING, number, f"Slurm does not read {line!r:.60}: write #SBATCH"))
            elif line and not line.startswith("#"):
                body.append((number, line))
            continue
        if body:
            findings.append(
                Finding(Weight.ERROR, number, "Slurm ignores #SBATCH after the first command: move it to the top")
            )
            continue
        try:
            words = shlex.split(match[1] or "", comments=True)
        except ValueError as error:
            findings.append(Finding(Weight.ERROR, number, f"its quotes do not match: {error}"))
            continue
        options.update({name: (number, value) for name, value in _options(words)})
        if _VARIABLE.search(match[1] or ""):
            findings.append(Finding(Weight.WARNING, number, "Slurm does not replace variables in #SBATCH lines"))
    return Script(options, tuple(body), tuple(findings))


def _options(words: list[str]) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(words):
        word = words[place]
        place += 1
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, value = LONG.get(word[:2], word[:2]), word[2:]
            equals = "=" if value else ""
        if not equals and place < len(words) and not words[place].startswith("-"):
            value = words[place]
            place += 1
        found.append((name, value))
    return found


@dataclass(frozen=True)
class Verdict:
    """What would happen to a job."""

    optin: OptIn | None
    shape: tuple[int, int] | None
    """Nodes and GPUs per node of its first run; None where the script does not say. 0 GPUs: whole nodes."""
    directory: str
    """Where its reports and checkpoints will lie."""
    findings: tuple[Finding, ...]

    @property
    def elastic(self) -> bool:
        """Whether the companion may resize it, as far as the script shows."""
        wanted = self.optin is not None and self.optin.resize
        return wanted and not any(finding.weight is Weight.ERROR for finding in self.findings)


def comment_findings(comment: str | None, line: int = 0) -> tuple[OptIn | None, list[Finding]]:
    """How a comment is understood, and what stands against it, with its `line`."""
    if comment is None:
        text = 'it does not opt in: add #SBATCH --comment="ones: gpus=1-16"'
        return None, [Finding(Weight.ERROR, line, text)]
    try:
        optin = parse_comment(comment)
    except BadComment as error:
        return None, [Finding(Weight.ERROR, line, f"its comment is not understood: {error}")]
    if optin is not None:
        return optin, []
    text = "its comment does not opt in"
    if near_miss(comment) or _NEAR_COMMENT.search(comment):
        text += f": it must begin with ones:, so write {meant(comment)}"
    return None, [Finding(Weight.ERROR, line, text)]


def examine(text: str) -> Verdict:
    """What would happen to the job of a batch script."""
    script = read_script(text)
    optin, found = comment_findings(script.value("--comment"), script.line("--comment"))
    findings = [*script.findings, *found]
    for check in (_placeholders, _tasks, _requeue, _gpus, _kinds, _array, _launch, _log):
        findings += check(script, optin)
    shape = _shape(script)
    if optin is not None and shape is not None:
        findings += _range(script, optin, shape)
    return Verdict(optin, shape, _directory(script, optin), tuple(sorted(findings, key=lambda one: one.line)))


def _placeholders(script: Script, optin: OptIn | None) -> list[Finding]:
    return [
        Finding(Weight.ERROR, line, f"{name}={PLACEHOLDER}: fill it in")
        for name, (line, value) in script.options.items()
        if value == PLACEHOLDER
    ]


def _tasks(script: Script, optin: OptIn | None) -> list[Finding]:
    return [
        Finding(
            Weight.ERROR, script.line(name), f"{name}: Slurm does not let its user change task counts; leave it out"
        )
        for name in script.options
        if name.startswith("--ntasks")
    ]


def _requeue(script: Script, optin: OptIn | None) -> list[Finding]:
    if "--no-requeue" in script.options:
        return [Finding(Weight.ERROR, script.line("--no-requeue"), "--no-requeue: Slurm may not requeue it")]
    if "--requeue" not in script.options:
        return [Finding(Weight.WARNING, 0, "no --requeue: whether Slurm may requeue it depends on the site")]
    return []


def _gpus(script: Script, optin: OptIn | None) -> list[Finding]:
    return [
        Finding(Weight.ERROR, script.line(name), f"{name}: say how many a node takes: --nodes and --gres=gpu:N")
        for name in ("--gpus", "--gpus-per-task", "--gpus-per-socket")
        if name in script.options
    ]


def _array(script: Script, optin: OptIn | None) -> list[Finding]:
    array, line = script.value("--array"), script.line("--array")
    blocks = optin is not None and optin.blocks
    if array is None:
        return [Finding(Weight.ERROR, 0, "array=blocks, and no --array: add #SBATCH --array=0-7%1")] if blocks else []
    if not blocks:
        return _tasks_apart(array, line)
    found = []
    if not array.endswith("%1"):
        found.append(Finding(Weight.ERROR, line, f"--array={array}: end it with %1, or all blocks start at once"))
    if "--dependency" in script.options:
        line = script.line("--dependency")
        found.append(Finding(Weight.WARNING, line, "--dependency: it must not be one between the tasks of this array"))
    return found


def _tasks_apart(array: str, line: int) -> list[Finding]:
    """What stands against the tasks of an ordinary array, each of which is an elastic job (`eligibility`)."""
    if len(tasks_of(array)) == 1:
        text = f"--array={array}: the one task of an array keeps its size: leave --array out"
        return [Finding(Weight.ERROR, line, text)]
    text = "its array's tasks are jobs of their own, and the last of them keeps its size; as parts of one: array=blocks"
    found = [Finding(Weight.WARNING, line, text)]
    if "%" in array:
        text = f"--array={array}: while tasks wait for this throttle the others keep their sizes"
        found.append(Finding(Weight.WARNING, line, text))
    return found


def _launch(script: Script, optin: OptIn | None) -> list[Finding]:
    launches = [(number, line) for number, line in script.body if re.search(r"\bones-run\b", line)]
    if not launches:
        return [Finding(Weight.ERROR, 0, "it does not call ones-run, so it reports nothing and takes no orders")]
    number, line = launches[-1]
    found = []
    if re.match(r"(exec\s+)?(srun|ibrun|mpirun|torchrun)\b", line):
        found.append(Finding(Weight.ERROR, number, "ones-run starts the ranks itself: call it without a launcher"))
    blocks = "--blocks" in line.split() or any("ONES_BLOCKS=1" in text for _, text in script.body)
    if optin is not None and optin.blocks and not blocks:
        found.append(Finding(Weight.ERROR, number, "array=blocks needs ones-run --blocks"))
    if blocks and optin is not None and not optin.blocks:
        found.append(Finding(Weight.ERROR, number, "ones-run --blocks needs array=blocks in the comment"))
    if optin is not None and optin.blocks and script.body[-1][0] > number:
        found.append(Finding(Weight.WARNING, script.body[-1][0], "what follows ones-run is run by every block"))
    return found


def _log(script: Script, optin: OptIn | None) -> list[Finding]:
    found = []
    if script.value("--open-mode") != "append":
        found.append(Finding(Weight.WARNING, 0, "no --open-mode=append: each start truncates the job's log"))
    if not (script.value("--signal") or "").startswith("B:USR2"):
        text = "no --signal=B:USR2@120: its time limit ends it without a checkpoint"
        found.append(Finding(Weight.WARNING, script.line("--signal"), text))
    return found


def _shape(script: Script) -> tuple[int, int] | None:
    nodes = (script.value("--nodes") or "1").split("-")[0]
    if not nodes.isdigit():
        return None
    return int(nodes), _gpus_asked(script)[1]


def _gpus_asked(script: Script) -> tuple[str, int]:
    """Type of GPU and number on each node; no type where any will do, and 0 where it asks for whole nodes."""
    gres, each = script.value("--gres") or "", script.value("--gpus-per-node") or ""
    match = _GPUS.fullmatch(gres) or _PER_NODE.fullmatch(each)
    return (match[1] or "", int(match[2])) if match else ("", 0)


def _kinds(script: Script, optin: OptIn | None) -> list[Finding]:
    """What becomes of `kinds=`."""
    if optin is None or not optin.kinds:
        return []
    kind, gpus = _gpus_asked(script)
    line, found = script.line("--comment"), []
    if not gpus:
        text = "kinds= does nothing for it: it does not ask for GPUs by --gres or --gpus-per-node"
        found.append(Finding(Weight.WARNING, line, text))
    if kind and ANY not in optin.kinds and kind not in optin.kinds:
        text = f"it asks for {kind} GPUs, which its kinds={','.join(optin.kinds)} leaves out"
        found.append(Finding(Weight.WARNING, line, text))
    return found


def _range(script: Script, optin: OptIn, shape: tuple[int, int]) -> list[Finding]:
    nodes, each = shape
    asked, name, limits = (nodes, "nodes", optin.nodes) if optin.nodes else (nodes * each, "gpus", optin.gpus)
    step = 1 if optin.nodes else optin.step
    if limits is None or not asked or (limits[0] <= asked <= limits[1] and (asked - limits[0]) % step == 0):
        return []
    low, high = limits
    text = f"it starts with {asked} {name}, outside its {name}={low}-{high}{f':{step}' if step > 1 else ''}"
    return [Finding(Weight.WARNING, script.line("--comment"), text)]


def _directory(script: Script, optin: OptIn | None) -> str:
    given = {match[1]: match[2].strip("\"'") for _, line in script.body if (match := _JOB_DIR.search(line))}
    job = "ARRAY-ID" if optin is not None and optin.blocks else "JOB-ID"
    root = given.get("ROOT") or script.value("--chdir") or "where you call sbatch"
    return given.get("DIR") or f"{root}/ones-{job}"
