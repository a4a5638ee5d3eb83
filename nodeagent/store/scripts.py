"""Loads the Lua steps (each is its own file behind the shared preludes), and the arguments that several of them
share. Must never build Lua out of values.

Looks at a script's raw reply; never at the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nodeagent import __version__
from nodeagent.model.node import Incarnation, NodeFacts
from nodeagent.model.timing import Timing, millis
from nodeagent.store import codec
from nodeagent.store.messages import Ending, Judgement, Proposal, Settlement

PRELUDES = ("_clock", "_waiting", "_records", "_usage", "_holders", "_generation")
FEWER = {"beat": PRELUDES[:3]}
"""A step that is taken often, and the preludes that it needs: of each, the server makes every function anew."""
WHILE_RECOVERING = frozenset({"join", "beat", "renew_lease", "restore", "examine"})
"""Steps that decide nothing of a job; all others wait for the end of a recovery."""
USUAL = {"renew_lease": "_usual_renewal"}
"""What comes even before the preludes: the usual case of a step, which needs none of them."""


BUILD = 8
"""Letters of what tells two builds of one version apart."""


@dataclass(frozen=True, slots=True)
class Script:
    """One step's source and the name that the server gives it."""

    name: str
    source: str
    sha: str


@cache
def version() -> str:
    """Of what agents have to agree on: the version, and a hash of the steps and records as this build has them. Builds
    of one version number are not always the same."""
    digest = hashlib.sha1(usedforsecurity=False)
    for package, ending in (("nodeagent.store.scripts", ".lua"), ("nodeagent.model", ".py")):
        parent, _, folder = package.rpartition(".")
        for file in sorted((files(parent) / folder).iterdir(), key=lambda file: file.name):
            if file.name.endswith(ending):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:BUILD]}"


@cache
def load(name: str, *, bare: bool = False) -> Script:
    """The step of this name. ``bare``: without the preludes, so without advancing the served clock."""
    folder = files("nodeagent.store") / "scripts"
    usual = (USUAL[name],) if name in USUAL else ()
    settled = () if name in WHILE_RECOVERING else ("_settled",)
    parts = (name,) if bare else (*usual, *FEWER.get(name, PRELUDES), *settled, name)
    source = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
    return Script(name=name, source=source, sha=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def who(node: str, incarnation: Incarnation) -> dict[str, object]:
    return {"node": node, "life": incarnation.life, "start": incarnation.start}


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


def expectation(step: Proposal | Ending | Settlement | Judgement) -> dict[str, object]:
    return {
        "uid": step.uid,
        "expect": step.expect.model_dump() if step.expect is not None else None,
        "expect_state": step.expect_state,
        "control_rev": step.control_rev,
        "by": step.by,
    }


def ended_by(step: Proposal | Ending) -> dict[str, object]:
    return expectation(step) | {
        "spend": codec.encode_optional(step.spend),
        "lost": sorted(set(step.lost)),
        "planned": step.planned,
    }


ActedOn = Callable[[list[Any]], bool]
"""Whether somebody acts on a step for this reply: on the step itself, or on a job's record in the reply. With
``replicas`` it counts as lost until that many replicas have the step, and what it read. Goodbyes and removals need no
wait of their own: whatever is built on them waits, and writes keep their order."""


def never(_reply: list[Any]) -> bool:
    """A goodbye, a removal, what is only read."""
    return False


def always(_reply: list[Any]) -> bool:
    """A step that others build on, or whose reply is a job's record."""
    return True


def beat_brings_jobs(reply: list[Any]) -> bool:
    """An agent may start or stop workers because of what a beat tells; that its lease was renewed, a new primary makes
    good with an amnesty."""
    _uid, _served, _lapsed, _next_lapse, _rev, _more, _event, records, *_ = reply
    return any(key.startswith("job:") for key, *_ in records)
