"""A Lua such as Slurm's plugins run, as a library: the one that the built roots have, or this machine's own."""

from __future__ import annotations

import ctypes
from ctypes.util import find_library

from tests.cluster import SITES, root, unavailable
from tests.cluster.report import Silent

LIBRARY = "usr/lib/x86_64-linux-gnu/liblua5.1.so.0"


class NoLua(Exception):
    """There is none here."""


class LuaError(Exception):
    """What Lua says."""


def is_here() -> bool:
    """Tell whether there is one without that a root is built, for which a Debian is downloaded."""
    return find_library("lua5.1") is not None or root.is_built(SITES["old"])


def _library() -> str:
    found = find_library("lua5.1")
    if found is not None:
        return found
    why = unavailable()
    if why is not None:
        raise NoLua(f"no Lua 5.1, and no root to take it from: {why}")
    return str(root.build(SITES["old"], Silent()) / LIBRARY)


class Lua:
    def __init__(self) -> None:
        self._lua = ctypes.CDLL(_library())
        for name, returns, takes in (
            ("luaL_newstate", ctypes.c_void_p, []),
            ("luaL_openlibs", None, [ctypes.c_void_p]),
            ("luaL_loadstring", ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
            ("lua_pcall", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
            ("lua_tolstring", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]),
            ("lua_settop", None, [ctypes.c_void_p, ctypes.c_int]),
        ):
            function = getattr(self._lua, name)
            function.restype, function.argtypes = returns, takes
        self._state = self._lua.luaL_newstate()
        self._lua.luaL_openlibs(self._state)

    def run(self, chunk: str) -> str | None:
        """The text or number that the chunk returns, None for nil; raises `LuaError`."""
        bad = self._lua.luaL_loadstring(self._state, chunk.encode()) or self._lua.lua_pcall(self._state, 0, 1, 0)
        said = self._lua.lua_tolstring(self._state, -1, None)
        self._lua.lua_settop(self._state, 0)
        text = None if said is None else said.decode("utf-8", "replace")
        if bad:
            raise LuaError(text)
        return text


def literal(text: str | None) -> str:
    """The text as Lua writes it, whatever its bytes."""
    return "nil" if text is None else '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'
