"""The command line: `python -m tests.cluster`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from . import cluster as clusters
from . import paths, pyslurm_build, root
from .box import Box
from .cluster import Cluster
from .errors import ClusterError
from .sites import SITES
from .spec import Bind

app = typer.Typer(
    help="A real Slurm on this machine. Needs root on a Debian-like Linux; leaves nothing behind.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True, highlight=False)

SiteArgument = Annotated[str, typer.Argument(help=f"One of: {', '.join(SITES)}.")]
NameOption = Annotated[str | None, typer.Option("--name", help="The cluster's name; by default the site's.")]
UserOption = Annotated[str, typer.Option("--user", "-u", help="alice, bob, ops (an operator), root or slurm.")]
CwdOption = Annotated[str | None, typer.Option(help="Where to run; by default the user's home.")]


class Progress:
    """Steps as lines; between them, on a terminal, one line that moves."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._step = ""

    def start(self, step: str) -> None:
        self._step = step
        if console.is_terminal:
            self._status = console.status(step)
            self._status.start()
        else:
            console.print(f"{step} ...")

    def detail(self, text: str) -> None:
        if self._status:
            self._status.update(f"{self._step}: {text[:80]}")

    def end(self, step: str, seconds: float, failed: bool) -> None:
        if self._status:
            self._status.stop()
            self._status = None
        console.print(f"{step}: {'failed after' if failed else 'done in'} {seconds:.1f} s")

    def note(self, text: str) -> None:
        console.print(text, markup=False)


def _check_site(site: str) -> None:
    if site not in SITES:
        raise ClusterError(f"no site {site!r}; there are {', '.join(SITES)}")


def _running() -> list[Cluster]:
    folders = sorted(paths.clusters().glob("*")) if paths.clusters().is_dir() else []
    found = []
    for folder in folders:
        try:
            found.append(Cluster.attach(folder.name))
        except (ClusterError, FileNotFoundError):
            continue
    return found


@app.command()
def build(
    site: SiteArgument,
    again: Annotated[bool, typer.Option("--again", help="Try PySlurm again where it could not be built.")] = False,
) -> None:
    """Build what a site needs (minutes, once). An interrupted build goes on where it was."""
    _check_site(site)
    clusters.build(SITES[site], Progress(), again)
    console.print(f"{site}: built in {root.folder(SITES[site])}")


@app.command()
def up(
    site: SiteArgument = "gres",
    name: NameOption = None,
    bind: Annotated[list[Path] | None, typer.Option(help="Show one more host folder inside, read-only.")] = None,
) -> None:
    """Start a cluster, which stays until `down`. Builds the site first if need be."""
    _check_site(site)
    cluster = Cluster(site, name or site, Progress())
    binds = [Bind(str(path.resolve()), str(path.resolve())) for path in bind or []]
    cluster.start(binds, stay=True)
    console.print(f"{cluster.name}: {cluster.site.about}, all nodes idle")
    if not cluster.pyslurm:
        console.print(f"no PySlurm: {cluster.pyslurm_why}", markup=False)
    if cluster.site.accounting and not cluster.accounting:
        console.print(f"no accounting: {cluster.accounting_why}", markup=False)
    console.print(f"homes, scratch and logs: {cluster.box.folder}")
    console.print(f"a shell there: .venv/bin/python -m tests.cluster shell {cluster.name}")


@app.command()
def down(
    site: Annotated[str | None, typer.Argument(help="The cluster's site or name.")] = None,
    name: NameOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Take every cluster down.")] = False,
) -> None:
    """Take a cluster down: its processes, its mounts and its files, homes included."""
    if everything:
        for cluster in _running():
            cluster.stop()
            console.print(f"{cluster.name}: down")
        for folder in paths.clusters().glob("*") if paths.clusters().is_dir() else []:
            Box(folder).remove()
        return
    wanted = name or site
    if wanted is None:
        raise ClusterError("say which: a name, or --all")
    Cluster.attach(wanted).stop()
    console.print(f"{wanted}: down")


@app.command("exec")
def execute(
    name: Annotated[str, typer.Argument(help="The cluster's name (by default its site).")],
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    user: UserOption = "alice",
    cwd: CwdOption = None,
) -> None:
    """Run a command in a cluster; input, output and exit status pass through.

    Put -- before a command that has options of its own.
    """
    _pass_through(Cluster.attach(name), command, user, cwd)


@app.command()
def shell(
    name: Annotated[str, typer.Argument(help="The cluster's name.")] = "gres",
    user: UserOption = "alice",
    cwd: CwdOption = None,
) -> None:
    """Open a shell in a cluster, as one of its users."""
    _pass_through(Cluster.attach(name), ["bash"], user, cwd)


def _pass_through(cluster: Cluster, command: list[str], user: str, cwd: str | None) -> NoReturn:
    """Become the command, so that every signal reaches it."""
    env = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    command, env = cluster.command(command, user=user, cwd=cwd, env=env)
    os.chdir("/")
    os.execve(command[0], command, env)


@app.command()
def status() -> None:
    """Show what is built, and which clusters run."""
    sites = Table("site", "Slurm", "PySlurm", "root", title="sites", title_justify="left")
    for site in SITES.values():
        if root.is_built(site):
            pyslurm = pyslurm_build.find(site)
            shown = "not built" if pyslurm is None else pyslurm.why or str(site.pyslurm)
            sites.add_row(site.name, root.slurm_version(site), shown, str(root.folder(site)))
        else:
            sites.add_row(site.name, "not built", "", "")
    running = Table("name", "site", "process", "folder", title="running", title_justify="left")
    for cluster in _running():
        running.add_row(cluster.name, cluster.site.name, str(cluster.box.init), str(cluster.box.folder))
    output = Console(highlight=False)
    output.print(sites)
    output.print(running if running.row_count else "no cluster is running")


def main() -> None:
    """Run, and show errors that are meant to be read as one message."""
    try:
        app()
    except ClusterError as why:
        console.print(f"error: {why}", style="red", markup=False)
        sys.exit(1)
