"""What the judge remembers, on disk: an agent's restart, or a node's, must not forget a broken GPU. Owns one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nodeagent.health.judge import Memory, Repair
from nodeagent.health.readings import Event
from nodeagent.model.health import Verdict
from nodeagent.workers.linux import write_atomic

VERSION = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """The judge's memory, and the GPUs that were there once in this boot."""

    memory: Memory = field(default_factory=Memory)
    boot: str = ""
    gpus: Sequence[str] = ()


def save(path: Path, kept: Kept) -> None:
    """Write it whole and durably. Raises OSError."""
    memory = kept.memory
    text = json.dumps(
        {
            "version": VERSION,
            "boot": kept.boot,
            "gpus": list(kept.gpus),
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
    return Kept(memory, data["boot"], tuple(data["gpus"]))
