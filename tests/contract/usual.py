"""The usual case of a step, and the whole step, on the same data: that both do the same."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from nodeagent.model.base import RECORD_VERSION
from nodeagent.store.keys import prefix
from nodeagent.store.nodetable import FIELDS
from tests.inprocess.data import CommandError, Data, Expiring, SortedSet, Stream, Value
from tests.inprocess.lua import runtime
from tests.inprocess.server import CLUSTER, Server

KEY = prefix(CLUSTER)
META = f"{KEY}meta"
CLOCK = {"last", "served"}
PASSED_ON = ["2"]
"""The reply of ``usual_case`` where it leaves a question to the whole step."""


@cache
def part(*names: str) -> str:
    """Read once, as ``load`` does: who merges while a test runs would have it compare two versions."""
    folder = files("nodeagent.store") / "scripts"
    return "\n".join([*((folder / f"{name}.lua").read_text() for name in names), ""])


def usual_case(*names: str) -> str:
    """These parts, and a reply of its own where they pass a question on."""
    return part(*names) + "return { 2 }"


def end_life(data: Data, node: str, field: str) -> None:
    """In both copies of the node's record, as a step does."""
    data.hset(f"{KEY}node:{node}", field, "1")
    copy = data.hget(f"{KEY}nodes", node)
    if copy is not None:
        lines = copy.split("\n")
        lines[FIELDS.index(field)] = "1"
        data.hset(f"{KEY}nodes", node, "\n".join(lines))


def ran(server: Server, source: str, about: dict[str, object], *plain: str) -> list[str]:
    """The reply, or the error, in texts. ``plain``: words beside the arguments."""
    words = (server.run_id, str(RECORD_VERSION), json.dumps(about), *plain)
    try:
        return texts(runtime().run(server.data, str(hash(source)), source, (KEY,), words))
    except CommandError as error:
        return ["error", str(error).partition(" script:")[0]]


def texts(reply: list[object]) -> list[str]:
    return [str(word) for word in reply]


def meta(keys: dict[str, Value]) -> dict[str, str]:
    found = keys.get(META)
    return found if isinstance(found, dict) else {}


def content(keys: dict[str, Value]) -> dict[str, object]:
    """In a form that can be compared, without the clock's own place."""
    kept: dict[str, object] = {}
    for key, value in keys.items():
        if isinstance(value, Expiring):
            kept[key] = value.text, value.until
        else:
            kept[key] = vars(value) if isinstance(value, SortedSet | Stream) else value
    return kept | {META: {name: text for name, text in meta(keys).items() if name not in CLOCK}}
