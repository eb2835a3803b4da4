"""What the product says is as it was read last: a changed sentence shows in the file's difference."""

from __future__ import annotations

import pytest

from tests.golden.sentences import FILE, SECTIONS, section


@pytest.mark.parametrize("name", SECTIONS)
def test_sentences(name: str) -> None:
    """Protects readers from a sentence that nobody read, and tests elsewhere from repeating it."""
    kept = {f"## {part.partition(chr(10))[0]}": part for part in FILE.read_text(encoding="utf-8").split("## ")[1:]}
    assert section(name) == f"## {kept[f'## {name}']}", "changed on purpose? python -m tests.golden.sentences"
