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

from nodeagent.lease.core import Departure, LeaseState
from nodeagent.lease.grants import read_twice, twice
from nodeagent.lease.lending import FailsafeAddress, LoanRow, Promises, Table
from nodeagent.lease.withdrawals import LONGEST_NUMBER, MOST, NOTHING_WITHDRAWN, Withdrawal, Withdrawals
from nodeagent.osutil.linux import ReplacedFile, open_plain, write_atomic

_PULSE = struct.Struct("=dddd")
_LOCK = struct.Struct("@hhqqi4x")
"""C's ``struct flock`` on 64-bit Linux."""
LONGEST_VERSION = 80
LONGEST_ADDRESS = 300
LONGEST_BRIDGED = 4 << 20
"""Bytes of ``failsafe.json``: a text for each job that runs here."""
STATES: tuple[LeaseState, ...] = get_args(LeaseState)


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
        self._fd = os.open(pulse_file(folder), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def beat(self, pulse: Pulse) -> None:
        os.pwrite(self._fd, twice(_PULSE.pack(*pulse)), 0)


def pulse_file(folder: Path) -> Path:
    return folder / "pulse"


def read_pulse(file: Path | str) -> Pulse | None:
    """None if no lease process has turned here since the boot. Raises OSError where there is no looking."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        found = read_twice(fd, _PULSE)
    finally:
        os.close(fd)
    return None if found is None else Pulse(*found)


# --- its state


class LeaseStatus(NamedTuple):
    """What it is at, and why, in words for people."""

    state: LeaseState
    why: str
    of: tuple[str, int, str]
    """The life, start and era of the order that this is about."""


NOBODY = ("", 0, "")
"""What it says is about no order."""


def write_status(folder: Path, status: LeaseStatus) -> None:
    """Raises OSError."""
    write_atomic(folder / "status.json", json.dumps(status._asdict()), durable=False)


def read_status(folder: Path) -> LeaseStatus | None:
    """None if it has written nothing that can be understood. Raises OSError where there is no looking."""
    data = _read(folder / "status.json")
    if data is None or data.keys() != set(LeaseStatus._fields) or data["state"] not in STATES:
        return None
    match data["why"], data["of"]:
        case [str(why), [str(life), int(start), str(era)]]:
            return LeaseStatus(data["state"], why, (life, start, era))
    return None


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


def bridged_reader(folder: Path) -> ReplacedFile[Bridged]:
    """Nothing if nothing can be read."""

    def parse(text: bytes) -> Bridged:
        data = json.loads(text)
        return Bridged(**data) if data.keys() == set(Bridged._fields) else NOT_BRIDGED

    return ReplacedFile(folder / "failsafe.json", parse, NOT_BRIDGED, LONGEST_BRIDGED)


# --- what nobody was woken for

LONGEST_REVISION = 16
"""Digits. Of more Python's ``int`` may make an error, and who writes to the store can write a long one."""


def unannounced(clocks: str) -> int:
    """The newest revision in the store that woke nobody, of what a renewal replies ("served unannounced"); 0 where it
    does not say."""
    _, _, newest = clocks.partition(" ")
    return int(newest) if newest.isdecimal() and len(newest) <= LONGEST_REVISION else 0


def write_unannounced(folder: Path, newest: int) -> None:
    """Raises OSError."""
    write_atomic(folder / "unannounced", str(newest), durable=False)


def unannounced_reader(folder: Path) -> ReplacedFile[int]:
    """0 if it has written none."""
    return ReplacedFile(folder / "unannounced", lambda text: int(text) if text.isdigit() else 0, 0)


# --- where others ask it


def write_address(folder: Path, address: str) -> None:
    """Raises OSError."""
    write_atomic(folder / "address", address, durable=False)


def address_reader(folder: Path) -> ReplacedFile[str]:
    """``host:port`` as others are to use it; empty if it has no port, or has not taken one yet."""
    return ReplacedFile(folder / "address", lambda text: text.decode()[:LONGEST_ADDRESS], "")


# --- that a life goes


def write_departure(folder: Path, departure: Departure | None) -> None:
    """None: no life goes. Raises OSError."""
    if departure is None:
        (folder / "departure.json").unlink(missing_ok=True)
    else:
        write_atomic(folder / "departure.json", json.dumps(departure._asdict()), durable=False)


def read_departure(folder: Path, now: float) -> Departure | None:
    """None also for one that another version wrote, or that is damaged. Raises OSError where there is no looking."""
    data = _read(folder / "departure.json")
    if data is None or data.keys() != set(Departure._fields):
        return None
    found = Departure(**data)
    texts = (found.life, found.era, found.why)
    whole = all(isinstance(text, str) for text in texts) and type(found.start) is int and type(found.at_once) is bool
    return found if whole and _has_been(found.stop_before, now) else None


# --- what is taken back


def write_withdrawn(folder: Path, withdrawn: Withdrawals) -> None:
    """Raises OSError."""
    write_atomic(folder / "withdrawn.json", json.dumps(withdrawn._asdict()), durable=False)


def read_withdrawn(folder: Path, now: float) -> Withdrawals:
    """Nothing also of what another version wrote, or of what is damaged anywhere. Raises OSError where there is no
    looking."""
    data = _read(folder / "withdrawn.json")
    if data is None or data.keys() != set(Withdrawals._fields):
        return NOTHING_WITHDRAWN
    life, jobs = data["life"], data["jobs"]
    if not isinstance(life, str) or not isinstance(jobs, dict) or len(jobs) > MOST:
        return NOTHING_WITHDRAWN
    found = {uid: withdrawal for uid, one in jobs.items() if (withdrawal := _withdrawal(one, now)) is not None}
    return Withdrawals(life, found) if len(found) == len(jobs) else NOTHING_WITHDRAWN


def _withdrawal(data: object, now: float) -> Withdrawal | None:
    match data:
        case [int(number), int() | float() as at, bool(over)] if number is not True and _has_been(at, now):
            return Withdrawal(number, at, over) if 0 < number < 10**LONGEST_NUMBER else None
    return None


def _has_been(at: Any, now: float) -> bool:
    """A time since the boot that is over."""
    return type(at) in (int, float) and 0 <= at <= now


def _read(file: Path) -> dict[str, Any] | None:
    try:
        with open_plain(file) as opened:
            data = json.loads(opened.read(MOST_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
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
    a lease process that starts at that moment would go again. Raises OSError where there is no looking."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
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
        token=(int(number), str(name)), places={node: FailsafeAddress(**p) for node, p in places.items()}, **rest
    )
