"""Command `slurm-ones demo`: elastic trainings on this machine, without Slurm, root or a GPU."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from slurm_ones.cli.common import command, ended_by_signals, is_terminal, say
from slurm_ones.cli.report import report
from slurm_ones.cli.web import say_tunnel
from slurm_ones.demo.jobs import HERE_JOBS, SIMULATED_JOBS, SLOTS, SMALL, SMALL_SIMULATED, DemoJob
from slurm_ones.demo.run import Demo, page_file, prepare, samples_line, torch_version
from slurm_ones.show import page_lacks

TAKES_S = 90
"""Seconds that a demo took on two cores."""


@command
def demo(
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print only the page's address.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="New or empty directory for all files (default: a new temporary one).")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any that is free.")] = 0,
    small: Annotated[bool, typer.Option("--small", help="Fewer and shorter trainings.", hidden=True)] = False,
) -> None:
    """Watch trainings grow and shrink on this machine. It needs no Slurm, no root and no GPU."""
    folder = (directory or Path(tempfile.mkdtemp(prefix="slurm-ones-demo-"))).absolute()
    prepare(folder)
    torch, lacks = torch_version(), page_lacks()
    jobs = (SMALL if small else HERE_JOBS) if torch else ()
    simulated = SMALL_SIMULATED if small else len(SIMULATED_JOBS)
    say(f"A demo of about {TAKES_S} s; Ctrl-C ends it at any time. All its files are in {folder}")
    if torch:
        say(
            f"- {len(jobs)} real PyTorch trainings (torch {torch}) share {SLOTS} emulated GPUs: processes of this "
            "machine that sleep as long as a GPU would compute. Their gradients and resizes are real."
        )
    else:
        say("- torch is not installed here, so no real training runs: pip install 'slurm-ones[demo]'")
    say("- Simulated jobs, in the partition and of the user `simulated`, share 16 simulated GPUs next to them.")
    say("The companion that resizes both is the same program as at a site.")
    # Without a display a browser would run in this terminal.
    window = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    status = 130
    try:
        with ended_by_signals():
            status = _run(folder, jobs, simulated, lacks, window and not no_browser, port)
    except KeyboardInterrupt:
        say("interrupted: all processes of the demo have ended")
    raise typer.Exit(status)


def _run(folder: Path, jobs: tuple[DemoJob, ...], simulated: int, lacks: list[str], opens: bool, port: int) -> int:
    began = time.time()

    def at(when: float, line: str) -> None:
        say(f"{max(when - began, 0.0):4.0f} s  {line}")

    with Demo(folder, jobs, simulated, at) as running:
        if lacks:
            say(f"No live page: {', '.join(lacks)} not installed: pip install 'slurm-ones[demo]'")
        else:
            address = running.serve_page(port)
            at(time.time(), f"The live page: {address}")
            say_tunnel(urlsplit(address).port or port)
            if opens:
                webbrowser.open(page_file(folder, address).as_uri())
        done = running.run()
        good = _report(folder, running, page="jinja2" not in lacks)
        if not done:
            say("Not every job has ended in time: this machine may be too busy. The logs are in the folder.")
        say(f"{time.time() - began:.0f} s in all.")
        if not lacks and is_terminal(sys.stdin):
            say("The page stays for an hour; Ctrl-C ends it.")
            with suppress(KeyboardInterrupt):
                running.wait(3600.0)
        return 0 if done and good else 1


def _report(folder: Path, running: Demo, *, page: bool) -> bool:
    """Print the report. Return True if each training used every sample exactly once in each epoch."""
    say("")
    for one in running.slurm.submitted:
        report(job=one.job_id, config=running.settings)
    checked = [samples_line(one, folder) for one in running.slurm.submitted]
    for one in running.slurm.submitted:
        state = running.progress.states.get(one.job_id, "never seen")
        if state != "COMPLETED":
            log = folder / f"slurm-{one.job_id}_0.out"
            say(f"{one.job.name} should have completed but is {state}: its output is in {log}")
    say("Samples, by what each rank wrote down:")
    for _, line in checked:
        say(f"  {line}")
    say("All jobs, simulated ones included (their speed is computed from a model):")
    html = folder / "report.html" if page else None
    report(html=html, config=running.settings)
    if html is not None:
        say(f"The whole report as a page: {html}")
    return all(good for good, _ in checked)
