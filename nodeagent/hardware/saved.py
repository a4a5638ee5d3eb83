"""The health monitor's file: what is in it, and how it is written and read.

What it holds must come back as it was, or be refused: nothing in it is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from nodeagent.hardware.expected import Seen
from nodeagent.hardware.judging.judge import JudgeMemory, Repair
from nodeagent.hardware.readings import DeviceEvent
from nodeagent.model.base import first_error
from nodeagent.model.health import Verdict
from nodeagent.model.node import Gpu
from nodeagent.osutil.linux import open_plain, write_atomic

VERSION = 1
FILE = "health.json"
"""In the ``state`` folder."""


@dataclass(frozen=True, slots=True)
class SavedHealth:
    """The judge's memory, and what was seen of the machine once."""

    memory: JudgeMemory = field(default_factory=JudgeMemory)
    boot: str = ""
    seen: Seen = field(default_factory=Seen)
    devices: Mapping[str, Sequence[Gpu]] = field(default_factory=dict)
    """By plug-in, of every boot."""
    record: int | None = None
    """Number of the newest record of this boot's kernel log that was reported."""

    @property
    def essence(self) -> object:
        """What is worth a write: not each repetition, and not the time alone."""
        verdicts = tuple((v.rule, v.device, v.stage, v.action, v.until, v.boot) for v in self.memory.verdicts)
        past = tuple((e.kind, e.device, e.code, len(str(e.count))) for e in self.memory.past)
        return verdicts, past, self.memory.repairs, self.boot, self.seen, dict(self.devices), self.record is None


def save_memory(path: Path, saved: SavedHealth) -> None:
    """Write it whole and durably. Raises OSError."""
    memory = saved.memory
    stored = _Stored(
        **asdict(saved.seen), version=VERSION, boot=saved.boot, record=saved.record,
        devices={name: tuple(gpus) for name, gpus in saved.devices.items()},
        at=memory.at, verdicts=memory.verdicts, past=memory.past, repairs=memory.repairs,
    )  # fmt: skip
    write_atomic(path, stored.model_dump_json(), durable=True)


def load_memory(path: Path) -> SavedHealth:
    """What was saved; nothing if there is no file. Raises OSError for one that cannot be read, ValueError with the key
    for one that cannot be understood."""
    try:
        with open_plain(path) as file:
            text = file.read().decode()
    except FileNotFoundError:
        return SavedHealth()
    try:
        if (version := _Version.model_validate_json(text).version) != VERSION:
            raise ValueError(f"it is of version {version}, this agent reads {VERSION}")
        stored = _Stored.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(first_error(error)) from None
    memory = JudgeMemory(stored.verdicts, stored.past, stored.repairs, stored.at)
    seen = Seen(stored.gpus, stored.buses, stored.links, stored.ports, stored.renounced)
    return SavedHealth(memory, stored.boot, seen, stored.devices, stored.record)


class _Version(BaseModel):
    version: int


class _Stored(_Version):
    """What ``save_memory`` writes."""

    boot: str
    gpus: tuple[str, ...]
    buses: dict[str, str] = {}
    links: dict[str, int] = {}
    ports: tuple[str, ...] = ()
    devices: dict[str, tuple[Gpu, ...]] = {}
    record: int | None = None
    renounced: tuple[str, ...] = ()
    at: float
    verdicts: tuple[Verdict, ...]
    past: tuple[DeviceEvent, ...]
    repairs: tuple[Repair, ...]
