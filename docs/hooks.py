"""Hooks of mkdocs (mkdocs.yml).

The site holds docs/ alone, so a link that leaves docs/ becomes the path that it names. `PAGES` are pages of the
site whose text stands elsewhere; the options on `COMMANDS` are those that the program has.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from slurm_ones.cli import app

TOP = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
PAGES = {"contributing.md": "CONTRIBUTING.md"}
COMMANDS = "commands.md"


def helps(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """A section with the help of each command that has options of its own, from this one down."""
    context = typer.Context(command, info_name=name, parent=parent, terminal_width=100, **command.context_settings)
    command.rich_markup_mode = None
    if hasattr(command, "list_commands"):
        for its in command.list_commands(context):
            yield from helps(command.get_command(context, its), its, context)
    else:
        yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text, with links as the site has them."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    folder = here
    if source := PAGES.get(page.file.src_uri):
        markdown, folder = (TOP / source).read_text(encoding="utf-8"), posixpath.dirname(source)

    if page.file.src_uri == COMMANDS:
        return markdown + "\n" + "\n".join(helps(typer.main.get_command(app), "slurm-ones"))

    def of_the_site(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        for name, source in PAGES.items():
            path = f"docs/{name}" if path == source else path
        if path.startswith("docs/"):
            return f"[{words}]({posixpath.relpath(path, here)}{anchor})"
        return f"`{path}`" if words.strip("/`") in path else f"{words} (`{path}`)"

    return LINK.sub(of_the_site, markdown)
