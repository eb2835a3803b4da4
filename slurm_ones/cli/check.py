"""`slurm-ones check`: what would happen to a batch script or a comment, before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slurm_ones.cli.common import JsonOption, command, console, print_json
from slurm_ones.observe.batch_script import Finding, Verdict, Weight, comment_findings, examine
from slurm_ones.observe.optin import OptIn
from slurm_ones.report.text import plain
from slurm_ones.simulate import BadInput

MOST_BYTES = 1 << 20


def _allowed(optin: OptIn) -> str:
    """The opt-in in words."""
    name, limits = ("nodes", optin.nodes) if optin.nodes else ("GPUs", optin.gpus)
    size = f"{limits[0]} to {limits[1]} {name}" if limits else "its size"
    batch = "its own batch" if optin.batch is None else f"batch {optin.batch[0]} to {optin.batch[1]}"
    if optin.batch is not None and optin.batch[0] == optin.batch[1]:
        batch = f"batch {optin.batch[0]} always"
    return f"{size}, {batch}" + ("" if optin.resize else ", measured and never resized")


def _show(findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        place = f"line {finding.line}: " if finding.line else ""
        console.print(f"{finding.weight.value + ':':9}{plain(place + finding.text, 500)}", markup=False, soft_wrap=True)


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


@command
def check(
    what: Annotated[str, typer.Argument(metavar="SCRIPT|COMMENT", help="A batch script, or a comment in quotes.")],
    as_json: JsonOption = False,
) -> None:
    """Say how far a job would be elastic. Exit code 0: it would be; 1: it would not, or something stands against it."""
    verdict = _examined(what)
    if as_json:
        print_json(
            {
                "elastic": verdict.elastic,
                "optin": verdict.optin,
                "shape": verdict.shape,
                "directory": verdict.directory,
                "findings": [
                    {"weight": one.weight.value, "line": one.line, "text": one.text} for one in verdict.findings
                ],
            }
        )
    else:
        console.print(f"{'elastic' if verdict.elastic else 'not elastic'}", markup=False)
        if verdict.optin is not None:
            console.print(f"{'allows:':9}{_allowed(verdict.optin)}", markup=False, soft_wrap=True)
            way = "blocks that join and leave while it trains" if verdict.optin.blocks else "checkpoint and requeue"
            console.print(f"{'resized:':9}by {way}", markup=False, soft_wrap=True)
        if verdict.directory:
            console.print(f"{'reports:':9}{plain(verdict.directory, 500)}", markup=False, soft_wrap=True)
        _show(verdict.findings)
    if not verdict.elastic or any(one.weight is Weight.ERROR for one in verdict.findings):
        raise typer.Exit(1)
