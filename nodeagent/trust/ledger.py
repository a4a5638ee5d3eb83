"""What one agent has seen of signed jobs, kept on its disk over restarts: which jobs live, and which have ended.

This module keeps the file and its bounds; the verifier (``agent/verifier.py``) acts on the entries. An entry is made
only for a job with a good signature, so a user who can write to the store cannot fill the file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from nodeagent.model.job import Checkpoint
from nodeagent.osutil.linux import keep_damaged, write_atomic
from nodeagent.trust.seal import LIFETIME

REMEMBERED = 7 * 86_400
"""Seconds for which a job that was last seen alive counts as known. After a longer outage of the cluster, its jobs must
be submitted again."""
ENDED_KEPT = LIFETIME + 86_400
"""Seconds, beyond the last admission's expiry, for which the end of a job is remembered."""
MOST = 20_000
"""The most entries; the entries that were seen longest ago are dropped first."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The entry of one job. Times are Unix time."""

    expires: int
    """Expiry of the newest admission seen."""
    seen: int
    """When the entry was last written to disk."""
    ended: bool = False
    pointer: Checkpoint | None = None
    """The newest checkpoint that was committed, as far as this agent has seen."""


class Ledger(Protocol):
    """The verifier's storage for its entries."""

    def load(self) -> dict[str, LedgerEntry]:
        """The stored entries, by job uid. Raises OSError where they cannot be read: they must not be replaced."""
        ...

    async def save(self, entries: Mapping[str, LedgerEntry]) -> None:
        """Replaces all entries, durably. The caller must not change the mapping any more. Raises OSError."""
        ...


class FileLedger:
    """The ledger of a real agent: one JSON file in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, LedgerEntry]:
        """The stored entries. If the file is damaged, the log reports it and no entry is known. Raises OSError."""
        try:
            return {uid: _entry(**entry) for uid, entry in json.loads(self._path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            structlog.get_logger("trust").error(
                "which jobs have ended here cannot be read: unknown from now on", file=str(self._path), why=str(error),
                kept=keep_damaged(self._path),
            )  # fmt: skip
            return {}

    async def save(self, entries: Mapping[str, LedgerEntry]) -> None:
        """In a thread: the disk may be slow, there may be many entries, and the lease cannot wait."""
        await asyncio.to_thread(self._write, entries)

    def _write(self, entries: Mapping[str, LedgerEntry]) -> None:
        # One by one: a thread that makes the JSON of all of them in one call would hold up the others.
        lines = (f"{json.dumps(uid)}: {_line(entry)}" for uid, entry in entries.items())
        text = "{" + ",\n".join(lines) + "}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, text, durable=True)


def _line(entry: LedgerEntry) -> str:
    fields: dict[str, object] = {"expires": entry.expires, "seen": entry.seen, "ended": entry.ended}
    if entry.pointer is not None:
        fields["pointer"] = entry.pointer.model_dump()
    return json.dumps(fields)


def _entry(expires: int, seen: int, ended: bool = False, pointer: object = None) -> LedgerEntry:
    """Raises ValueError."""
    return LedgerEntry(expires, seen, ended, None if pointer is None else Checkpoint.model_validate(pointer))


def pruned(entries: Mapping[str, LedgerEntry], present: Mapping[str, object], now: float) -> dict[str, LedgerEntry]:
    """Drops entries of jobs that are not ``present`` and no longer matter: a job that was last seen too long ago, or an
    end that no admission can outlive. Keeps the newest ``MOST``."""

    def matters(uid: str, entry: LedgerEntry) -> bool:
        if uid in present:
            return True
        return now < (max(entry.expires, entry.seen) + ENDED_KEPT if entry.ended else entry.seen + REMEMBERED)

    kept = [(uid, entry) for uid, entry in entries.items() if matters(uid, entry)]
    return dict(sorted(kept, key=lambda item: item[1].seen)[-MOST:])
