"""What all tables share: types that both databases have, and names of keys that migrations can rely on."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    Dialect,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

SCHEMA_REVISION = "0009"
"""The newest migration. Revisions are numbers of four digits, so that older and newer can be told from the
name."""

Whole = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits everywhere; SQLite's own integer is that, and only under this name may it be a key that counts
itself."""


class Words(TypeDecorator[str]):
    """Text from users, Slurm and jobs, as it is. Bytes that were no text (lone surrogates), and zeros, which PostgreSQL
    keeps in no text, are shown as escapes, so that one odd job name cannot keep a whole snapshot out of the
    database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


def storable(value: str) -> str:
    """Text as `Words` stores it."""
    value = value.replace("\0", "\\x00")
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {int: Whole, float: Double(), str: Words()}


def key(comment: str = "key of this table alone") -> Mapped[int]:
    return mapped_column(primary_key=True, comment=comment)


def of(target: str, comment: str, *, primary_key: bool = False, index: bool = False) -> Mapped[Any]:
    return mapped_column(ForeignKey(target), primary_key=primary_key, autoincrement=False, index=index, comment=comment)


def is_(comment: str) -> Mapped[Any]:
    return mapped_column(comment=comment)


def code_of(column: str) -> Mapped[Any]:
    return mapped_column(server_default="", comment=f"code of {column}, by which causes are counted")


def arguments_of(column: str) -> Mapped[Any]:
    return mapped_column(server_default="{}", comment=f"what {column} names, as a JSON object")
