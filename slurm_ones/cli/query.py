"""Command `slurm-ones db query`: prints the rows of a view or of an SQL query."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from ones_db.query import TIMEOUT_S, Answer, QueryError, Reader, parameters_of, saved_queries, saved_query, view_query
from ones_db.views import VIEWS
from ones_wrapper.protocol.choices import listed
from slurm_ones.cli.common import (
    ConfigOption,
    DatabaseOption,
    command,
    console,
    errors,
    grid,
    is_terminal,
    moment,
    settings_of,
)
from slurm_ones.text import plain, safe

TABLE_ROWS = 1_000
"""Most rows of a table without `--limit`. All are read before the first is printed, since they decide column widths."""


class Format(str, Enum):
    """Form in which rows are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


@command
def query(
    name: Annotated[
        str,
        typer.Argument(
            help="View or saved query (default, without SQL: list all of them).",
            autocompletion=lambda: [*VIEWS, *saved_queries()],
        ),
    ] = "",
    sql: Annotated[str, typer.Option("--sql", help="One SELECT statement.")] = "",
    file: Annotated[Path | None, typer.Option("--file", help="File with one SELECT statement.")] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="K=V. For a view: rows whose column K is V. For SQL: the value of :K.")
    ] = None,
    columns: Annotated[str, typer.Option(help="For a view: only these columns, separated by commas.")] = "",
    format: Annotated[Format, typer.Option(help="Output format; csv and json go row by row.")] = Format.TABLE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write in place of stdout.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help=f"Most rows (for a table: {TABLE_ROWS}).")] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Longest wait in seconds.")] = TIMEOUT_S,
    config: ConfigOption = None,
    database: DatabaseOption = "",
) -> None:
    """Query the job database. A query cannot change anything."""
    if sum((bool(name), bool(sql), file is not None)) > 1:
        raise QueryError("give only one of a name, --sql and --file")
    view, saved = VIEWS.get(name), saved_queries()
    if name and view is None and name not in saved:
        raise QueryError(f"no view or saved query is called {name!r}; there are {listed((*VIEWS, *saved), name)}")
    if columns and view is None:
        raise QueryError("--columns is only for views; in SQL, name the columns in the statement")
    if view is not None:
        values = _parameters(param or (), {column.name: column.kind for column in view.columns})
        question = view_query(name, list(values), [column.strip() for column in columns.split(",") if column.strip()])
    elif name or sql or file is not None:
        question = saved_query(name) if name else sql or _read(file)
        values = _parameters(param or (), parameters_of(question))
    else:
        _list(saved)
        return
    url = settings_of(config, database).database_url
    with Reader(url, timeout_s=timeout) as reader, reader.ask(question, values) as answer:
        _write(answer, format, output, limit, name if view is not None else "")


def _parameters(given: Sequence[str], kinds: Mapping[str, str]) -> dict[str, int | float | str]:
    values = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise QueryError(f"--param {plain(item, 60)}: write NAME=VALUE")
        values[name] = _value(name, value, kinds[name]) if name in kinds else _guessed(value)
    return values


def _value(name: str, text: str, kind: str) -> int | float | str:
    """Convert the text of a parameter of this kind (in `KINDS`). Raises `QueryError` or `BadInput` for a bad text."""
    if kind in _PLAIN:
        read, meant = _PLAIN[kind]
        found = read(text)
        if found is None:
            raise QueryError(f"--param {name}={plain(text, 40)}: {name} is {meant}")
        return found
    if kind == "time":
        return moment(text, f"--param {name}")
    if kind == "day":
        # A date is that day in UTC; as a moment it would be a midnight of local time.
        day = f"{text}T00:00Z" if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else text
        at = time.gmtime(moment(day, f"--param {name}"))
        return time.strftime("%Y-%m-%d", at)
    return text


def _number(text: str, kind: type[int] | type[float]) -> int | float | None:
    try:
        number = kind(text)
    except ValueError:
        return None
    # No database has a whole number beyond 64 bits.
    return number if -(2**63) <= number < 2**63 or (kind is float and math.isfinite(number)) else None


_PLAIN: Mapping[str, tuple[Callable[[str], int | float | None], str]] = {
    "int": (lambda text: _number(text, int), "a whole number, such as 7"),
    "float": (lambda text: _number(text, float), "a number, such as 0.5"),
    "bool": (lambda text: {"0": 0, "1": 1, "false": 0, "true": 1}.get(text.lower()), "0 or 1"),
}
"""Parser and description of each kind of parameter except times. The parser returns None for a bad text."""


def _guessed(text: str) -> int | float | str:
    found = _number(text, int)
    found = _number(text, float) if found is None else found
    return text if found is None else found


def _read(file: Path | None) -> str:
    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise QueryError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise QueryError(f"{file}: holds no UTF-8 text") from None


def _list(saved: Mapping[str, str]) -> None:
    for kind, found in (("view", {view.name: view.title for view in VIEWS.values()}), ("saved query", saved)):
        shown = grid()
        shown.add_column(kind, no_wrap=True)
        shown.add_column("what it tells")
        for row in found.items():
            shown.add_row(*row)
        console.print(shown)
        console.print()
    console.print("slurm-ones db query NAME --param job_id=7, or --sql 'SELECT …'")


def _write(answer: Answer, format: Format, output: Path | None, limit: int | None, name: str) -> None:
    rows = answer.rows if limit is None else islice(answer.rows, limit)
    if format is Format.TABLE:
        if output is not None:
            raise QueryError("--output is for csv, json and parquet")
        shown = list(islice(rows, TABLE_ROWS if limit is None else limit))
        _print_table(answer.columns, shown, name)
        if limit is None and next(rows, None) is not None:
            errors.print(f"the first {TABLE_ROWS} rows; give --limit, or --format csv for all", highlight=False)
    elif format is Format.PARQUET:
        _write_parquet(answer.columns, rows, output)
    else:
        if output is None and is_terminal(sys.stdout):
            # A file or a program gets what is stored; a terminal would obey it.
            rows = (tuple(plain(v, len(v)) if isinstance(v, str) else v for v in row) for row in rows)
        with _target(output) as target:
            (_write_csv if format is Format.CSV else _write_json)(answer.columns, rows, target)


@contextmanager
def _target(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    try:
        with output.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise QueryError(f"{output}: cannot be written: {error.strerror}") from None


def _write_csv(columns: Sequence[str], rows: Iterator[tuple[Any, ...]], target: IO[str]) -> None:
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


def _write_json(columns: Sequence[str], rows: Iterator[tuple[Any, ...]], target: IO[str]) -> None:
    """Write rows as a list of JSON objects, one per line. Infinite numbers and NaN become null."""
    separator = "[\n"
    for row in rows:
        values = [None if isinstance(value, float) and not math.isfinite(value) else value for value in row]
        record = dict(zip(columns, values, strict=True))
        target.write(separator + json.dumps(record, default=_plain_value, ensure_ascii=False))
        separator = ",\n"
    target.write("[]\n" if separator == "[\n" else "\n]\n")


def _plain_value(value: Any) -> Any:
    """Convert a value that JSON does not have (an exact decimal, a time, bytes) to a number or a text."""
    if isinstance(value, bytes):
        return value.hex()
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _write_parquet(columns: Sequence[str], rows: Iterator[tuple[Any, ...]], output: Path | None) -> None:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise QueryError("parquet needs pyarrow: pip install 'ones-db[notebook]', or take --format csv") from None
    if output is None:
        raise QueryError("parquet is no text: name a file with --output")
    if len(set(columns)) < len(columns):
        raise QueryError("two columns have one name; give them names of their own with AS")
    by_column = list(zip(*rows, strict=True)) or [()] * len(columns)
    try:
        arrays = [arrow.array(values) for values in by_column]
        parquet.write_table(arrow.Table.from_arrays(arrays, names=list(columns)), output)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
        raise QueryError(f"a column holds values of several kinds, which parquet cannot: {error}") from None
    except OSError as error:
        raise QueryError(f"{output}: cannot be written: {error.strerror}") from None


def _print_table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]], name: str) -> None:
    """Print rows as a table. If it is wider than the terminal, list the columns and values of each row instead."""
    said = {column.of for column in VIEWS[name].columns} if name else set()
    # Where a time is shown as text, its seconds are for programs.
    kept = [i for i, column in enumerate(columns) if column not in said]
    cells = [[_cell(row[i]) for i in kept] for row in rows]
    heads = [plain(columns[i], 60) for i in kept]
    widths = [max(len(head), *(len(line[i]) for line in cells), 0) for i, head in enumerate(heads)]
    if sum(widths) + 2 * len(widths) <= console.width or not cells:
        shown = grid()
        for i, head in zip(kept, heads, strict=True):
            number = bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows)
            shown.add_column(safe(head), justify="right" if number else "left", no_wrap=True)
        for line in cells:
            shown.add_row(*(safe(cell) for cell in line))
        console.print(shown)
        return
    most = max(map(len, heads))
    for count, line in enumerate(cells, 1):
        console.print(f"row {count}", style="bold")
        for head, cell in zip(heads, line, strict=True):
            console.print(f"  {head:<{most}}  {cell}", markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        if abs(value) >= 1e3:
            return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
        return f"{value:.4g}"
    return plain(str(value))
