"""Two small files between an agent and the lease process, in ``<run>/lease``: what the one knows of the node's jobs,
and what the other has promised by that.

``table.json`` is the agent's, ``promises.json`` the lease process's; each is replaced as a whole. Each side writes its
own before it reads the other's (``failsafe.py``). They need not outlive a power cut: then nothing of the node's runs
any more, and the time for which it may have promised something counts from when ``promises.json`` is begun anew.
Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nodeagent.lease.lending import KeeperAddress, LoanRow, Promises, Table
from nodeagent.osutil.linux import ReplacedFile, write_atomic

MOST_BYTES = 4 << 20
"""Of one of these files."""
MOST_MEMBERS = 20_000
"""Members of all jobs in a table: with more, jobs are left out, and get no failsafe time."""


def table_file(folder: Path) -> Path:
    return folder / "table.json"


def promises_file(folder: Path) -> Path:
    return folder / "promises.json"


def write_table(folder: Path, table: Table) -> None:
    """Raises OSError."""
    jobs = {
        uid: row._asdict() | {"places": {node: place._asdict() for node, place in row.places.items()}}
        for uid, row in table.jobs.items()
    }
    write_atomic(table_file(folder), json.dumps(table._asdict() | {"jobs": jobs}), durable=False)


def table_reader(folder: Path, boot: str) -> ReplacedFile[Table | None]:
    """The lease process's side. None if there is none, or it is from before the last boot. Its ``check`` raises
    OSError, ValueError, KeyError, TypeError and AttributeError: then no agent of this version wrote it."""

    def parse(text: bytes) -> Table | None:
        data = json.loads(text)
        if data["boot"] != boot:
            return None
        jobs = {uid: _row(**row) for uid, row in data.pop("jobs").items()}
        return Table(**data, jobs=jobs)

    return ReplacedFile(table_file(folder), parse, None, MOST_BYTES)


def write_promises(folder: Path, promises: Promises) -> None:
    """Raises OSError."""
    write_atomic(promises_file(folder), json.dumps(promises._asdict()), durable=False)


def promises_reader(folder: Path, boot: str) -> ReplacedFile[Promises | None]:
    """The agent's side, and the next lease process's. None if none were written down since the boot, or none that can
    be read: then there may be any."""

    def parse(text: bytes) -> Promises | None:
        found = Promises(**json.loads(text))
        until = {uid: float(end) for uid, end in found.until.items()}
        return found._replace(began=float(found.began), until=until) if found.boot == boot else None

    return ReplacedFile(promises_file(folder), parse, None, MOST_BYTES)


def _row(token: list[Any], places: dict[str, dict[str, str]], **rest: Any) -> LoanRow:
    number, name = token
    return LoanRow(
        token=(int(number), str(name)), places={node: KeeperAddress(**p) for node, p in places.items()}, **rest
    )
