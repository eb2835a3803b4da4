"""Show the host's Python inside a box, at the same paths, so that jobs run what the tests run.

A Python built on an older Debian runs on a newer one: the C library only ever gains symbols. What
it needs beside the C library is in `sites.PYTHON_LIBRARIES`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from . import paths
from .spec import Bind


def base_binds() -> list[Bind]:
    """The interpreter itself with its standard library, without any environment."""
    base = Path(sys.base_prefix)
    executable = Path(os.path.realpath(sys.executable))
    if base == Path("/usr"):
        # The distribution's own Python: /usr as a whole would hide the root's.
        wanted = [*_names(Path(sys.executable)), *map(Path, _library_folders())]
    else:
        # An environment may name the base by a link (uv does), so show both names.
        wanted = [base, base.resolve()]
        if not executable.is_relative_to(base.resolve()):
            wanted.append(executable.parent.parent)
    return _binds(wanted)


def _names(executable: Path) -> list[Path]:
    """Every name under /usr by which an environment reaches its interpreter (python3 → python3.11)."""
    names = [executable]
    while names[-1].is_symlink():
        names.append(names[-1].parent / names[-1].readlink())
    return [name for name in names if name.is_relative_to("/usr")]


def _library_folders() -> list[str]:
    names = ("stdlib", "platstdlib", "include", "platinclude")
    found = {sysconfig.get_path(name, vars={"base": "/usr"}) for name in names}
    # Debian keeps the headers that differ by machine apart.
    headers, machine = sysconfig.get_path("include"), sysconfig.get_config_var("MULTIARCH")
    if machine:
        found.add(headers.replace("/usr/include/", f"/usr/include/{machine}/"))
    return sorted(found)


def environment_binds() -> list[Bind]:
    """The environment that runs now, and the repository it may be an editable install of."""
    return base_binds() + _binds([Path(sys.prefix), paths.REPOSITORY])


def _binds(wanted: list[Path]) -> list[Bind]:
    found = {path for path in wanted if path.exists() and path != Path("/usr")}
    return [Bind(str(path), str(path)) for path in sorted(found)]
