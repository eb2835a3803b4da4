"""Write a man page for each command of `slurm-ones` into a folder, from the words that `--help` has.

python .ci/man.py build/man1
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperOption

from slurm_ones import __version__
from slurm_ones.cli import app


def plain(text: str) -> str:
    """Text in which groff finds no request and no escape."""
    lines = text.replace("\\", "\\\\").replace("-", "\\-").replace("\b", "").splitlines()
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


def said(command: Any) -> str:
    """What a command does, its first paragraph first."""
    return inspect.cleandoc(command.help or "")


def value_of(one: Any) -> str:
    """The word for an option's value; empty if it takes none."""
    kind = one.type_descriptor.annotation
    if one.metavar or kind is bool:
        return one.metavar or ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(value.value) for value in kind)
    return str(getattr(kind, "__name__", "value")).upper()


def parameters(command: Any) -> Iterator[str]:
    """Arguments and options, each with its value and its help."""
    for one in command.params:
        option = isinstance(one, TyperOption)
        names = ", ".join([*one.opts, *one.secondary_opts]) if option else one.metavar or one.name.upper()
        yield f".TP\n\\fB{plain(names)}\\fR {plain(value_of(one) if option else '')}\n{plain(one.help or '')}"


def page(name: str, command: Any, others: list[str]) -> str:
    """The page of one command, those below it included."""
    words = said(command).split("\n\n")
    first = " ".join(words[0].split()).rstrip(".")
    lines = [f'.TH {name.upper()} 1 "" "slurm\\-ones {__version__}"', ".SH NAME", f"{plain(name)} \\- {plain(first)}"]
    lines += [
        ".SH SYNOPSIS",
        f".B {plain(spoken(name))}" + (" \\fICOMMAND\\fR" if hasattr(command, "commands") else ""),
    ]
    lines += [".SH DESCRIPTION", *(f"{plain(' '.join(part.split()))}\n.PP" for part in words)]
    lines += [".SH OPTIONS", *parameters(command)]
    for below, its in sorted(getattr(command, "commands", {}).items()) if name != "slurm-ones" else ():
        lines += [f".SH {plain(below).upper()}", plain(said(its)), *parameters(its)]
    if others:
        lines += [".SH SEE ALSO", ",\n".join(f"\\fB{plain(other)}\\fR(1)" for other in others)]
    return "\n".join(line for line in lines if line) + "\n"


def spoken(name: str) -> str:
    """The command as it is typed: slurm-ones jobs for slurm-ones-jobs."""
    head, _, command = name.partition("slurm-ones-")
    return f"slurm-ones {command}" if not head and command else name


def main(folder: Path) -> None:
    """Write all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    group: Any = typer.main.get_command(app)
    names = group.list_commands(None)
    pages = {"slurm-ones": page("slurm-ones", group, [f"slurm-ones-{name}" for name in names])}
    for name in names:
        pages[f"slurm-ones-{name}"] = page(f"slurm-ones-{name}", group.get_command(None, name), ["slurm-ones"])
    for name, text in pages.items():
        (folder / f"{name}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
