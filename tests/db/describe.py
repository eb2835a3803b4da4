"""Generator of the documentation of tables and views, from their definitions.

``python -m tests.db.describe docs/database.md`` replaces the text between the marks in the file; a test compares both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import ForeignKey, Table
from sqlalchemy.schema import Column

from ones_db.tables import METADATA
from ones_db.views import KINDS, VIEWS


def diagram() -> str:
    """Return a Mermaid diagram of the tables, their keys and relations."""
    lines = ["```mermaid", "erDiagram"]
    for table in _tables():
        for key in _foreign(table):
            # A key that is the whole of the table's own is there once at most.
            many = "o|" if [column.name for column in table.primary_key] == [key.parent.name] else "o{"
            one = "|o" if key.parent.nullable else "||"
            lines.append(f'    {key.column.table.name} {one}--{many} {table.name} : "{key.parent.name}"')
    for table in _tables():
        lines.append(f"    {table.name} {{")
        for column in table.columns:
            marks = [mark for mark, is_so in (("PK", column.primary_key), ("FK", column.foreign_keys)) if is_so]
            if marks:
                lines.append(f"        {_type(column)} {column.name} {', '.join(marks)}")
        lines.append("    }")
    return "\n".join([*lines, "```"])


def tables() -> str:
    """Return a Markdown table of the columns of each table."""
    return _sections(
        ("column", "type", "", "meaning"),
        [(table.name, table.comment or "", [*map(_row, table.columns)]) for table in _tables()],
    )


def views() -> str:
    """Return a Markdown table of the columns of each view."""
    return _sections(
        ("column", "type", "meaning"),
        [(v.name, v.title, [(f"`{c.name}`", KINDS[c.kind], c.comment) for c in v.columns]) for v in VIEWS.values()],
    )


def _sections(head: Sequence[str], parts: Sequence[tuple[str, str, Sequence[Sequence[str]]]]) -> str:
    """Return a heading, a sentence and a table for each (name, title, rows)."""
    lines = []
    for name, title, rows in parts:
        lines += [f"### `{name}`", "", f"{title[:1].upper()}{title[1:].rstrip('.')}.", ""]
        lines += [_line(head), "|---" * len(head) + "|", *map(_line, rows), ""]
    return "\n".join(lines).rstrip()


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in (text.replace("|", "\\|") for text in cells)) + "|"


def _row(column: Column[object]) -> tuple[str, ...]:
    places = [f"refers to `{foreign.column.table.name}.{foreign.column.name}`" for foreign in column.foreign_keys]
    null = "" if column.nullable else "always"
    key = "key" if column.primary_key else null
    return f"`{column.name}`", _type(column), key, "; ".join([column.comment or "", *places])


PARTS: dict[str, Callable[[], str]] = {"diagram": diagram, "views": views, "tables": tables}
"""Generator of each part of the document, by the name in the part's marks."""


def renewed(document: str) -> str:
    """Return the document with the parts between its marks made again. Raises `ValueError` without a mark."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: python -m tests.db.describe -->", f"<!-- end of {name} -->"
        found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", document, re.DOTALL)
        if found is None:
            raise ValueError(f"the document has no place for the {name}: write {begin} and {end}")
        document = f"{document[: found.start()]}{begin}\n\n{part()}\n\n{end}{document[found.end() :]}"
    return document


def _tables() -> list[Table]:
    return list(METADATA.sorted_tables)


def _foreign(table: Table) -> list[ForeignKey]:
    return [key for column in table.columns for key in sorted(column.foreign_keys, key=lambda key: key.target_fullname)]


def _type(column: Column[object]) -> str:
    return {"BIGINT": "integer", "DOUBLE": "number", "TEXT": "text", "BOOLEAN": "boolean"}[str(column.type.compile())]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.db.describe FILE")
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
