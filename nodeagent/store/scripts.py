"""Loads the Lua steps, each of which is its own file behind the shared preludes, and makes the arguments that several
steps share. Must never build Lua out of values.

Reads a script's raw reply; never calls the server.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nodeagent import __version__
from nodeagent.model.node import Incarnation, NodeFacts
from nodeagent.model.timing import Timing, millis
from nodeagent.store import codec
from nodeagent.store.messages import CheckedStep, GenerationEnd

PRELUDES = ("_clock", "_recovery", "_records", "_highest", "_usage", "_holders", "_generation")
FEWER = {"beat": PRELUDES[:3]}
"""Steps that are called often, with the preludes that they need: the server makes every function of a prelude anew for
each call."""
WHILE_RECOVERING = frozenset({"join", "beat", "renew_lease", "restore", "examine"})
"""Steps that decide nothing about a job; all others wait for the end of a recovery."""
USUAL = {
    "renew_lease": ("_usual_clock", "_usual_renewal"),
    "ack": ("_take_ack", "_usual_clock", "_usual_ack"),
    "beat": ("_highest", "_look", "_usual_clock", "_usual_beat"),
}
"""Scripts before the preludes: the last handles the usual case of a step, and needs no prelude."""
OF_EVERY_BEAT = frozenset(
    {"node", "life", "start", "seq", "rev", "top", "era", "pods", "looks", "runs", "seen", "damaged", "silent", "notes"}
)
"""Arguments of a beat that brings nothing but its pods."""
WHOLE_EACH = 4
"""Of the beats that look for damage, every so many one is the whole step, which reads all of ``meta``."""

_COMMAND = re.compile(r"(?:redis\.p?call|attempt)\('([A-Z]+)'")

BUILD = 8
"""Letters of the hash that distinguishes two builds of one version."""


@dataclass(frozen=True, slots=True)
class Script:
    """One step's source and the name that the server gives it."""

    name: str
    source: str
    sha: str

    def commands(self, line: int) -> tuple[str, ...]:
        """The commands of Redis in that line (from 1): an argument of one may be another's reply."""
        return tuple(dict.fromkeys(_COMMAND.findall("".join(self.source.split("\n")[line - 1 : line]))))


@cache
def version() -> str:
    """The version that agents have to agree on: the version number, and a hash of this build's steps and records, since
    two builds may have the same number."""
    digest = hashlib.sha1(usedforsecurity=False)
    for package, ending in (("nodeagent.store.scripts", ".lua"), ("nodeagent.model", ".py")):
        parent, _, folder = package.rpartition(".")
        for file in sorted((files(parent) / folder).iterdir(), key=lambda file: file.name):
            if file.name.endswith(ending):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:BUILD]}"


@cache
def load(name: str, *, bare: bool = False) -> Script:
    """The step of this name. ``bare``: without the preludes, so it does not advance the served clock."""
    folder = files("nodeagent.store") / "scripts"
    settled = () if name in WHILE_RECOVERING else ("_settled",)
    before = () if bare else (*USUAL.get(name, ()), *FEWER.get(name, PRELUDES), *settled)
    parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in (*before, name)]
    if not bare:  # a function of its own, since Lua allows each one 200 local names
        parts[-1] = f"return (function()\n{parts[-1]}end)()\n"
    source = "\n".join(parts)
    return Script(name=name, source=source, sha=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def who(node: str, incarnation: Incarnation) -> dict[str, object]:
    return {"node": node, "life": incarnation.life, "start": incarnation.start}


def usual_beat_words(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """What ``_usual_beat.lua`` reads of a beat with these arguments before it decodes them; nothing for one that brings
    more than pods, or is to be the whole step."""
    looks = arguments["looks"]
    if arguments["notes"] or arguments["damaged"] or not arguments.keys() <= OF_EVERY_BEAT:
        return ()
    if arguments["top"] > arguments["rev"] or (looks and looks % WHOLE_EACH == 0):
        return ()
    words = tuple(str(arguments[name]) for name in ("rev", "era", "silent", "node"))
    return (*words, "more") if looks or arguments["pods"] else words


def facts_arguments(facts: NodeFacts) -> dict[str, object]:
    return {"facts": codec.encode_facts(facts), "address": facts.address, "pid": facts.agent_pid}


def timing_arguments(timing: Timing) -> dict[str, object]:
    return {
        "timing": timing.to_json(),
        "lease": millis(timing.lease),
        "credit": millis(timing.credit),
        "gap": millis(timing.gap),
        "limit": millis(timing.failsafe_limit),
    }


def expectation(step: CheckedStep) -> dict[str, object]:
    return {
        "uid": step.uid,
        "expect": step.expect.model_dump() if step.expect is not None else None,
        "expect_state": step.expect_state,
        "control_rev": step.control_rev,
        "by": step.by,
    }


def ended_by(step: GenerationEnd) -> dict[str, object]:
    return expectation(step) | {
        "spend": codec.encode_optional(step.spend),
        "lost": sorted(set(step.lost)),
        "planned": step.planned,
        "steps_saved": step.steps_saved,
        "grace": json.dumps(step.grace),
        "setbacks": codec.encode_optional_list(step.setbacks),
    }


ActedOn = Callable[[list[Any]], bool]
"""Returns whether an agent acts on this reply: on the step itself, or on a job's record in the reply. With
``replicas``, such a step counts as done only when that many replicas have it and all that it read. A leave or a removal
need not wait: later steps that build on it wait, and writes keep their order."""


def never(_reply: list[Any]) -> bool:
    """For a leave, a removal, or a read."""
    return False


def always(_reply: list[Any]) -> bool:
    """For a step that others build on, or whose reply is a job's record."""
    return True


def beat_brings_jobs(reply: list[Any]) -> bool:
    """An agent may start or stop workers because of records in a beat's reply. The renewal of the lease itself needs no
    replicas: a new primary replaces it by an amnesty. The reply of the usual case has no records."""
    records = reply[7] if len(reply) > 7 else []
    return any(key.startswith("job:") for key, *_ in records)
