"""What the judge remembers, on disk: an agent's restart, or a node's, must not forget a broken GPU. Owns one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nodeagent.health.judge import Memory, Repair
from nodeagent.health.readings import Event
from nodeagent.model.health import Verdict
from nodeagent.osutil.linux import write_atomic

VERSION = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """The judge's memory, and what was seen of the machine once: a boot that finds less is not taken for a machine that
    has less."""

    memory: Memory = field(default_factory=Memory)
    boot: str = ""
    gpus: Sequence[str] = ()
    """UUIDs, of every boot."""
    buses: Mapping[str, str] = field(default_factory=dict)
    """UUID to bus id."""
    links: Mapping[str, int] = field(default_factory=dict)
    """UUID to the most NVLinks that were up at a time in this boot."""
    ports: Sequence[str] = ()
    """Network ports that were up, of every boot."""


def save(path: Path, kept: Kept) -> None:
    """Write it whole and durably. Raises OSError."""
    memory = kept.memory
    text = json.dumps(
        {
            "version": VERSION,
            "boot": kept.boot,
            "gpus": list(kept.gpus),
            "buses": dict(kept.buses),
            "links": dict(kept.links),
            "ports": list(kept.ports),
            "at": memory.at,
            "verdicts": [verdict.model_dump() for verdict in memory.verdicts],
            "past": [asdict(event) for event in memory.past],
            "repairs": [asdict(repair) for repair in memory.repairs],
        }
    )
    write_atomic(path, text, durable=True)


def load(path: Path) -> Kept:
    """What was kept; nothing if there is no file. Raises ValueError for one that cannot be understood."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return Kept()
    if data["version"] != VERSION:
        raise ValueError(f"{path} is of version {data['version']}, this agent reads {VERSION}")
    memory = Memory(
        verdicts=tuple(Verdict.model_validate(verdict) for verdict in data["verdicts"]),
        past=tuple(Event(**event) for event in data["past"]),
        repairs=tuple(Repair(**repair) for repair in data["repairs"]),
        at=data["at"],
    )
    seen = {"buses": dict(data.get("buses", {})), "links": dict(data.get("links", {}))}  # versions before 0.2 lack them
    return Kept(memory, data["boot"], tuple(data["gpus"]), ports=tuple(data.get("ports", ())), **seen)
