"""Showing what users wrote without letting it do anything: no terminal escapes, no markup, no endless lines.

And figures as people read them.
"""

from __future__ import annotations

from rich.markup import escape


def plain(text: str, width: int = 200) -> str:
    """The text with unprintable characters replaced, cut at `width` characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text[: width + 1])
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def safe(text: str, width: int = 200) -> str:
    """`plain`, and no rich markup either."""
    return escape(plain(text, width))


def resized(old_nodes: int, old_gpus: int, new_nodes: int, new_gpus: int) -> str:
    """A resize by its nodes and GPUs per node: `1x2 → 2x4`, or `1x2 → parked` where the job was taken to zero GPUs."""
    return f"{old_nodes}x{old_gpus} → {f'{new_nodes}x{new_gpus}' if new_nodes else 'parked'}"


def seconds(value: float | None) -> str:
    """A length of time as people read it: 42 s, 3 m 05 s, 2 h 10 m, 3 d 4 h."""
    if value is None:
        return "–"
    whole = round(value)
    if whole < 60:
        return f"{value:.1f} s" if value < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
