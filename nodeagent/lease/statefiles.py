"""What the lease process shows of itself, and what it keeps for the next one: small files in ``<run>/lease``.

``pulse``: that it turns, and what it last granted. ``status.json``: its state. ``failsafe.json``: what runs without the
store. ``unannounced``: up to where the store has what woke nobody. ``address``: where others ask it.
``departure.json``: that a life goes. ``lock``: who it is. Standard library only. Must never decide.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple, get_args

from nodeagent.lease.core import Departure, State
from nodeagent.lease.grants import read_twice, twice
from nodeagent.lease.lending import KeeperAddress, LoanRow, Promises, Table
from nodeagent.osutil.linux import write_atomic

_PULSE = struct.Struct("=dddd")
_LOCK = struct.Struct("@hhqqi4x")
"""C's ``struct flock`` on 64-bit Linux."""
LONGEST_VERSION = 80
LONGEST_ADDRESS = 300
STATES: tuple[State, ...] = get_args(State)


def lease_folder(run_dir: Path) -> Path:
    return run_dir / "lease"


def wake_socket(folder: Path) -> Path:
    """Where the agent's words arrive."""
    return folder / "wake"


# --- its pulse


class Pulse(NamedTuple):
    """Times of CLOCK_BOOTTIME."""

    turned: float
    """When it last showed that it goes on."""
    renewed: float
    """When this process sent the last good renewal of this life; 0: none yet."""
    until: float
    """Until when it has granted the node's pods their time."""
    last: float
    """When the last good renewal was sent, of whichever life or process."""


class PulseWriter:
    """The lease process's side of ``read_pulse``. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "pulse", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def beat(self, pulse: Pulse) -> None:
        os.pwrite(self._fd, twice(_PULSE.pack(*pulse)), 0)


def read_pulse(folder: Path) -> Pulse | None:
    """None if no lease process has turned here since the boot."""
    try:
        fd = os.open(folder / "pulse", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = read_twice(fd, _PULSE)
    finally:
        os.close(fd)
    return None if found is None else Pulse(*found)


# --- its state


class LeaseStatus(NamedTuple):
    """What it is at, and why, in words for people."""

    state: State
    why: str
    of: tuple[str, int, str]
    """The life, start and era of the order that this is about."""


NOBODY = ("", 0, "")
"""What it says is about no order."""


def write_status(folder: Path, status: LeaseStatus) -> None:
    """Raises OSError."""
    write_atomic(folder / "status.json", json.dumps(status._asdict()), durable=False)


def read_status(folder: Path) -> LeaseStatus | None:
    """None if it has not said anything that can be read."""
    data = _read(folder / "status.json")
    if data is None or data.keys() != set(LeaseStatus._fields) or data["state"] not in STATES:
        return None
    return LeaseStatus(data["state"], data["why"], tuple(data["of"]))


# --- what runs without the store


class Bridged(NamedTuple):
    """The node's jobs while the store is away, by uid."""

    lent: dict[str, float]
    """Those that run on failsafe time: until when (CLOCK_BOOTTIME)."""
    refusals: dict[str, str]
    """Those that get none, and why."""


NOT_BRIDGED = Bridged({}, {})


def write_bridged(folder: Path, bridged: Bridged) -> None:
    """Raises OSError."""
    write_atomic(folder / "failsafe.json", json.dumps(bridged._asdict()), durable=False)


def read_bridged(folder: Path) -> Bridged:
    """Nothing if nothing can be read."""
    data = _read(folder / "failsafe.json")
    return NOT_BRIDGED if data is None or data.keys() != set(Bridged._fields) else Bridged(**data)


# --- what nobody was woken for


def unannounced(clocks: str) -> int:
    """The newest revision in the store that woke nobody, of what a renewal replies ("served unannounced"); 0 where it
    does not say."""
    _, _, newest = clocks.partition(" ")
    return int(newest) if newest.isdecimal() else 0


def write_unannounced(folder: Path, newest: int) -> None:
    """Raises OSError."""
    write_atomic(folder / "unannounced", str(newest), durable=False)


def read_unannounced(folder: Path) -> int:
    """0 if it has not said any."""
    try:
        text = (folder / "unannounced").read_text()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


# --- where others ask it


def write_address(folder: Path, address: str) -> None:
    """Raises OSError."""
    write_atomic(folder / "address", address, durable=False)


def read_address(folder: Path) -> str:
    """``host:port`` as others are to use it; empty if it has no port, or has not taken one yet."""
    try:
        return (folder / "address").read_text()[:LONGEST_ADDRESS]
    except (OSError, ValueError):
        return ""


# --- that a life goes


def write_departure(folder: Path, departure: Departure | None) -> None:
    """None: no life goes. Raises OSError."""
    if departure is None:
        (folder / "departure.json").unlink(missing_ok=True)
    else:
        write_atomic(folder / "departure.json", json.dumps(departure._asdict()), durable=False)


def read_departure(folder: Path) -> Departure | None:
    """None also for one that another version wrote."""
    data = _read(folder / "departure.json")
    return None if data is None or data.keys() != set(Departure._fields) else Departure(**data)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


# --- who it is


def take_lock(folder: Path, version: str) -> int | None:
    """The lock's file, to be kept open for the process's whole life; None if another process has it. Raises OSError."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {version}\n".encode(), 0)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def find_holder(folder: Path) -> tuple[int, str] | None:
    """The lease process's pid and version (empty: it has not written it yet), without ever holding the lock oneself:
    a lease process that starts at that moment would go again."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        asked = fcntl.fcntl(fd, fcntl.F_GETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        kind, _, _, _, pid = _LOCK.unpack(asked)
        if kind == fcntl.F_UNLCK or pid <= 0:
            return None
        status, _, version = os.pread(fd, LONGEST_VERSION, 0).decode(errors="replace").strip().partition(" ")
    finally:
        os.close(fd)
    return pid, version if status == str(pid) else ""


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
        data = _read_table(self._fd)
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
        found = Promises(**_read_table(fd))
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


def _read_table(fd: int) -> dict[str, Any]:
    if os.fstat(fd).st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    data: dict[str, Any] = json.loads(b"".join(parts))
    return data
