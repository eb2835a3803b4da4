"""Help in an error message about an unknown word: the words that are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean gpus?)` with the known word closest to `word`; empty if none is close."""
    by_word = {one.lower(): one for one in known}
    return "".join(f" (did you mean {by_word[one]}?)" for one in get_close_matches(word.lower(), by_word, n=1))


def listed(known: Iterable[str], word: str) -> str:
    """Return all known words, with a hint of the one closest to `word`: `gpus, nodes, batch (did you mean gpus?)`."""
    known = list(known)
    return ", ".join(known) + near(word, known)
