"""What one agent has seen of signed records, kept on its disk over restarts: which jobs live, and which have ended; the
newest queues and maintenance windows.

This module keeps the file and its bounds; the verifier (``agent/verifier.py``) acts on the entries. An entry is made
only for a job with a good signature, so a user who can write to the store cannot fill the file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog
from pydantic import TypeAdapter

from nodeagent.model.job import Checkpoint
from nodeagent.model.queue import NO_QUEUES, Queues
from nodeagent.model.window import NO_WINDOWS, Windows
from nodeagent.osutil.linux import NotPlainError, keep_damaged, open_plain, write_atomic
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
    rev: int = 0
    """The highest revision of a good control, likewise."""


_ENTRY = TypeAdapter(LedgerEntry)


@dataclass(frozen=True, slots=True)
class Remembered:
    """All that is kept."""

    jobs: dict[str, LedgerEntry] = field(default_factory=dict)
    """By uid."""
    cluster_uid: str = ""
    """Whose queues and windows these are: another cluster's store has its own."""
    queues: Queues = NO_QUEUES
    windows: Windows = NO_WINDOWS


class Ledger(Protocol):
    """The verifier's storage for its entries."""

    def load(self) -> Remembered:
        """What was stored. Raises OSError where it cannot be read: it must not be replaced."""
        ...

    async def save(self, remembered: Remembered) -> None:
        """Replaces all of it, durably. The caller must not change it any more. Raises OSError."""
        ...


class FileLedger:
    """The ledger of a real agent: one JSON file in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Remembered:
        """What was stored. If the file is damaged, the log reports it and nothing is known. Raises OSError."""
        try:
            with open_plain(self._path) as file:
                return _remembered(**json.loads(file.read()))
        except FileNotFoundError:
            return Remembered()
        except (NotPlainError, ValueError, TypeError, AttributeError) as error:
            structlog.get_logger("trust").error(
                "which jobs have ended here cannot be read: unknown from now on", file=str(self._path), why=str(error),
                damaged_copy=keep_damaged(self._path),
            )  # fmt: skip
            return Remembered()

    async def save(self, remembered: Remembered) -> None:
        """In a thread: the disk may be slow, there may be many entries, and the lease cannot wait."""
        await asyncio.to_thread(self._write, remembered)

    def _write(self, remembered: Remembered) -> None:
        # One by one: a thread that makes the JSON of all of them in one call would hold up the others.
        entries = ((uid, _ENTRY.dump_json(entry, exclude_defaults=True)) for uid, entry in remembered.jobs.items())
        jobs = ",\n".join(f"{json.dumps(uid)}: {entry.decode()}" for uid, entry in entries)
        shared = {"queues": remembered.queues.to_json(), "windows": remembered.windows.to_json()}
        parts = {"cluster_uid": json.dumps(remembered.cluster_uid), **shared, "jobs": "{" + jobs + "}"}
        text = "{" + ",\n".join(f'"{name}": {part}' for name, part in parts.items()) + "}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, text, durable=True)


def _remembered(jobs: dict[str, dict[str, Any]], cluster_uid: str, queues: object, windows: object) -> Remembered:
    """Raises ValueError, TypeError and AttributeError."""
    entries = {uid: _ENTRY.validate_python(entry) for uid, entry in jobs.items()}
    return Remembered(entries, cluster_uid, Queues.model_validate(queues), Windows.model_validate(windows))


def pruned(entries: Mapping[str, LedgerEntry], present: Mapping[str, object], now: float) -> dict[str, LedgerEntry]:
    """Drops entries of jobs that are not ``present`` and no longer matter: a job that was last seen too long ago, or an
    end that no admission can outlive. Keeps the newest ``MOST``."""

    def matters(uid: str, entry: LedgerEntry) -> bool:
        if uid in present:
            return True
        return now < (max(entry.expires, entry.seen) + ENDED_KEPT if entry.ended else entry.seen + REMEMBERED)

    kept = [(uid, entry) for uid, entry in entries.items() if matters(uid, entry)]
    return dict(sorted(kept, key=lambda item: item[1].seen)[-MOST:])
