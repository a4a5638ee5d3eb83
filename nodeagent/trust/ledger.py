"""What one agent has seen of signed jobs, kept on its disk over restarts: which it knows to live, which to have ended.

Owns the file and its bounds; what follows from an entry is the guard's. An entry is made only for a job whose signature
was good, so nobody fills the file by writing to the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import structlog

from nodeagent.osutil.linux import write_atomic
from nodeagent.trust.seal import LIFETIME

REMEMBERED = 7 * 86_400
"""Seconds for which a job that was last seen alive counts as known: a cluster that was switched off for longer has to
be given its jobs anew."""
ENDED_KEPT = LIFETIME + 86_400
"""Seconds, beyond the last admission's expiry, for which it is remembered that a job has ended."""
MOST = 20_000
"""Most entries; beyond, those seen longest ago go."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One job. Times are Unix time."""

    expires: int
    """Of the newest admission seen."""
    seen: int
    """When it was last written down."""
    ended: bool = False


class Ledger(Protocol):
    """Where the guard keeps its entries."""

    def load(self) -> dict[str, LedgerEntry]:
        """By job uid."""
        ...

    async def save(self, entries: Mapping[str, LedgerEntry]) -> None:
        """Durably, whole. Raises OSError."""
        ...


class FileLedger:
    """The real one: one JSON file in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, LedgerEntry]:
        """What was kept. A damaged file is told, and what it held is unknown from then on."""
        try:
            return {uid: LedgerEntry(**entry) for uid, entry in json.loads(self._path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            structlog.get_logger("trust").error(
                "which jobs have ended here cannot be read: unknown from now on", file=str(self._path), why=str(error)
            )
            return {}

    async def save(self, entries: Mapping[str, LedgerEntry]) -> None:
        """In a thread: the disk may be slow, and the lease cannot wait."""
        text = json.dumps({uid: asdict(entry) for uid, entry in entries.items()})
        await asyncio.to_thread(self._write, text)

    def _write(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, text, durable=True)


def pruned(entries: Mapping[str, LedgerEntry], present: Mapping[str, object], now: float) -> dict[str, LedgerEntry]:
    """Without what no longer matters, of jobs that are not ``present``: those last seen too long ago, and ends that no
    admission can outlive; the newest ``MOST``."""

    def matters(uid: str, entry: LedgerEntry) -> bool:
        if uid in present:
            return True
        return now < (max(entry.expires, entry.seen) + ENDED_KEPT if entry.ended else entry.seen + REMEMBERED)

    kept = [(uid, entry) for uid, entry in entries.items() if matters(uid, entry)]
    return dict(sorted(kept, key=lambda item: item[1].seen)[-MOST:])
