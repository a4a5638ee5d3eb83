"""Loads the Lua steps: each is its own file behind the shared preludes. Must never build Lua out of values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from nodeagent import __version__

PRELUDES = ("_clock", "_waiting", "_records", "_holders", "_generation")
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
