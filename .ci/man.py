"""Write a man page for each command of `slurm-ones` into a folder, from the words that `--help` has.

python .ci/man.py build/man1
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from slurm_ones import __version__
from slurm_ones.cli import app


def plain(text: str) -> str:
    """Text in which groff finds no request and no escape."""
    lines = text.replace("\\", "\\\\").replace("-", "\\-").replace("\b", "").splitlines()
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


class Groff(typer.Context.formatter_class):  # type: ignore[misc]
    """What `--help` prints, as groff reads it."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        title = "SYNOPSIS" if prog.count(" ") < 2 else prog.rpartition(" ")[2].upper()
        self.write(f".SH {plain(title)}\n.B {plain(f'{prog} {args}')}\n.PP\n")

    def write_heading(self, heading: str) -> None:
        self.write(f".SH {plain(heading).upper()}\n")

    def write_text(self, text: str) -> None:
        self.write("".join(f"{plain(' '.join(part.split()))}\n.PP\n" for part in text.split("\n\n")))

    def write_paragraph(self) -> None:
        pass

    def write_dl(self, rows: Iterable[tuple[str, str]], *_: Any, **__: Any) -> None:
        self.write("".join(f".TP\n\\fB{plain(name)}\\fR\n{plain(text)}\n" for name, text in rows))


def body(command: Any, name: str, parent: Any = None) -> str:
    """A command's help, and that of those below it."""
    context = typer.Context(command, info_name=name, parent=parent, **command.context_settings)
    text, command.rich_markup_mode = Groff(width=10_000), None
    command.format_help(context, text)
    below = getattr(command, "commands", {}) if parent is not None else {}
    return str(text.getvalue()) + "".join(body(one, its, context) for its, one in sorted(below.items()))


def main(folder: Path) -> None:
    """Write all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    group: Any = typer.main.get_command(app)
    whole = typer.Context(group, info_name="slurm-ones", **group.context_settings)
    commands = {f"slurm-ones-{name}": group.get_command(whole, name) for name in group.list_commands(whole)}
    pages = {"slurm-ones": (group, body(group, "slurm-ones"), commands)}
    for name, one in commands.items():
        pages[name] = (one, body(one, one.name, whole), ["slurm-ones"])
    for name, (one, text, others) in pages.items():
        first = " ".join(one.help.partition("\n\n")[0].split()).rstrip(".")
        head = f'.TH {name.upper()} 1 "" "slurm\\-ones {__version__}"\n.SH NAME\n{plain(f"{name} - {first}")}\n'
        also = ",\n".join(f"\\fB{plain(other)}\\fR(1)" for other in others)
        (folder / f"{name}.1").write_text(f"{head}{text}.SH SEE ALSO\n{also}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
