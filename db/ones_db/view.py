"""What a view is, and the SQL that both databases take.

The SQL of `ones_db.views` is plain but for a few words that the databases spell differently, written as
functions and replaced here: ``utc(x)`` (Unix seconds as text), ``whole(x)`` (rounded down, of numbers that are not
negative), ``latest(a, b)``, ``earliest(a, b)``, ``listed(x, separator)`` (an aggregate, in the order of its input); and
of text that is a JSON object ``sizes_of(x)`` (a table of the values of its list of sizes) and ``member(value,
'$.name')`` (a whole number of one of these).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WORDS: dict[str, dict[str, str]] = {
    "sqlite": {
        "utc": "strftime('%Y-%m-%d %H:%M:%S', {}, 'unixepoch')",
        "whole": "CAST({} AS INTEGER)",
        "latest": "max({})",
        "earliest": "min({})",
        "listed": "group_concat({})",
        "sizes_of": "json_each({}, '$.sizes')",
        "member": "json_extract({})",
    },
    "postgresql": {
        "utc": "to_char(to_timestamp({}) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')",
        "whole": "CAST(floor({}) AS BIGINT)",
        "latest": "greatest({})",
        "earliest": "least({})",
        "listed": "string_agg({})",
        "sizes_of": "jsonb_array_elements(CAST({} AS jsonb) -> 'sizes')",
        "member": "CAST(jsonb_path_query_first({}) AS BIGINT)",
    },
}
"""How each database spells what they spell differently; the braces stand for the arguments."""

_WORD = re.compile(rf"\b({'|'.join(WORDS['sqlite'])})\(")


@dataclass(frozen=True)
class Column:
    """A column of a view."""

    name: str
    kind: str
    """``int``, ``float``, ``text``, ``bool`` (0 or 1), ``time`` (Unix seconds), ``day`` (YYYY-MM-DD in UTC) or
    ``said``, a time as text in UTC."""
    comment: str
    """What it means, and its unit."""
    of: str = ""
    """Of ``said``: the column whose time it says."""


@dataclass(frozen=True)
class View:
    """A view, as documents, frames and databases need it."""

    name: str
    title: str
    """What it shows, in a sentence without a full stop."""
    columns: tuple[Column, ...]
    sql: str
    """A SELECT of all columns but those that say times, in `WORDS`."""
    order: tuple[str, ...]
    """Columns that its rows are best read in the order of."""
    aggregate: bool = False
    """It is about no single job, so that everybody may see all of it."""

    def select(self, dialect: str) -> str:
        """Its definition as the database takes it: ``sqlite`` or ``postgresql``."""
        columns = ", ".join(f"utc(v.{c.of}) AS {c.name}" if c.of else f"v.{c.name}" for c in self.columns)
        return spelled(f"SELECT {columns} FROM ({self.sql}) v", dialect)


def spelled(sql: str, dialect: str) -> str:
    """The SQL with `WORDS` as the database spells them."""
    found = _WORD.search(sql)
    if found is None:
        return sql
    end, depth = found.end(), 1
    while depth:
        depth += {"(": 1, ")": -1}.get(sql[end], 0)
        end += 1
    inner = spelled(sql[found.end() : end - 1], dialect)
    word = WORDS[dialect][found[1]].replace("{}", inner)
    return sql[: found.start()] + word + spelled(sql[end:], dialect)
