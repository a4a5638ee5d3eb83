"""The repairs of this node, on disk: what was begun is known after a restart of the agent, and after the reboot that it
asked for. Owns one file; a repair is written there before it begins, so that no start of an agent does it twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nodeagent.model.repair import Attempt
from nodeagent.osutil.linux import write_atomic

VERSION = 1
MOST_KEPT = 64
"""Repairs remembered; the oldest go first."""


class RepairLog(Protocol):
    """Where a node's repairs are remembered."""

    def load(self) -> tuple[Attempt, ...]:
        """All of them, oldest first. Raises ValueError when they cannot be understood: then nobody knows how many
        there were."""
        ...

    async def save(self, attempts: Sequence[Attempt]) -> None:
        """Replace them, durably. Raises OSError."""
        ...


class FileRepairLog:
    """In one file of the agent's ``state`` folder."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def load(self) -> tuple[Attempt, ...]:
        try:
            data: dict[str, Any] = json.loads(self.file.read_text())
            if data["version"] != VERSION:
                raise ValueError(f"it is of version {data['version']}, this agent reads {VERSION}")
            return tuple(Attempt.model_validate(one) for one in data["repairs"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = str(error).splitlines()[0]
            raise ValueError(f"{self.file} cannot be read ({what}): see what was repaired, then remove it") from error

    async def save(self, attempts: Sequence[Attempt]) -> None:
        kept = [one.model_dump() for one in attempts[-MOST_KEPT:]]
        text = json.dumps({"version": VERSION, "repairs": kept})
        await asyncio.to_thread(write_atomic, self.file, text, durable=True)
