"""Each script keeps far from what Lua allows one function: 200 local names, and 60 of the functions around it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, cast

import pytest
from lupa.lua51 import LuaRuntime

from nodeagent.store.scripts import load

ROOM = 10
"""Names that the preludes may still add, and of theirs that a step may still use."""
OWN = 150
"""Names of its own that any step may still add."""
STEPS = sorted(
    file.name.removesuffix(".lua")
    for file in (files("nodeagent.store") / "scripts").iterdir()
    if file.name.endswith(".lua") and not file.name.startswith("_")
)


@pytest.mark.parametrize("name", STEPS)
def test_a_script_has_room(name: str) -> None:
    source, own = load(name).source, load(name, bare=True).source
    preludes = source.removesuffix(f"return (function()\n{own}end)()\n")
    assert preludes != source
    shared, owned = [f"more{i}" for i in range(ROOM)], "".join(f"local own{i} = 1\n" for i in range(OWN))
    used = f"{', '.join(shared)} = 1"
    lua = cast("Any", LuaRuntime)()
    lua.compile(f"{preludes}local {', '.join(shared)}\nreturn (function()\n{owned}{used}\n{own}end)()\n")
