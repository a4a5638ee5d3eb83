"""Loads the Lua steps: each is its own file behind the shared preludes. Must never build Lua out of values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PRELUDES = ("_clock", "_waiting", "_records", "_holders", "_generation")
FEWER = {"beat": PRELUDES[:3]}
"""A step that is taken often, and the preludes that it needs: of each, the server makes every function anew."""
WHILE_RECOVERING = frozenset({"join", "beat", "renew_lease", "restore", "examine"})
"""Steps that decide nothing of a job; all others wait for the end of a recovery."""
USUAL = {"renew_lease": "_usual_renewal"}
"""What comes even before the preludes: the usual case of a step, which needs none of them."""


@dataclass(frozen=True, slots=True)
class Script:
    """One step's source and the name that the server gives it."""

    name: str
    source: str
    sha: str


@cache
def load(name: str, *, bare: bool = False) -> Script:
    """The step of this name. ``bare``: without the preludes, so without advancing the served clock."""
    folder = files("nodeagent.store") / "scripts"
    usual = (USUAL[name],) if name in USUAL else ()
    settled = () if name in WHILE_RECOVERING else ("_settled",)
    parts = (name,) if bare else (*usual, *FEWER.get(name, PRELUDES), *settled, name)
    source = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
    return Script(name=name, source=source, sha=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
