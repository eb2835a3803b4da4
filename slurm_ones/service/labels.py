"""Whose a figure is, in so few words that whoever names partitions and accounts cannot fill a Prometheus with them."""

from __future__ import annotations

from slurm_ones.text import plain

OTHER = "other"
"""In place of every name beyond the bounds."""
NONE = "none"
"""In place of an empty name: to Prometheus an empty label is no label."""
LENGTH = 64
"""Characters of a name."""
PARTITIONS, PAIRS = 16, 48
"""Partitions, and pairs of partition and account, that have figures of their own: those that come first."""

Who = tuple[str, str]
"""Partition and account."""


class Labels:
    """The partition and the account of each job, as labels. Names are text: what is not printable is shown as `?`."""

    def __init__(self, partitions: int = PARTITIONS, pairs: int = PAIRS) -> None:
        self._most = partitions, pairs
        self._partitions: set[str] = {OTHER}
        self._pairs: set[Who] = set()
        self._known: dict[Who, Who] = {}

    def who(self, partition: str, account: str) -> Who:
        """The labels of a job of that partition and account: `OTHER` for names that come too late."""
        found = self._known.get((partition, account))
        if found is not None:
            return found
        name, whose = _text(partition), _text(account)
        if name not in self._partitions:
            if len(self._partitions) > self._most[0]:
                name = OTHER
            self._partitions.add(name)
        if (name, whose) not in self._pairs:
            if len(self._pairs) >= self._most[1]:
                return name, OTHER
            self._pairs.add((name, whose))
        if len(self._known) < 4 * self._most[1]:
            self._known[partition, account] = name, whose
        return name, whose


def _text(name: str) -> str:
    return plain(name, LENGTH) or NONE
