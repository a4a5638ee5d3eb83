"""Two small files between an agent and the lease process, in ``<run>/lease``: what the one knows of the node's jobs,
and what the other has promised by that.

``table.json`` is the agent's, ``promises.json`` the lease process's; each is replaced as a whole. Each side writes its
own before it reads the other's (``failsafe.py``). They need not outlive a power cut: then nothing of the node's runs
any more, and the time for which it may have promised something counts from when ``promises.json`` is begun anew.
Standard library only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nodeagent.lease.lending import KeeperAddress, LoanRow, Promises, Table
from nodeagent.osutil.linux import write_atomic

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


class TableReader:
    """The lease process's side. It holds on to the file that it has read: another one cannot have that one's number."""

    def __init__(self, folder: Path, boot: str) -> None:
        self._file, self._boot = table_file(folder), boot
        self._fd = -1
        self._table: Table | None = None

    def read(self) -> Table | None:
        """As it is now; None if there is none, or it is from before the last boot. Raises OSError, and ValueError,
        KeyError, TypeError and AttributeError: then it is not an agent of this version that wrote it."""
        try:
            now = self._file.stat()
        except FileNotFoundError:
            self._forget()
            return None
        if self._fd >= 0:
            read = os.fstat(self._fd)
            if (read.st_dev, read.st_ino) == (now.st_dev, now.st_ino):
                return self._table
        self._forget()
        self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        data = _read(self._fd)
        if data["boot"] == self._boot:
            jobs = {uid: _row(**row) for uid, row in data.pop("jobs").items()}
            self._table = Table(**data, jobs=jobs)
        return self._table

    def _forget(self) -> None:
        self._table = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_promises(folder: Path, promises: Promises) -> None:
    """Raises OSError."""
    write_atomic(promises_file(folder), json.dumps(promises._asdict()), durable=False)


def read_promises(folder: Path, boot: str) -> Promises | None:
    """None if none were written down since the boot: then there may be any."""
    try:
        fd = os.open(promises_file(folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = Promises(**_read(fd))
        until = {uid: float(end) for uid, end in found.until.items()}
        return found._replace(began=float(found.began), until=until) if found.boot == boot else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    finally:
        os.close(fd)


def _row(token: list[Any], places: dict[str, dict[str, str]], **rest: Any) -> LoanRow:
    number, name = token
    return LoanRow(
        token=(int(number), str(name)), places={node: KeeperAddress(**p) for node, p in places.items()}, **rest
    )


def _read(fd: int) -> dict[str, Any]:
    if os.fstat(fd).st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    data: dict[str, Any] = json.loads(b"".join(parts))
    return data
