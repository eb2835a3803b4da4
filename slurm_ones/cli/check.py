"""`slurm-ones check`: what would happen to a batch script or a comment, before it is submitted."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ones_wrapper.limits import Limits, SizeLimits
from ones_wrapper.protocol import MAX_SPEC, ProtocolError, decode_spec
from slurm_ones.cli.batch_script import ScriptFinding, Verdict, Weight, comment_findings, examine
from slurm_ones.cli.common import JsonOption, command, print_json, say
from slurm_ones.jobs.optin import ANY, OptIn
from slurm_ones.simulate import BadInput
from slurm_ones.text import counts, described

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
    kinds = ""
    if optin.kinds:
        kinds = f", {'any type of GPU' if ANY in optin.kinds else 'GPUs of type ' + ' or '.join(optin.kinds)}"
    return f"{size}{kinds}, {batch}{due}" + ("" if optin.resize else ", measured and never resized")


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
            found.append(ScriptFinding(Weight.ERROR, 0, f"{text}: none of them"))
        elif within[0].gpus != low:
            found.append(ScriptFinding(Weight.WARNING, 0, f"{text}: let it begin at {within[0].gpus}"))
        else:
            found += _steps(within, verdict.optin.step if verdict.optin is not None else 1, text)
    nodes, each = verdict.shape or (0, 0)
    if sizes and nodes * each and nodes * each not in sizes:
        found.append(
            ScriptFinding(Weight.ERROR, 0, f"it starts with {nodes * each} GPUs: {limits.refusal(nodes * each)}")
        )
    return found


def _steps(within: list[SizeLimits], step: int, text: str) -> list[ScriptFinding]:
    """That the comment's range holds numbers between those that the strategy can use, of which nobody knows before the
    first run."""
    low, high = within[0].gpus, within[-1].gpus
    wanted = math.gcd(*(row.gpus - low for row in within))
    if wanted <= 1 or step % wanted == 0:
        return []
    return [ScriptFinding(Weight.WARNING, 0, f"{text}: allow it steps of {wanted} alone, gpus={low}-{high}:{wanted}")]


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
