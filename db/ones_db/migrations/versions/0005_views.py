"""Views.

Revision 0005. It changes no table: views are made anew at the end of every upgrade (`ones_db.views`), and the
number alone lets older databases come by them.
"""

from __future__ import annotations

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Nothing but the number."""
