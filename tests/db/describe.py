"""Generator of docs/tables.md, the documentation of tables and views, from their definitions.

``python -m tests.db.describe > docs/tables.md`` writes it; a test compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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


PAGE = """\
# Tables and views

{made}
[The job database](database.md) shows what can be asked of them, each by a command.

- [Views](#views), the same on SQLite and PostgreSQL
- [Entity diagram](#entity-diagram), [tables](#tables)

## Views

{views}

## Entity diagram

The diagram shows only keys; all columns are below.
A *run* is one start of a job.
Reports are keyed by the run and the number of the report, so reading a report file twice changes nothing.

{diagram}

## Tables

Every time is in Unix seconds, and every batch is a global batch in samples.
"always" means never null.

{tables}
"""
MADE = "`python -m tests.db.describe > docs/tables.md` makes this page from `ones_db.tables` and `ones_db.views`."


def page() -> str:
    """Return the document."""
    return PAGE.format(made=MADE, views=views(), diagram=diagram(), tables=tables())


def _tables() -> list[Table]:
    return list(METADATA.sorted_tables)


def _foreign(table: Table) -> list[ForeignKey]:
    return [key for column in table.columns for key in sorted(column.foreign_keys, key=lambda key: key.target_fullname)]


def _type(column: Column[object]) -> str:
    return {"BIGINT": "integer", "DOUBLE": "number", "TEXT": "text", "BOOLEAN": "boolean"}[str(column.type.compile())]


if __name__ == "__main__":
    sys.stdout.write(page())
