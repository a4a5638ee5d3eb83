"""The time that a pod may run: a record of a few bytes, which the lease process writes and the pod's shim reads.

Nobody speaks for it and nobody listens: neither side can hold the other up. ``<run>/grants/<key>`` is the lease
process's, readable by all; ``<run>/pods/.answers/<key>`` is the job's user's, and says what its shim has done. It lies
where the pods' run folders do: what users may write, and so fill, is one file system, and root's files are in another.
Standard library only. Must never decide.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

from nodeagent.osutil.linux import write_atomic

try:
    from _sha256 import sha256 as sha256  # type: ignore[import-not-found]  # noqa: PLC0414 (for peers.py, too)
except ImportError:  # its name in later Pythons is another one; OpenSSL's would cost 3 MB
    from hashlib import sha256 as sha256  # noqa: PLC0414

_GRANT = struct.Struct("=dd")
_BARRED = struct.Struct("=d")
OBEYED_FORM = struct.Struct("=d")
_FAR = 1e9
"""Seconds since the boot that no machine reaches: what says more is damaged."""
_TRIES = 10
"""Looks at a record that is just being written; one write is over in less than a microsecond."""
ANSWERS = ".answers"
"""A folder beside the pods' run folders."""


class Grant(NamedTuple):
    """Both are times of CLOCK_BOOTTIME."""

    until: float = 0.0
    """Workers may run until then."""
    stop_before: float = 0.0
    """Workers that were started before then are to be stopped in order, with their job's grace."""
    barred: float = 0.0
    """The number of a generation: no workers of it, or of an older one, may be started."""


NOTHING = Grant()


def grant_key(uid: str) -> str:
    """The name of the record of this job's pod."""
    return str(sha256(uid.encode()).hexdigest()[:10])


def grants_folder(run_dir: Path) -> Path:
    return run_dir / "grants"


def answer_file(record: Path) -> Path:
    """Where the shim of the pod with this record answers."""
    return record.parent.with_name("pods") / ANSWERS / record.name


def make_grant(folder: Path, key: str, owner: int, group: int) -> Path:
    """A new record for a pod, with no time granted, and the one in which its user's shim answers. Raises OSError."""
    file = folder / key
    answer = answer_file(file)
    for parent in (folder, answer.parent.parent, answer.parent):
        if not parent.exists():
            parent.mkdir(parents=True)
            parent.chmod(0o755)  # whatever the umask
    write_atomic(file, twice(_GRANT.pack(NOTHING.until, NOTHING.stop_before)) + _barred(NOTHING), durable=False)
    file.chmod(0o644)
    write_atomic(answer, twice(OBEYED_FORM.pack(0.0)), durable=False, mode=0o600)
    if os.geteuid() == 0:
        os.chown(answer, owner, group, follow_symlinks=False)
    return file


def remove_grant(folder: Path, key: str) -> None:
    """The pod has ended."""
    for file in (folder / key, answer_file(folder / key)):
        file.unlink(missing_ok=True)


def grant_keys(folder: Path) -> list[str]:
    """The pods that have a record."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.name.isalnum())
    except FileNotFoundError:
        return []


def write_grant(folder: Path, key: str, grant: Grant) -> None:
    """Nothing happens where the pod has ended. What is barred is there before the time is, or is taken. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(folder / key, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, _barred(grant), 2 * _GRANT.size)
            os.pwrite(fd, twice(_GRANT.pack(grant.until, grant.stop_before)), 0)
        finally:
            os.close(fd)


def read_grant_of(folder: Path, key: str) -> Grant:
    """``NOTHING`` where the pod has no record."""
    try:
        with GrantReader(folder / key) as reader:
            return reader.read()
    except FileNotFoundError:
        return NOTHING


class GrantReader:
    """A shim's or a watchdog's look at its grant. Raises OSError where there is none."""

    def __init__(self, file: Path) -> None:
        self.fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._last = NOTHING

    def __enter__(self) -> GrantReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def read(self) -> Grant:
        """What is granted now; what was read before, if the record is damaged."""
        found, barred = read_twice(self.fd, _GRANT), read_twice(self.fd, _BARRED, 2 * _GRANT.size)
        if found is not None:
            self._last = Grant(found[0], found[1], self._last.barred)
        if barred is not None:
            self._last = self._last._replace(barred=barred[0])
        return self._last


class GrantAnswer:
    """A shim's side of ``main.read_obeyed``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._logged = 0.0

    def obeyed(self, at: float) -> None:
        """Nothing runs that was started before this time. Raises OSError."""
        if at == self._logged:
            return
        fd = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.pwrite(fd, twice(OBEYED_FORM.pack(at)), 0)
        finally:
            os.close(fd)
        self._logged = at


def _barred(grant: Grant) -> bytes:
    return twice(_BARRED.pack(grant.barred))


def twice(data: bytes) -> bytes:
    """Two copies: a reader that meets a write half done sees that they differ."""
    return data + data


def read_twice(fd: int, form: struct.Struct, at: int = 0) -> tuple[float, ...] | None:
    for _ in range(_TRIES):
        try:
            data = os.pread(fd, 2 * form.size, at)
        except OSError:  # what a user has put in its place: a pipe, a folder
            return None
        if len(data) == 2 * form.size and data[: form.size] == data[form.size :]:
            values: tuple[float, ...] = form.unpack(data[: form.size])
            return values if all(0 <= value < _FAR for value in values) else None
    return None
