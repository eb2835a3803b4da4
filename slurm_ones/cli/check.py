"""`slurm-ones check`: how far a batch script's or a comment's job would be elastic, before it is submitted.

Only the script is read: options of the command line, of the environment and of a site's plugins are not seen.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ones_wrapper.protocol import MAX_SPEC, ProtocolError, decode_spec
from ones_wrapper.protocol.limits import Limits, SizeLimits
from ones_wrapper.protocol.optin import ANY, BadComment, OptIn, meant, near_miss, parse_comment
from slurm_ones.cli.common import JsonOption, command, print_json, say
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.fields import tasks_of
from slurm_ones.text import counts, described

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


MOST_BYTES = 1 << 20


def _allowed(optin: OptIn) -> str:
    """The opt-in in words."""
    name, limits = ("nodes", optin.nodes) if optin.nodes else ("GPUs", optin.gpus)
    size = f"{limits[0]} to {limits[1]} {name}" if limits else "its size"
    size += f" in steps of {optin.step}" if optin.step > 1 else ""
    batch = "its own batch" if optin.batch is None else f"batch {optin.batch[0]} to {optin.batch[1]}"
    if optin.batch is not None and optin.batch[0] == optin.batch[1]:
        batch = f"batch {optin.batch[0]} always"
    due = ""
    if optin.deadline is not None:
        hours = optin.deadline.seconds / 3600.0
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(optin.deadline.seconds))
        due = f", to end within {hours:.2f} h" if optin.deadline.since_submission else f", to end by {moment}"
    cost = f", using up to {optin.cost:g} times the GPU hours of its own size" if optin.cost is not None else ""
    kinds = ""
    if optin.kinds:
        kinds = f", {'any type of GPU' if ANY in optin.kinds else 'GPUs of type ' + ' or '.join(optin.kinds)}"
    return f"{size}{kinds}, {batch}{due}{cost}" + ("" if optin.resize else ", measured and never resized")


def _examined(what: str) -> Verdict:
    path = Path(what)
    if not path.is_file():
        if "=" not in what and ":" not in what:
            raise BadInput(f"{what}: there is no such file, and it is no comment such as 'ones: gpus=1-16'")
        optin, findings = comment_findings(what)
        return Verdict(optin, None, "", tuple(findings))
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"{what}: is larger than a batch script of Slurm may be")
        return examine(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{what}: cannot be read: {error}") from None


def _limits(path: Path) -> Limits | None:
    """The limits of the strategy in a job's spec; raises `BadInput`."""
    try:
        with path.open("rb") as file:
            return decode_spec(file.read(MAX_SPEC + 1)).limits
    except (OSError, ProtocolError) as error:
        raise BadInput(f"{path}: {error}") from None


def _against(limits: Limits, verdict: Verdict) -> list[ScriptFinding]:
    """What an earlier run's strategy has against the comment's range, and against the size of the first run."""
    found = []
    sizes, name = [row.gpus for row in limits.sizes], limits.strategy
    allowed = verdict.optin.gpus if verdict.optin is not None else None
    if sizes and allowed is not None:
        low, high = allowed
        within = [row for row in limits.sizes if low <= row.gpus <= high]
        text = f"{name} runs on {counts(limits.sizes)} GPUs, and its comment allows {low} to {high}"
        if not within:
            found.append(_error(0, f"{text}: none of them"))
        elif within[0].gpus != low:
            found.append(_warning(0, f"{text}: let it begin at {within[0].gpus}"))
        else:
            found += _steps(within, verdict.optin.step if verdict.optin is not None else 1, text)
    nodes, each = verdict.shape or (0, 0)
    if sizes and nodes * each and nodes * each not in sizes:
        found.append(_error(0, f"it starts with {nodes * each} GPUs: {limits.refusal(nodes * each)}"))
    return found


def _steps(within: list[SizeLimits], step: int, text: str) -> list[ScriptFinding]:
    """That the comment's range holds numbers between those that the strategy can use, of which nobody knows before the
    first run."""
    low, high = within[0].gpus, within[-1].gpus
    wanted = math.gcd(*(row.gpus - low for row in within))
    if wanted <= 1 or step % wanted == 0:
        return []
    return [_warning(0, f"{text}: allow it steps of {wanted} alone, gpus={low}-{high}:{wanted}")]


@command
def check(
    what: Annotated[str, typer.Argument(metavar="SCRIPT|COMMENT", help="A batch script, or a comment in quotes.")],
    spec: Annotated[
        Path | None, typer.Option(help="spec.json of an earlier run: what its training strategy can use.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how far a job would be elastic. Exit code 0: it would be; 1: it would not, or something stands against it."""
    verdict = _examined(what)
    limits = _limits(spec) if spec is not None else None
    if limits is not None:
        verdict = replace(verdict, findings=(*verdict.findings, *_against(limits, verdict)))
    if as_json:
        print_json(
            {
                "elastic": verdict.elastic,
                "optin": verdict.optin,
                "shape": verdict.shape,
                "directory": verdict.directory,
                "strategy": limits.strategy if limits is not None else None,
                "findings": [
                    {"weight": one.weight.value, "line": one.line, "text": one.text} for one in verdict.findings
                ],
            }
        )
    else:
        say("elastic" if verdict.elastic else "not elastic")
        if verdict.optin is not None:
            say(f"allows:  {_allowed(verdict.optin)}")
            way = "blocks that join and leave while it trains" if verdict.optin.blocks else "checkpoint and requeue"
            say(f"resized: by {way}")
        if verdict.directory:
            say(f"reports: {verdict.directory}", 500)
        for limit in described(limits) if limits is not None else ():
            say(f"strategy: {limit}", 500)
        for one in verdict.findings:
            say(f"{one.weight.value + ':':9}{f'line {one.line}: ' if one.line else ''}{one.text}", 500)
    if not verdict.elastic or any(one.weight is Weight.ERROR for one in verdict.findings):
        raise typer.Exit(1)
