"""Runs our scripts in Lua 5.1, as Redis does: ``redis.call``, ``redis.pcall``, ``cjson``, KEYS and ARGV.

One runtime serves all servers of a process: a script's names are its own, so nothing stays behind. A script that reads
or sets a global of its own fails, as it does in Redis, and none finds what Redis does not have.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from json.encoder import encode_basestring
from typing import Any, cast

from lupa.lua51 import LuaError, LuaRuntime, lua_type

from tests.inprocess.data import CommandError, Data, Status

_TEXTS, _TABLES = frozenset({str}), frozenset({dict, list, type(None)})
"""Types of which a list is a table as it is; and those that JSON has and Lua has otherwise."""
MOST_UNPACKED = 4000
"""Values that one Lua function returns at most, with room to spare."""
MOST_PACKED = 200
"""The same of arguments."""
PREPARE = """
local call, decode, encode, digest = ...
cjson = { null = newproxy(), decode = decode, encode = encode }
redis = {}
function redis.call(...)
  return call(...)
end
function redis.pcall(...)
  local done, found = pcall(call, ...)
  if done then
    return found
  end
  return { err = tostring(found) }
end
function redis.sha1hex(text)
  return digest(text)
end
KEYS, ARGV = {}, {}
local there = { debug = true } -- lupa's own
for name in string.gmatch([[_G _VERSION assert collectgarbage error getmetatable ipairs load loadstring next pairs pcall
    rawequal rawget rawset select setmetatable tonumber tostring type unpack xpcall cjson math redis string table KEYS
    ARGV]], '%S+') do
  there[name] = true
end
for name in pairs(_G) do
  if not there[name] then
    _G[name] = nil
  end
end
setmetatable(_G, {
  __index = function(_, name)
    error('Script attempted to access nonexistent global variable ' .. "'" .. tostring(name) .. "'", 2)
  end,
  __newindex = function(_, name)
    error('Script attempted to create global variable ' .. "'" .. tostring(name) .. "'", 2)
  end,
})
"""


class Runtime:
    """The interpreter, and the server that a script is running on."""

    def __init__(self) -> None:
        self._lua: Any = cast("Any", LuaRuntime)()  # its stubs lack what is ours in it
        self._data: Data | None = None
        self._programs: dict[str, Callable[[], Any]] = {}
        self._lua.execute(PREPARE, self._call, self._decode, self._encode, _digest)
        self._globals = self._lua.globals()
        self._null = self._globals.cjson.null
        self._table = self._lua.table_from
        self._pack = self._lua.eval("function(...) return {...} end")
        self._unpack = self._globals.unpack

    def run(self, data: Data, sha: str, source: str, keys: Sequence[str], arguments: Sequence[str]) -> Any:
        """The script's reply, as a client reads it. Raises CommandError where Redis would reply an error."""
        program = self._programs.get(sha)
        if program is None:
            program = self._programs[sha] = self._lua.compile(source)
        self._data = data
        self._globals.KEYS, self._globals.ARGV = self._listed(keys), self._listed(arguments)
        try:
            return self._reply(program())
        except LuaError as error:
            raise CommandError(f"ERR {error} script: {sha}, on @user_script") from None
        except CommandError as error:
            raise CommandError(f"{error} script: {sha}, on @user_script") from None

    def _call(self, name: str, *words: Any) -> Any:
        assert self._data is not None
        return self._given(self._data.call(name, *words))

    def _given(self, value: Any) -> Any:
        """A command's reply as Lua sees it."""
        kind = type(value)
        if kind is str or kind is int:
            return value
        if value is None:
            return False
        if kind is list:
            plain = {*map(type, value)} <= _TEXTS
            return self._listed(value if plain else [self._given(item) for item in value])
        return self._table({"ok": str(value)}) if kind is Status else value

    def _listed(self, items: Sequence[Any]) -> Any:
        """The list as a table. A function of Lua makes a short one in half the time."""
        return self._pack(*items) if len(items) < MOST_PACKED else self._table(items)

    def _reply(self, value: Any) -> Any:
        if type(value) is int:
            return value
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, float):
            return int(value)
        if lua_type(value) != "table":
            return value
        length = len(value)
        if length == 0:
            if value["err"] is not None:
                raise CommandError(value["err"])
            return [] if value["ok"] is None else value["ok"]
        items = (
            (value[1],)
            if length == 1
            else self._unpack(value)
            if length < MOST_UNPACKED
            else [value[i + 1] for i in range(length)]
        )
        return [item if type(item) is str else self._reply(item) for item in items]

    def _decode(self, text: str) -> Any:
        try:
            return self._tables(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise CommandError(f"ERR cjson: {error}") from None

    def _tables(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            for name, item in value.items():
                if type(item) in _TABLES:
                    value[name] = self._tables(item)
            return self._table(value)
        if kind is list:
            return self._listed([self._tables(item) for item in value])
        return self._null if value is None else value

    def _encode(self, value: Any) -> str:
        """A number has 14 digits at most, as Redis's cjson writes it."""
        if lua_type(value) != "table":
            return self._scalar(value)
        items = dict(value.items())
        if items and all(isinstance(key, int) for key in items):
            return f"[{','.join(self._encode(items[key]) for key in sorted(items))}]"
        return f"{{{','.join(f'{encode_basestring(str(key))}:{self._encode(item)}' for key, item in items.items())}}}"

    def _scalar(self, value: Any) -> str:
        if isinstance(value, str):
            return encode_basestring(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if value is None or value == self._null:
            return "null"
        if not math.isfinite(value):
            raise CommandError("ERR Cannot serialise number: must not be NaN or Inf")
        return f"{value:.14g}"


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@cache
def runtime() -> Runtime:
    """The process's one."""
    return Runtime()
