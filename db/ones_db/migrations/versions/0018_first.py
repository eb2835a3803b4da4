"""The first schema.

Revision 0018. A new database is made from `ones_db.tables` and marked as the newest schema, so this makes nothing.
"""

from __future__ import annotations

revision = "0018"
down_revision = None


def upgrade() -> None:
    """Do nothing."""
