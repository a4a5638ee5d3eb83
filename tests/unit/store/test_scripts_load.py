"""Each script keeps far from what Lua allows one function: 200 local names, and 60 of the functions around it. None
reads a field of `meta` that is not read for it."""

from __future__ import annotations

import re
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


def test_each_field_of_meta_that_a_step_reads_is_among_those_that_are_read() -> None:
    """``_clock.lua`` reads them by name: another one would be absent for every step, whatever the store has."""
    folder = files("nodeagent.store") / "scripts"
    texts = [file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".lua")]
    (listed,) = re.findall(r"local fields = (\{ 'run'.*?\})", (folder / "_clock.lua").read_text(), re.DOTALL)
    used = {field for text in texts for field in re.findall(r"\bmeta\.(\w+)", re.sub(r"--.*", "", text))}
    assert len(used) > 20
    assert used <= set(re.findall(r"'(\w+)'", listed))


def test_an_error_of_a_line_may_be_of_each_command_in_it() -> None:
    script = load("beat")
    text = "redis.call('HSET', META, 'unannounced', redis.call('HGET', META, 'rev'))"
    line = script.source[: script.source.index(text)].count("\n") + 1
    assert script.commands(line) == ("HSET", "HGET")
    assert script.commands(1) == script.commands(10**6) == ()
