"""Plain words: what docstrings, comments and messages of the product do not say, and how long their sentences are.
Messages have the glossary's words, and name no folder that an installation does not have."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PACKAGES = ["db/ones_db", "slurm_ones", "wrapper/ones_wrapper"]
MOST_WORDS = 25

NO_SUBJECT = re.compile(
    r"(What|Where|Whether|Who|Whom|Whose|Which|How|When|Why|If|That|So|As|Of|From|By|In|For|To|At|On|With|After)\b"
)
"""Beginnings of a docstring that is neither a verb nor a noun phrase with its subject first."""
WORDS = re.compile(
    r"\b(anew|in vain|foretold|so many|of which|told|heard|beside|st(oo|an)ds? still"
    r"|(?:is|are|was|were|be|been|has|have|had|as) said|(?<!left )(?<!leave )(?<!let )(?<!leaves )(?<!: )alone(?! on)"
    r"|(?:None|empty|0|1|true|false|zero|nothing|nan) where"
    r"|where (?:it|they|there|that|nothing|nobody|none) (?:is|are|can|cannot|has|have|was|were))\b",
    flags=re.IGNORECASE,
)
"""Words for which there is a plainer one: again, N, whose, reported, next to, pause, only, if."""

BANNED = re.compile(
    r"\b(told|felt|greet\w*|oust\w*|stays? its hand|forgotten|leases?|struck|strikes?|drama|courts?|judg\w+|seats?"
    r"|in peace|lets? (it|them|him|her|those) go|let go|mend(s|ed|ing)?|greedily|peacefully)\b",
    flags=re.IGNORECASE,
)
"""Metaphors, and second words for what the glossary has a word for."""
OF_THE_REPOSITORY = re.compile(
    r"(?<![\w/.-])(?:benchmarks|docs|examples|queries|sbatch_templates|systemd|tests|wrapper)/[\w./-]*"
)
"""Paths that are in a checkout only."""


def docstrings(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    """Those of fields and constants included."""
    for node in nodes:
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            if (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            ):
                yield line.value


def messages(nodes: list[ast.AST], apart: set[int]) -> Iterator[tuple[int, str]]:
    """Line and text of the strings that are no docstrings."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of each; those on lines of their own that follow each other are one."""
    found: list[list[int | str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#").strip()
            if found and found[-1][1] == line - 1 and token.line.lstrip().startswith("#"):
                found[-1][1:] = line, f"{found[-1][2]} {text}"
            else:
                found.append([line, line, text])
    return ((int(first), str(text)) for first, _, text in found)


def paragraphs(text: str) -> Iterator[str]:
    """Those of sentences, each in one line: without tables, formulas and examples, which are indented."""
    lines = text.expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    found: list[str] = []
    for line in [lines[0].strip() if lines else "", *(line[margin:].rstrip() for line in lines[1:])]:
        bullet = re.match(r"(- |\d+\. )", line)
        if not line or bullet or (line.startswith(" ") and not found):
            yield " ".join(found)
            found = []
        if line and (found or not line.startswith(" ")):
            found.append(line.strip())
    yield " ".join(found)


def faults(text: str) -> Iterator[str]:
    """Words to replace, and sentences that are too long, in one paragraph; code in it is one word, a symbol none."""
    plain = re.sub(r"`+[^`]*`+", "X", text)
    yield from (word[0] for word in WORDS.finditer(plain))
    for sentence in re.split(r"(?<=[.!?:])\)?\s+", plain):
        count = sum(bool(re.search(r"[^\W\d_]{2}|^[aAI]$", word)) for word in sentence.split())
        if count > MOST_WORDS:
            yield f"{count} words: {sentence}"


def faults_of(path: Path) -> Iterator[str]:
    source = path.read_text()
    nodes = [*ast.walk(ast.parse(source))]
    texts = [*docstrings(nodes)]
    printed = [*messages(nodes, {id(text) for text in texts})]
    yield from (f"{path}:{text.lineno}: {text.value[:40]!r}" for text in texts if NO_SUBJECT.match(str(text.value)))
    for line, text in chain(
        ((text.lineno, str(text.value)) for text in texts),
        comments(source),
        # Without SQL and patterns.
        (one for one in printed if " " in one[1] and "SELECT " not in one[1] and one[1].count("|") < 4),
    ):
        yield from (f"{path}:{line}: {fault}" for paragraph in paragraphs(text) for fault in faults(paragraph))
    for line, text in printed:
        yield from (f"{path}:{line}: {word[0]}" for word in BANNED.finditer(text) if " " in text.strip())
        yield from (
            f"{path}:{line}: {found[0]}, which no installation has" for found in OF_THE_REPOSITORY.finditer(text)
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_words_are_plain(package: str) -> None:
    """Verb or noun first, short sentences, the field's words: in docstrings, comments and messages."""
    assert [fault for path in sorted((TOP / package).rglob("*.py")) for fault in faults_of(path)] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Return the shape, only if it is free."""', []),
        ('"""What is free."""', ["'What is free.'"]),
        ("a = 1\n'''Of each job.'''", ["'Of each job.'"]),
        ("# asked anew\n# each time", ["anew"]),
        ('print("so many jobs")', ["so many"]),
        ('print(f"{job} alone")', ["alone"]),
        ('"""Jobs that are left alone."""', []),
        (f'"""The {"very " * 25}end."""', [f"27 words: The {'very ' * 25}end."]),
        ('print("its lease ends")', ["lease"]),
        ('print("see docs/user.md")', ["docs/user.md, which no installation has"]),
        (f'"""The one: {"very " * 11}; {"very " * 11}end.\n\n    {"very " * 30}\n\nSo it is."""', []),
    ],
)
def test_what_is_not_plain_is_found(tmp_path: Path, source: str, found: list[str]) -> None:
    path = tmp_path / "one.py"
    path.write_text(source)
    assert [fault.split(": ", 1)[1] for fault in faults_of(path)] == found
