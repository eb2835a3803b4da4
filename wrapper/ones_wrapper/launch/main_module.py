"""Code that a rank runs as its main module: of a script, or of a module as with `python -m`."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

MODULE = "-m"
"""Word in place of the script's path if a module is run. The first argument is then the module's name."""


def first_on_path(script: str) -> str:
    """Return the folder in which imports look first: the script's, or the working directory for a module."""
    return str(Path.cwd()) if script == MODULE else str(Path(script).resolve().parent)


def script_code(script: str) -> CodeType:
    """Return the code of a script. Raises OSError, SyntaxError."""
    with io.open_code(str(Path(script).resolve())) as file:
        return compile(file.read(), script, "exec", dont_inherit=True)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package needs a module that is missing
        return None


def module_code(arguments: Sequence[str], main: ModuleType) -> CodeType:
    """Return the code of the module named by the first of `arguments`, or of a package's `__main__`. Sets `main` and
    `sys.argv` as `python -m` does. Raises ImportError."""
    name, *rest = arguments
    sys.argv = [MODULE, *rest]  # while parent packages are imported, as in Python
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec(name)
    loader: Any = getattr(spec, "loader", None)
    code: CodeType | None = loader.get_code(name) if hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ImportError(f"ones-run -m {name}: there is no such module of Python code (looked from {Path.cwd()})")
    sys.argv[0] = str(spec.origin)
    vars(main).update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=loader, __package__=spec.parent, __spec__=spec
    )
    return code
