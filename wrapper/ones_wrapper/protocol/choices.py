"""Words to choose from, in a message that refuses another one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean gpus?)`, which names the known word closest to `word`; nothing if none is close."""
    by_word = {one.lower(): one for one in known}
    return "".join(f" (did you mean {by_word[one]}?)" for one in get_close_matches(word.lower(), by_word, n=1))


def listed(known: Iterable[str], word: str) -> str:
    """Return all known words, and the one closest to `word`: `gpus, nodes, batch (did you mean gpus?)`."""
    known = list(known)
    return ", ".join(known) + near(word, known)
