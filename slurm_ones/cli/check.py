"""Command `slurm-ones check`: tells before submission if the companion could resize the job of a script or comment.

Only the script is read. Options from sbatch's command line, the environment or a site's plugins are not known.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from ones_wrapper.protocol import MAX_SPEC, ProtocolError, decode_spec
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from ones_wrapper.protocol.optin import ANY, BadComment, OptIn, meant, near_miss, parse_comment
from slurm_ones.cli.batch_script import (
    Call,
    Script,
    ScriptFinding,
    calls,
    commands,
    error,
    hands_on,
    read_script,
    requeues_itself,
    warning,
)
from slurm_ones.cli.common import JsonOption, command, print_json, say
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.fields import tasks_of
from slurm_ones.text import counts, described, minute

PLACEHOLDER = "EDIT"
"""Text in our templates that the user must replace; Slurm refuses it."""

_NEAR_COMMENT = re.compile(r"\bones\b\s*[:=]?|\b(?:gpus|nodes|batch)=\d", re.IGNORECASE)
_JOB_DIR = re.compile(r"^(?:[^#]*\s)?ONES_JOB_(DIR|ROOT)=(\S+)")


@dataclass(frozen=True)
class Verdict:
    """Result of a check."""

    optin: OptIn | None
    shape: tuple[int, int] | None
    """(Nodes, GPUs per node) of the first run; None if the script does not say. 0 GPUs per node mean whole nodes."""
    directory: str
    """Directory for the job's reports and checkpoints."""
    findings: tuple[ScriptFinding, ...]

    @property
    def elastic(self) -> bool:
        """True if the companion may resize the job, as far as the script shows."""
        wanted = self.optin is not None and self.optin.resize
        return wanted and not any(finding.weight == "error" for finding in self.findings)


def comment_findings(comment: str | None, line: int = 0) -> tuple[OptIn | None, list[ScriptFinding]]:
    """Return the opt-in in a comment, and findings about it. `line` is the comment's line in the script."""
    if comment is None:
        return None, [error(line, 'it does not opt in: add #SBATCH --comment="ones: gpus=1-16"')]
    try:
        optin = parse_comment(comment)
    except BadComment as reason:
        return None, [error(line, f"its comment is not understood: {reason}")]
    if optin is not None:
        return optin, []
    text = "its comment does not opt in"
    if near_miss(comment) or _NEAR_COMMENT.search(comment):
        text += f": it must begin with ones:, so write {meant(comment)}"
    return None, [error(line, text)]


def examine(text: str) -> Verdict:
    """Check the text of a batch script."""
    script = read_script(text)
    given = script.options.get("--comment")
    optin, found = comment_findings(given and given[1], script.line("--comment"))
    nodes = re.match(r"\d+", script.value("--nodes") or "1")
    shape = (int(nodes[0]), _gpus_asked(script)[1]) if nodes else None
    findings = [*script.findings, *found, *_form(script), *_array(script, optin), *_launch(script, optin)]
    if optin is not None:
        findings += _kinds(script, optin)
        findings += _range(script, optin, shape) if shape is not None else []
    return Verdict(optin, shape, _directory(script, optin), tuple(sorted(findings, key=lambda one: one.line)))


REFUSED = {
    "--ntasks": "Slurm does not let its user change task counts; leave it out",
    "--no-requeue": "Slurm may not requeue it",
    "--deadline": "Slurm would cancel it as it waits for its restart; write deadline=… into the comment",
    "--gpus": "give the GPUs per node: --nodes and --gres=gpu:N",
    "--gpus-per-task": "give the GPUs per node: --nodes and --gres=gpu:N",
    "--gpus-per-socket": "give the GPUs per node: --nodes and --gres=gpu:N",
}
"""Options with which a job cannot be resized, and what to do. `--ntasks` means every option that begins so."""
WANTED = {
    "--requeue": "no --requeue: it depends on the site if Slurm may requeue the job",
    "--open-mode": "no --open-mode=append: each start truncates the job's log",
    "--signal": "no --signal=B:USR2@120: its time limit ends it without a checkpoint",
}
"""Options that an elastic job should have, and what happens without each."""


def _form(script: Script) -> Iterator[ScriptFinding]:
    for option, (line, value) in script.options.items():
        refused = REFUSED.get("--ntasks" if option.startswith("--ntasks") else option)
        if refused is not None:
            yield error(line, f"{option}: {refused}")
        if value == PLACEHOLDER:
            yield error(line, f"{option}={PLACEHOLDER}: fill it in")
    given = {
        "--requeue": bool({"--requeue", "--no-requeue"} & {*script.options}),
        "--open-mode": "append".startswith(script.value("--open-mode") or "no"),
        "--signal": script.warned,
    }
    for option, lost in WANTED.items():
        if not given[option]:
            yield warning(script.line(option) if option == "--signal" else 0, lost)


def _array(script: Script, optin: OptIn | None) -> Iterator[ScriptFinding]:
    array, line = script.value("--array"), script.line("--array")
    if optin is not None and optin.blocks:
        if "--array" not in script.options:
            yield error(0, "array=blocks, and no --array: add #SBATCH --array=0-7%1")
            return
        if not array.endswith("%1"):
            yield error(line, f"--array={array}: end it with %1, or all blocks start at once")
        if "--dependency" in script.options:
            text = "--dependency: it must not be one between the tasks of this array"
            yield warning(script.line("--dependency"), text)
    elif "--array" in script.options:  # each task is an elastic job (`eligibility`)
        if len(tasks_of(array)) == 1:
            yield error(line, f"--array={array}: an array's only task keeps its size: leave --array out")
            return
        text = "each task of its array is a job of its own, and the last task keeps its size"
        yield warning(line, f"{text}; for one job of all tasks:  array=blocks")
        if "%" in array:
            yield warning(line, f"--array={array}: tasks keep their sizes while others wait for this throttle")


def _launch(script: Script, optin: OptIn | None) -> Iterator[ScriptFinding]:
    found = commands(script)
    launches = calls(found)
    if not launches:
        yield error(0, "it does not call ones-run, so it reports nothing and follows no orders")
        return
    last = launches[-1]
    for call in launches:
        if call.launcher:
            yield error(call.command.line, f"ones-run starts the ranks itself: call it without {call.launcher}")
        elif call.container:
            text = f"in a container srun and scontrol may be missing: ones-run --container '{call.container}' …"
            yield warning(call.command.line, text)
    if line := requeues_itself(found):
        text = "the script requeues or submits itself, and ones-run requeues the job too: leave out one of the two"
        yield warning(line, text)
    if script.warned and not hands_on(found):
        yield from _dies(next((one for one in launches if not (one.takes_over or one.launcher)), None))
    yield from _several(launches, script)
    if optin is None:
        return
    blocks = any(call.blocks for call in launches) or any("ONES_BLOCKS=1" in text for _, text in script.body)
    if optin.blocks and not blocks:
        yield error(last.command.line, "array=blocks needs ones-run --blocks")
    if blocks and not optin.blocks:
        yield error(last.command.line, "ones-run --blocks needs array=blocks in the comment")
    if optin.blocks and last.command.follows and not last.takes_over:
        yield warning(found[-1].line, "every block runs the commands after ones-run")


def _dies(call: Call | None) -> Iterator[ScriptFinding]:
    """Warn if ones-run does not receive the SIGUSR2 that Slurm sends to the batch shell."""
    if call is None:
        return
    text = "--signal=B:USR2 kills the batch shell, which is not ones-run here: write exec ones-run …"
    if call.command.piped:
        text += ", and in place of a pipe: > >(tee FILE) 2>&1"
    elif call.prefix[:1] == ("exec",):
        text += f", without {call.prefix[1]} before it"
    yield warning(call.command.line, text)


def _several(launches: list[Call], script: Script) -> Iterator[ScriptFinding]:
    """Warn if two trainings of the script would use the same job directory."""
    own = sum(match is not None and match[1] == "DIR" for match in (_JOB_DIR.search(line) for _, line in script.body))
    ran = [call for call in launches if not call.takes_over]
    looped = next((call for call in ran if call.command.looped), None)
    second = looped or (launches[1] if len(launches) > 1 and launches[0] in ran else None)
    if second is not None and own < (1 if looped else len(launches)):
        text = "two trainings in one directory: the second is refused, or continues from the first one's checkpoint; "
        yield warning(second.command.line, f"{text}give each its own ONES_JOB_DIR, or submit each as a job")


def _gpus_asked(script: Script) -> tuple[str, int]:
    """Return (type, number) of the requested GPUs per node: type "" for any, number 0 for whole nodes."""
    kinds, count = set(), 0
    for option, begins in (("--gres", r"(?:gres[/:])?gpu(?![\w-])"), ("--gpus-per-node", "")):
        for one in script.value(option).split(","):
            match = re.fullmatch(begins + r"[:=]?(?:(?!\d+\Z)([\w.-]+))?(?:[:=]?(\d{1,6}))?", one) if one else None
            if match and (match[1] or match[2] or begins):
                kinds.add(match[1] or "")
                count = int(match[2] or 1) if not count or match[1] is None else count + int(match[2] or 1)
    return (kinds.pop() if len(kinds) == 1 else ""), count


def _kinds(script: Script, optin: OptIn) -> Iterator[ScriptFinding]:
    (kind, gpus), line = _gpus_asked(script), script.line("--comment")
    if optin.kinds and not gpus:
        yield warning(line, "kinds= has no effect, since the script does not request GPUs by --gres or --gpus-per-node")
    if optin.kinds and kind and ANY not in optin.kinds and kind not in optin.kinds:
        yield warning(line, f"it asks for {kind} GPUs, which its kinds={','.join(optin.kinds)} leaves out")


def _range(script: Script, optin: OptIn, shape: tuple[int, int]) -> list[ScriptFinding]:
    nodes, each = shape
    asked, name, limits = (nodes, "nodes", optin.nodes) if optin.nodes else (nodes * each, "gpus", optin.gpus)
    step = 1 if optin.nodes else optin.step
    if limits is None or not asked or (limits[0] <= asked <= limits[1] and (asked - limits[0]) % step == 0):
        return []
    low, high = limits
    text = f"it starts with {asked} {name}, outside its {name}={low}-{high}{f':{step}' if step > 1 else ''}"
    return [warning(script.line("--comment"), text)]


def _directory(script: Script, optin: OptIn | None) -> str:
    given = {match[1]: match[2].strip("\"'") for _, line in script.body if (match := _JOB_DIR.search(line))}
    job = "ARRAY-ID" if optin is not None and optin.blocks else "JOB-ID"
    root = given.get("ROOT") or script.value("--chdir")
    return given.get("DIR") or (f"{root}/ones-{job}" if root else f"ones-{job}, in the folder of sbatch's call")


MOST_BYTES = 1 << 20


def _allowed(optin: OptIn) -> str:
    """Describe the sizes, batches and other options that a comment allows."""
    name, limits = ("nodes", optin.nodes) if optin.nodes else ("GPUs", optin.gpus)
    size = f"{limits[0]} to {limits[1]} {name}" if limits else "its size"
    size += f" in steps of {optin.step}" if optin.step > 1 else ""
    batch = "its own batch" if optin.batch is None else f"batch {optin.batch[0]} to {optin.batch[1]}"
    if optin.batch is not None and optin.batch[0] == optin.batch[1]:
        batch = f"batch {optin.batch[0]} always"
    due = ""
    if optin.deadline is not None:
        hours = optin.deadline.seconds / 3600.0
        within = optin.deadline.since_submission
        due = f", to end within {hours:.2f} h" if within else f", to end by {minute(optin.deadline.seconds)}"
    cost = f", using up to {optin.cost:g} times the GPU hours of its own size" if optin.cost is not None else ""
    kinds = ""
    if optin.kinds:
        kinds = f", {'any type of GPU' if ANY in optin.kinds else 'GPUs of type ' + ' or '.join(optin.kinds)}"
    return f"{size}{kinds}, {batch}{due}{cost}" + ("" if optin.resize else ", measured and never resized")


def _examined(what: str) -> Verdict:
    path = Path(what)
    if not os.access(what, os.F_OK) or not path.is_file():  # a comment may be longer than a file's name
        if "=" not in what and ":" not in what:
            raise BadInput(f"{what}: neither a file nor a comment such as 'ones: gpus=1-16'")
        optin, findings = comment_findings(what)
        return Verdict(optin, None, "", tuple(findings))
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"{what}: too large for a batch script of Slurm")
        return examine(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{what}: cannot be read: {error}") from None


def _limits(path: Path) -> StrategyLimits | None:
    try:
        with path.open("rb") as file:
            return decode_spec(file.read(MAX_SPEC + 1)).limits
    except (OSError, ProtocolError) as error:
        raise BadInput(f"{path}: {error}") from None


def _against(limits: StrategyLimits, verdict: Verdict) -> list[ScriptFinding]:
    """Return findings if the comment's range, or the shape of the first run, does not fit the strategy's limits."""
    found = []
    sizes, name = [row.gpus for row in limits.sizes], limits.strategy
    allowed = verdict.optin.gpus if verdict.optin is not None else None
    if sizes and allowed is not None:
        low, high = allowed
        within = [row for row in limits.sizes if low <= row.gpus <= high]
        text = f"{name} runs on {counts(limits.sizes)} GPUs, and its comment allows {low} to {high}"
        if not within:
            found.append(error(0, f"{text}: none of them"))
        elif within[0].gpus != low:
            found.append(warning(0, f"{text}: begin the range at {within[0].gpus}"))
        else:
            found += _steps(within, verdict.optin.step if verdict.optin is not None else 1, text)
    nodes, each = verdict.shape or (0, 0)
    if sizes and nodes * each and nodes * each not in sizes:
        found.append(error(0, f"it starts with {nodes * each} GPUs: {limits.refusal(nodes * each)}"))
    return found


def _steps(within: list[SizeLimits], step: int, text: str) -> list[ScriptFinding]:
    """Warn if the comment's range includes sizes that the strategy cannot use."""
    low, high = within[0].gpus, within[-1].gpus
    wanted = math.gcd(*(row.gpus - low for row in within))
    if wanted <= 1 or step % wanted == 0:
        return []
    return [warning(0, f"{text}: allow only steps of {wanted}, as gpus={low}-{high}:{wanted}")]


@command
def check(
    what: Annotated[str, typer.Argument(metavar="SCRIPT|COMMENT", help="A batch script, or a comment in quotes.")],
    spec: Annotated[Path | None, typer.Option(help="spec.json of an earlier run, for its strategy's limits.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check if a job could be resized. The exit code is 0 if it could, and 1 if it could not or there are errors."""
    verdict = _examined(what)
    limits = _limits(spec) if spec is not None else None
    if limits is not None:
        verdict = replace(verdict, findings=(*verdict.findings, *_against(limits, verdict)))
    if as_json:
        strategy = limits.strategy if limits is not None else None
        print_json({"elastic": verdict.elastic, "strategy": strategy, **vars(verdict)})
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
            say(f"{one.weight + ':':9}{f'line {one.line}: ' if one.line else ''}{one.text}", 500)
    if not verdict.elastic or any(one.weight == "error" for one in verdict.findings):
        raise typer.Exit(1)
