"""The settings in force, and how they change while the companion runs."""

from __future__ import annotations

from collections.abc import Callable

from slurm_ones.config import ConfigError, Settings

FIXED = ("cluster", "database", "client", "takeover_s", "metrics_port")
"""Settings that a companion keeps until it ends: its lead, its store and what it has opened hang on them."""


class ReloadableSettings:
    """The settings in force; `reload` replaces them, as a whole or not at all."""

    def __init__(self, read: Callable[[], Settings]) -> None:
        """`read` reads and checks them. Raises its `ConfigError`."""
        self._read = read
        self.settings = read()

    def reload(self) -> list[str]:
        """Read them again; returns the keys that changed, such as `tick_s` or `resize.dwell_s`.

        Raises `ConfigError`, with a line for each key that is refused, and then those before stay in force.
        """
        new = self._read()
        changed = _changed(self.settings, new)
        fixed = [key for key in changed if key in FIXED]
        if fixed:
            raise ConfigError(
                "\n".join(f"{key}: cannot change while the companion runs; restart it for that" for key in fixed)
            )
        self.settings = new
        return changed


def _changed(old: Settings, new: Settings) -> list[str]:
    before, after = old.model_dump(), new.model_dump()
    changed = []
    for key, value in after.items():
        if value == before[key]:
            continue
        if key in Settings.model_fields and hasattr(Settings.model_fields[key].annotation, "model_fields"):
            changed += [f"{key}.{name}" for name, inner in value.items() if inner != before[key][name]]
        else:
            changed.append(key)
    return changed
