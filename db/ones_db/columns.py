"""What the tables' columns are made of: types that both databases have, and a word for each kind of column."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Dialect, Double, ForeignKey, Integer, Text
from sqlalchemy.types import TypeDecorator

WHOLE = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits everywhere; SQLite's own integer is that, and only under this name may it be a key that counts
itself."""


def storable(value: str) -> str:
    """Text from users, Slurm and jobs, as it is. Bytes that were no text (lone surrogates), and zeros, which PostgreSQL
    keeps in no text, are shown as escapes, so that one odd job name cannot keep a whole snapshot out of the
    database."""
    value = value.replace("\0", "\\x00")
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


class SafeText(TypeDecorator[str]):
    """Text that any database keeps: see `storable`."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


def column(name: str, kind: Any, comment: str, *also: Any, nullable: bool = False, **options: Any) -> Column[Any]:
    return Column(name, kind, *also, nullable=nullable, comment=comment, **options)


def whole(name: str, comment: str, **options: Any) -> Column[Any]:
    return column(name, WHOLE, comment, **options)


def number(name: str, comment: str, **options: Any) -> Column[Any]:
    return column(name, Double(), comment, **options)


def text(name: str, comment: str, **options: Any) -> Column[Any]:
    return column(name, SafeText(), comment, **options)


def flag(name: str, comment: str) -> Column[Any]:
    return column(name, Boolean(), comment)


def key() -> Column[Any]:
    return column("id", WHOLE, "key of this table alone", primary_key=True)


def of(name: str, target: str, comment: str, **options: Any) -> Column[Any]:
    """A column that names a row of another table."""
    return column(name, WHOLE, comment, ForeignKey(target), autoincrement=False, **options)


def reason(name: str) -> tuple[Column[Any], Column[Any]]:
    """What stands beside the sentence of a reason."""
    return (
        text(f"{name}_code", f"code of {name}, by which causes are counted", server_default=""),
        text(f"{name}_arguments", f"what {name} names, as a JSON object", server_default="{}"),
    )
