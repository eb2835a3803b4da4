"""Documents that would go stale if nobody looked: names, paths, links, settings, and their language."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from slurm_ones.cli import _MODULES, app
from slurm_ones.config import GuestSettings, LimitSettings, NotifySettings, ResizeSettings, RetentionSettings, Settings
from slurm_ones.policies import POLICIES
from tests.test_words import BANNED

TOP = Path(__file__).parents[1]
DOCS = TOP / "docs"
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "wrapper/README.md", "db/README.md")
PAGES = sorted([*(TOP / page for page in TOP_PAGES), *DOCS.rglob("*.md")])
MOST_WORDS = 500
"""Of the README: `len(text.split())`, code, tables and links included."""
MOST_CHARACTERS = 200

FOLDERS = "slurm_ones|wrapper|db|tests|docs|benchmarks|systemd|sbatch_templates"
PATH = re.compile(rf"(?<![\w./~-])((?:{FOLDERS})(?:/[\w.-]+)+/?)(?![\w*<{{])")
NAME = re.compile(r"(?<![\w./-])((?:slurm_ones|ones_db|ones_wrapper|benchmarks|tests)(?:\.[A-Za-z_]\w*)+)")
SUFFIXES = (".md", ".sqlite")
GROUPS = {"slurm_ones.policies", "ones_wrapper.launchers", "ones_wrapper.exchanges"}
"""Names of groups of entry points, which are no modules."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize(
    "model", [Settings, ResizeSettings, GuestSettings, LimitSettings, NotifySettings, RetentionSettings]
)
def test_every_setting_is_documented_as_it_is(model: type[BaseModel]) -> None:
    text = (DOCS / "configuration.md").read_text()
    described = descriptions(model)
    assert {*described} == {*model.model_fields} - {"resize"}
    for name, words in described.items():
        assert f"`{name}`" in text
        assert words in text


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Docstrings of the fields of a class, by name, in one line each."""
    (found,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(found, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@pytest.mark.parametrize("name", POLICIES)
def test_policies_and_their_options_are_documented(name: str) -> None:
    """An admin finds each policy, and each of its options with the default that it has."""
    text = (DOCS / "configuration.md").read_text()
    assert f"`{name}`" in text
    options = getattr(POLICIES[name], "options_type", None)
    for field in fields(options) if options else ():
        default = json.dumps(field.default)
        assert f"| `{field.name}` | `{default}` |" in text or f"`{field.name}` {default}" in text


def test_policies_are_named_where_people_choose() -> None:
    text = (DOCS / "researcher.md").read_text()
    assert all(f"`{name}`" in text for name in POLICIES)


def test_commands_are_named_where_people_need_them() -> None:
    text = "".join((DOCS / page).read_text() for page in ("user.md", "admin.md", "researcher.md"))
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"slurm-ones {command.callback.__name__}" in text


def test_the_readme_is_short() -> None:
    text = (TOP / "README.md").read_text()
    assert len(text.split()) <= MOST_WORDS
    for target in ("docs/user.md", "docs/admin.md", "docs/researcher.md", "docs/developer.md", "docs/img/demo.png"):
        assert f"]({target})" in text


def test_every_decision_is_listed() -> None:
    text = (DOCS / "decisions/index.md").read_text()
    for path in DOCS.glob("decisions/0*.md"):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        number, _, words = title.partition(". ")
        assert f"| {number} | [{words}]({path.name}) |" in text


def assert_no_page(check: Callable[[Path], Iterable[str]]) -> None:
    """Has what the check finds."""
    found = [f"{page.relative_to(TOP)}: {what}" for page in PAGES for what in check(page)]
    assert not found, "\n".join(found)


def test_links_lead_somewhere() -> None:

    def dead(page: Path) -> Iterator[str]:
        for target in LINK.findall(page.read_text()):
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            if "://" not in target and not (path.exists() and (not anchor or anchor in anchors(path))):
                yield target

    assert_no_page(dead)


def test_paths_and_names_exist() -> None:
    """What a page names by its path, or as a module, class or attribute, is there; its links are another test's."""

    def missing(page: Path) -> Iterator[str]:
        text = re.sub(r"\]\([^)\s]+\)", "]", page.read_text())
        yield from (path for path in PATH.findall(text) if not (TOP / path.rstrip(".")).exists())
        names = (name for name in NAME.findall(text) if not name.endswith(SUFFIXES) and name not in GROUPS)
        yield from (name for name in names if not resolves(name))

    assert_no_page(missing)


def test_tests_exist() -> None:
    paths = [*(TOP / "tests").rglob("test_*.py")]
    names = {path.name for path in paths}
    defined = {*re.findall(r"def (\w+)\(", "".join(path.read_text() for path in paths))}

    def missing(page: Path) -> Iterator[str]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for name, suffix in re.findall(r"\b(test_\w+)(\.py)?", text):
            if not (f"{name}.py" in names if suffix else name in defined):
                yield name

    assert_no_page(missing)


def test_one_sentence_a_line() -> None:
    """So a change shows the sentence that changed, and no sentence has to be read twice."""

    def broken(page: Path) -> Iterator[str]:
        lines = list(prose(page))
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if len(line) > MOST_CHARACTERS or re.search(r"[a-z0-9)`\"*][.!?] +[A-Z`*\[]", without_dots(line)):
                yield line
            goes_on = line and following and not re.match(r" *([-*]|\d+\.) ", following)
            if goes_on and not re.search(r"[.:?!][*_)\"]*$", line):
                yield f"{line!r} goes on in the line below"

    assert_no_page(broken)


def test_the_words_of_the_field() -> None:
    """Texts have the glossary's words and no metaphors; code in them is what it is."""

    def other(page: Path) -> Iterator[str]:
        text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
        yield from (match[0] for match in BANNED.finditer(text))

    assert_no_page(other)


def test_the_picture_is_as_it_is_drawn() -> None:
    drawn = subprocess.run([sys.executable, DOCS / "rooms.py"], capture_output=True, text=True, check=True).stdout
    assert (DOCS / "img/rooms.svg").read_text() == drawn, "run: python docs/rooms.py >docs/img/rooms.svg"


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"([\w/]+\.md)$", (TOP / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {str(path.relative_to(DOCS)) for path in PAGES if DOCS in path.parents}
    assert {page for page in pages if not page.startswith("decisions/0")} == {
        page for page in listed if "*" not in page
    }


def test_the_site_has_every_command() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="commands.md"))
    made = runpy.run_path(str(DOCS / "hooks.py"))["on_page_markdown"]("# Commands", page)
    titles = re.findall("^## slurm-ones (.+)$", made, flags=re.MULTILINE)
    assert {title.split()[0] for title in titles} == set(_MODULES) and "import sacct" in titles
    assert made.count("Usage: slurm-ones ") == len(titles) and "  --sql " in made


def prose(page: Path) -> Iterator[str]:
    """The lines of a page that are sentences; others (code, tables, headings, markers) are empty."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        is_prose = not line.lstrip().startswith(("|", "#", "<!--", "![", ":::"))
        yield re.sub(r"\]\([^)]*\)", "]", line) if is_prose else ""


def without_dots(line: str) -> str:
    """The line without code, and without dots that end no sentence."""
    line = re.sub(r"`[^`]*`", "`x`", line)
    return re.sub(r"\b(al|vs|e\.g|i\.e|No|\d+)\. ", " ", line)


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@cache
def resolves(name: str) -> bool:
    """A module, or an attribute of one; fields of dataclasses without a default count."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        owner, _, attribute = name.rpartition(".")
        try:
            found: Any = pkgutil.resolve_name(owner)
        except (ImportError, AttributeError):
            return False
        return attribute in getattr(found, "__annotations__", {})
    return True
