"""`python -m tests.guide`: docs/admin.md followed to the letter on a real Slurm with a real systemd, and broken in each
of the ways that it lists.

It needs root on Debian, as `python -m tests.cluster` does, and takes about three quarters of an hour. Exit code 1 where
something of the guide did not hold.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.cluster import ClusterError, root
from tests.cluster.cli import Progress
from tests.endtoend.fault_site import small_disks
from tests.guide.follow import Outcome
from tests.guide.host import why_no_systemd
from tests.guide.place import SMALL, Place
from tests.guide.reader import Reader, console, unknown
from tests.guide.site import HOST

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def table(outcomes: list[Outcome]) -> Table:
    """What was broken how, what was seen, and how soon it was well."""
    shown = Table("row", "broken", "seen", "well after", "faults", show_lines=True)
    for one in outcomes:
        seconds = "" if one.recovered_s is None else f"{one.recovered_s:.1f} s"
        record = one.record
        by = f"{record.how}; then {record.repaired}" if record.repaired else record.how
        shown.add_row(one.name, by, "\n".join(line[:160] for line in record.seen), seconds, "\n".join(one.faults))
    return shown


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Only rows whose name has this (a regular expression).")] = "",
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "guide",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was seen there.")] = None,
) -> None:
    """Follow docs/admin.md and break it in each way that it lists."""
    why = why_no_systemd()
    if why:
        console.print(why, markup=False)
        raise typer.Exit(1)
    if missing := unknown():
        console.print("\n".join(missing), markup=False)
        raise typer.Exit(1)
    root.build(HOST, Progress())
    with small_disks(SMALL) as disks:
        place = Place(name, disks)
        reader = Reader(place, only)
        try:
            reader.all()
        except ClusterError as error:
            reader.say(f"the guide cannot be followed: {error}")
            raise typer.Exit(1) from None
        finally:
            place.stop()
    Console(highlight=False, width=160).print(table(reader.outcomes))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(one) for one in reader.outcomes], indent=1))
    if not all(one.fine for one in reader.outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
