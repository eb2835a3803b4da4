"""docs/admin.md and docs/operations.md as a program reads them: what is to be typed when, and what can break."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tests.cluster import paths

ADMIN, OPERATIONS = (paths.REPOSITORY / "docs" / name for name in ("admin.md", "operations.md"))


@dataclass(frozen=True)
class Command:
    """A line of a console block."""

    line: str
    """Without its prompt, and without a remark behind it."""
    root: bool
    """Typed by root; else by the database's administrator."""


@dataclass(frozen=True)
class Step:
    number: int
    title: str
    commands: tuple[Command, ...]
    files: tuple[str, ...]
    """Contents that the step shows (ini blocks)."""


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.cells[0]

    def command(self, word: str) -> str:
        """The command in the row's last cell that has this word."""
        (found,) = (code for code in re.findall(r"`([^`]+)`", self.cells[-1]) if word in code)
        return str(found).replace(r"\|", "|")


def _section(title: str, page: Path = ADMIN) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{page.name} has no section {title!r}")
    return found[1]


def blocks(title: str, kind: str = "console", page: Path = OPERATIONS) -> list[list[Command]]:
    """The commands of each block of a section, of these kinds (a regular expression)."""
    return [[*_commands(block)] for block in _blocks(_section(title, page), kind)]


def preamble() -> str:
    """What docs/operations.md has typed before all else."""
    (block,) = _blocks(OPERATIONS.read_text().partition("\n## ")[0], "console")
    return "\n".join(command.line for command in _commands(block))


def steps() -> list[Step]:
    parts = re.split(r"^\*\*(\d+)\. ([^*]+?)\.?\*\*", _section("Install"), flags=re.MULTILINE)[1:]
    return [
        Step(int(number), title, tuple(chain(*map(_commands, _blocks(body, "console")))), tuple(_blocks(body, "ini")))
        for number, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def _blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _commands(block: str) -> Iterator[Command]:
    for line in block.splitlines():
        prompt, _, command = line.partition(" ")
        if prompt not in ("#", "$"):
            raise ValueError(f"a line without a prompt: {line!r}")
        # A remark stands at least two blanks behind.
        yield Command(re.split(r"\s{2,}#\s", command)[0].strip(), prompt == "#")


def row(title: str, name: str) -> Row:
    return next(one for one in table(title) if one.name == name)


def table(title: str, page: Path = ADMIN) -> list[Row]:
    """The rows of a section's table, without its head."""
    lines = [line for line in _section(title, page).splitlines() if line.startswith("|")]
    return [Row(tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])) for line in lines[2:]]
