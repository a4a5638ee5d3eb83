"""The only way in which root's processes access files, folders and sockets that another user may write.

Such a folder may hold anything: links, pipes, devices, the user's own file systems, endless files, endless trees, files
that change while they are read. So every entry is reached by the descriptor of its folder, never through a link or into
another mount. It is checked before it is opened: only plain files of the expected owner are opened, without blocking.
All reads, lists and walks are bounded. Every violation raises ``UntrustedError``, and nothing else is raised: to the
caller it means that there is no such file, except if it is ``NotSeenError``. Calls that may take long run ``aside``.
Must never know what a file means.
The lease process uses it too: it loads nothing large, asyncio and threads only where a caller runs ``aside``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from nodeagent.osutil.linux import detach_mount, peer_credentials, refuse_descriptors, unseen

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

JSON_MAX = 1 << 16
"""The most bytes of a JSON file."""
DEPTH_MAX = 32
"""The most nested objects and arrays in a JSON file."""
VALUES_MAX = 1 << 16
"""The most values in JSON, objects and arrays among them: what looks at each of them is quick."""
NAMES_MAX = 10_000
"""The most entries of a folder that are read."""
REMOVE_MAX = 1_000_000
"""The most entries that are removed with a tree; the rest of a larger tree stays."""
NAME_KEPT = 200
"""Bytes of its name that a folder keeps which is moved up before it is removed: it may be another user's."""
ASIDE_ENDING = ".left"
"""Of the name of a tree in which something is kept."""
MOUNTS_MAX = 100
"""The most mounts on each other that are detached in one go."""
ASIDE_MAX = 64
"""The most threads that do such work for the agent itself at a time; if so many hang, no more work is started."""
OWNER_MAX = 8
"""The most threads that do such work for one user's pods at a time; if so many hang, those of this user wait."""
ASIDE_SECONDS = 5.0
"""Seconds until the caller stops waiting for such work; its thread continues alone."""

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONG = b"0" * 400
"""With ``_DIGITS``: digits, maybe of a number that takes long to read. No float has more before its point."""
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else 0 for byte in range(256))
_HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair: no UTF-8 could hold it."""


class UntrustedError(Exception):
    """A file is missing, or not what it should be; ``str()`` is a phrase for the log."""


class NotSeenError(UntrustedError):
    """There was no time, thread, descriptor, memory or room in a queue for a look, or the file server did not answer:
    what is there is as unknown as before."""


class HungError(NotSeenError):
    """The look was begun, and did not come back in time."""


class PutAsideError(UntrustedError):
    """A tree that was to be removed holds what is other users'. All else is gone; the rest has another name, under
    which nobody looks for it."""


class UntrustedFolder:
    """An open folder that belongs to ``owner`` (None: to any user). Use it with ``with``.

    ``trusted`` is a path in which only root (or this process's own user) can write; ``names`` is the path from there.
    Raises UntrustedError.
    """

    def __init__(self, trusted: Path, *names: str, owner: int | None = None) -> None:
        self.path = trusted.joinpath(*names)
        if any(name in ("", ".", "..") or "/" in name for name in names):
            raise UntrustedError(f"{self.path} does not name one folder in another")
        with _naming(self.path):
            fd = os.open(trusted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in names:
                try:
                    inner = _opened(fd, name, stat.S_ISDIR, os.O_RDONLY | os.O_DIRECTORY)
                finally:
                    os.close(fd)
                fd = inner
        self.fd = fd
        self.owner = os.fstat(fd).st_uid
        if owner is not None and self.owner != owner:
            self.close()
            raise UntrustedError(f"{self.path} belongs to uid {self.owner}, not to {owner}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def names(self, most: int = NAMES_MAX) -> list[str]:
        """Names of its entries, at most this many, in no order."""
        with _naming(self.path), os.scandir(self.fd) as entries:
            return [entry.name for entry, _ in zip(entries, range(most), strict=False)]

    @property
    def written(self) -> float:
        """When an entry was last added or removed (wall clock), as ``last_written`` has it."""
        return last_written(os.fstat(self.fd))

    def facts(self, name: str) -> os.stat_result:
        """The stat of a plain file of the folder's owner."""
        with _naming(self.path / name):
            at = _pinned(self.fd, name, stat.S_ISREG, {self.owner})
        try:
            return os.fstat(at)
        finally:
            os.close(at)

    def open(self, name: str, *, also: int | None = None, anyones: bool = False) -> BinaryIO:
        """Opens a plain file of the folder's owner (or of ``also``) for reading. ``anyones``: of any owner, in
        a folder in which only its owner makes entries."""
        with _naming(self.path / name):
            fd = _opened(self.fd, name, stat.S_ISREG, os.O_RDONLY, None if anyones else {self.owner, also})
        return os.fdopen(fd, "rb", buffering=0)

    def append(self, name: str, mode: int, *, also: int) -> BinaryIO:
        """Opens a plain file for appending. It is created for the folder's owner, or it exists, belongs to the owner
        (or to ``also``) and has no other name."""
        with _naming(self.path / name):
            try:
                fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _FLAGS, mode, dir_fd=self.fd)
                if os.geteuid() == 0:
                    os.fchown(fd, self.owner, os.fstat(self.fd).st_gid)
            except FileExistsError:
                fd = _opened(self.fd, name, stat.S_ISREG, os.O_WRONLY | os.O_APPEND, {self.owner, also}, alone=True)
        return os.fdopen(fd, "ab", buffering=0)

    def read(self, name: str, most: int) -> bytes:
        """The content of a file of at most this many bytes."""
        with self.open(name) as file, _naming(self.path / name):
            content = _read(file, most + 1)
        if len(content) > most:
            raise UntrustedError(f"{self.path / name} is larger than {most} bytes")
        return content

    def read_object(self, name: str) -> dict[str, Any]:
        """The object in a JSON file."""
        content = self.read(name, JSON_MAX)
        try:
            return object_of(content)
        except UntrustedError as error:
            raise UntrustedError(f"{self.path / name}: {error}") from error

    def end_of(self, name: str, most: int, *, also: int | None = None) -> bytes:
        """The last bytes of a file, at most this many."""
        with self.open(name, also=also) as file, _naming(self.path / name):
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return _read(file, most)

    def connect(self, name: str) -> tuple[socket.socket, int]:
        """A non-blocking connection to the owner's socket of this name, and the pid of the process that listens there.
        Does not wait: if too many connections already wait, it raises NotSeenError."""
        path = self.path / name
        with _naming(path):
            at = _pinned(self.fd, name, stat.S_ISSOCK, {self.owner})
            try:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                refuse_descriptors(link)
                try:
                    link.setblocking(False)
                    link.connect(f"/proc/self/fd/{at}")
                    pid, uid, _ = peer_credentials(link)
                    if uid != self.owner:
                        raise UntrustedError(f"uid {uid} listens at {path}, not {self.owner}")
                except BlockingIOError as error:
                    link.close()
                    raise NotSeenError(f"too many wait at {path}") from error
                except (OSError, UntrustedError):
                    link.close()
                    raise
            finally:
                os.close(at)
        return link, pid


def last_written(facts: os.stat_result) -> float:
    """When this was last written to (wall clock). Its owner may set any time for that, and the kernel notes when he
    does: no time is later than that moment."""
    return min(facts.st_mtime, facts.st_ctime)


def _pinned(
    folder: int,
    name: str,
    kind: Callable[[int], bool],
    owners: Container[int | None] | None = None,
    *,
    alone: bool = False,
) -> int:
    """A descriptor that pins the entry of this name without opening it. Raises UntrustedError, OSError."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    wrong = ""
    try:
        if _mount(fd) != _mount(folder):  # first of all, since even stat would call a user's file system
            wrong = "is another mount"
        else:
            facts = os.fstat(fd)
            if not kind(facts.st_mode):
                wrong = f"is of the wrong kind ({stat.filemode(facts.st_mode)[0]})"
            elif owners is not None and facts.st_uid not in owners:
                wrong = f"belongs to uid {facts.st_uid}"
            elif alone and facts.st_nlink != 1:
                wrong = "has other names too"
    except OSError:
        os.close(fd)
        raise
    if wrong:
        os.close(fd)
        raise UntrustedError(f"{name} {wrong}")
    return fd


def _opened(
    folder: int,
    name: str,
    kind: Callable[[int], bool],
    flags: int,
    owners: Container[int | None] | None = None,
    *,
    alone: bool = False,
) -> int:
    at = _pinned(folder, name, kind, owners, alone=alone)
    try:
        return os.open(f"/proc/self/fd/{at}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(at)


def _mount(fd: int) -> bytes:
    """The id of the mount that this is on; the file system itself is not called."""
    info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(info, 4096).split(b"\n")
    finally:
        os.close(info)
    return next((line for line in lines if line.startswith(b"mnt_id:")), b"")


def _read(file: BinaryIO, most: int) -> bytes:
    found = b""
    while len(found) < most and (data := file.read(most - len(found))):
        found += data
    return found


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NotSeenError if unseen(error) else UntrustedError
        raise kind(f"{path}: {error.strerror or error}") from error


def object_of(content: bytes) -> dict[str, Any]:
    """A JSON object that can be encoded as UTF-8, is not deeper than DEPTH_MAX and holds at most VALUES_MAX values.
    Raises UntrustedError."""
    return object_and_text(content)[0]


def object_and_text(content: bytes, *, lossy: bool = False) -> tuple[dict[str, Any], str]:
    """The same, and its JSON text, in which each object has each key once. ``lossy``: half of a surrogate pair becomes
    U+FFFD."""
    try:
        short_only = _short if _LONG in content.translate(_DIGITS) else None
        value: dict[str, Any] = json.loads(content.decode(), parse_constant=_no_constant, parse_int=short_only)
        if not isinstance(value, dict):
            raise UntrustedError("not a JSON object")
        if _deeper(value):
            raise UntrustedError(f"JSON of more than {DEPTH_MAX} levels")
        text = json.dumps(value, ensure_ascii=False)
        if lossy and _HALF.search(text):
            value = json.loads(_HALF.sub("\ufffd", text))
            text = json.dumps(value, ensure_ascii=False)  # two keys may have become one
        text.encode()  # fails for half of a surrogate pair
    except ValueError as error:
        raise UntrustedError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise UntrustedError(f"JSON of more than {DEPTH_MAX} levels") from error
    return value, text


def _deeper(value: Any) -> bool:
    level, left = [value], VALUES_MAX
    for _ in range(DEPTH_MAX):
        left -= len(level)
        if left < 0:
            raise UntrustedError(f"JSON of more than {VALUES_MAX} values")
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _short(number: str) -> int:
    if len(number) > len(_LONG):
        raise ValueError(f"a number of {len(number)} digits")
    return int(number)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def is_there(trusted: Path, name: str) -> bool:
    """Returns whether there is an entry of this name, of whatever kind, or a mount on it. Raises NotSeenError."""
    with _naming(trusted / name):
        try:
            with _folder(trusted) as folder:
                os.close(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))
        except FileNotFoundError:
            return False
    return True


def is_mounted(trusted: Path, name: str) -> bool:
    """Returns whether something is mounted on the entry of this name. Raises UntrustedError."""
    with _naming(trusted / name):
        try:
            with _folder(trusted) as folder:
                return _is_mounted(folder, name)
        except FileNotFoundError:
            return False


def owner_of(trusted: Path, name: str) -> int:
    """The uid of whose the entry of this name is, of whatever kind. Raises UntrustedError, also where something is
    mounted on it."""
    with _naming(trusted / name), _folder(trusted) as folder:
        at = _pinned(folder, name, lambda _: True)
        try:
            return os.fstat(at).st_uid
        finally:
            os.close(at)


def detach(trusted: Path, name: str) -> None:
    """Take away what is mounted on the entry of this name, in a folder in which only this process's user writes. It may
    wait for who serves it. Raises UntrustedError."""
    with _naming(trusted / name), _folder(trusted) as folder:
        _detach(folder, name)


@contextmanager
def _folder(trusted: Path) -> Iterator[int]:
    fd = os.open(trusted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_mounted(folder: int, name: str) -> bool:
    at = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        return _mount(at) != _mount(folder)
    finally:
        os.close(at)


def _detach(folder: int, name: str) -> None:
    for _ in range(MOUNTS_MAX):
        if not _is_mounted(folder, name):
            return
        detach_mount(f"/proc/self/fd/{folder}/{name}")
    raise UntrustedError(f"{name} is another mount, again and again")


def remove_tree(trusted: Path, name: str) -> None:
    """Remove the entry of this name, in a folder in which only this process's user writes. Follows no link. What is
    mounted there is detached, and nothing of it removed. Needs constant memory and descriptors at any depth: deeper
    entries are moved up and removed there. Raises UntrustedError if something is left.

    As root it removes what the tree's owner could have removed, and no more: he may have moved another user's folders
    there. What is in those is kept (``PutAsideError``)."""
    path = trusted / name
    with _naming(path):
        try:
            with _folder(trusted) as folder:
                _detach(folder, name)
            path.unlink()
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # PermissionError: POSIX's word for a folder
            pass
        else:
            return
    with UntrustedFolder(trusted, name) as top, _naming(path):
        left, kept = REMOVE_MAX, dict[str, int]()
        may_empty = _Emptied(top.owner)
        while names := [entry for entry in top.names() if entry not in kept]:
            left -= len(names)
            if left < 0:
                raise UntrustedError(f"{path} holds more than {REMOVE_MAX} entries")
            for entry in names:
                if (whose := _remove_entry(top.fd, entry, may_empty)) is not None:
                    kept[entry] = whose
            if len(names) < NAMES_MAX and set(top.names()) - kept.keys() == set(names):
                raise UntrustedError(f"{path}: what it holds cannot be removed")
    if kept:
        raise PutAsideError(_put_aside(path, kept, top.owner))
    with _naming(path):
        path.rmdir()


class _Emptied:
    """Whose folders, in a tree of this owner, may be emptied: his, and those of his subordinate uids (a container's);
    in a tree of root's, and for who is not root, everybody's, as far as the kernel allows it."""

    def __init__(self, owner: int) -> None:
        self._owner, self._all = owner, owner == 0 or os.geteuid() != 0
        self._ranges: list[tuple[int, int, str]] | None = None

    def has(self, uid: int) -> bool:
        if self._all or uid == self._owner:
            return True
        if self._ranges is None:
            from nodeagent.osutil.subuids import ranges_of

            self._ranges = ranges_of(self._owner)
        return any(first <= uid <= last for first, last, _ in self._ranges)


def _put_aside(path: Path, kept: Mapping[str, int], owner: int) -> str:
    """Gives what is left of the tree a name by which it is nobody's any more; what to say of it."""
    aside_ = path
    if not path.name.endswith(ASIDE_ENDING):
        aside_ = path.with_name(f"{path.name}.{os.urandom(4).hex()}{ASIDE_ENDING}")
        with _naming(path):
            path.rename(aside_)
    name, uid = next(iter(kept.items()))
    more = f" and {len(kept) - 1} more folders" if len(kept) > 1 else ""
    return (
        f"{path} was to be removed, and what is not uid {owner}'s in it is kept, as {aside_}: {name!a} of uid "
        f"{uid}{more}. Give it back to its owner, and remove the folder"
    )


def _remove_entry(top: int, name: str, may_empty: _Emptied) -> int | None:
    """Removes an entry of the folder; if it is a folder that is not empty, its entries are moved up first. Of one that
    stays, whose it is."""
    try:
        _in_place(partial(os.unlink, name, dir_fd=top), top, name)
        return None
    except (IsADirectoryError, PermissionError):
        pass
    with suppress(OSError):
        _in_place(partial(os.rmdir, name, dir_fd=top), top, name)
        return None
    fd = _opened(top, name, stat.S_ISDIR, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not may_empty.has(whose := os.fstat(fd).st_uid):
            return whose
        with os.scandir(fd) as entries:
            inside = [entry.name for entry, _ in zip(entries, range(NAMES_MAX), strict=False)]
        for entry in inside:
            try:
                _in_place(partial(os.unlink, entry, dir_fd=fd), fd, entry)
            except (IsADirectoryError, PermissionError):
                up = f"{os.fsdecode(os.fsencode(entry)[:NAME_KEPT])}.{os.urandom(8).hex()}"
                _in_place(partial(os.rename, entry, up, src_dir_fd=fd, dst_dir_fd=top), fd, entry)
    finally:
        os.close(fd)
    with suppress(OSError):  # more than NAMES_MAX: the next round continues
        os.rmdir(name, dir_fd=top)
    return None


def _in_place(change: Callable[[], None], folder: int, name: str) -> None:
    """Of an entry which the kernel changes only without what is mounted on it."""
    try:
        change()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _detach(folder, name)
        change()


_aside: set[asyncio.Future[Any]] = set()


async def aside(
    work: Callable[[], T], seconds: float = ASIDE_SECONDS, discard: Callable[[T], object] | None = None
) -> T:
    """Runs ``work`` in a thread of its own and returns its result, or raises its error. Raises HungError if it does not
    end within ``seconds``, NotSeenError if too many earlier calls have not ended. ``discard`` is called with a result
    that comes when the caller has stopped waiting, to close what was opened for it."""
    return await _within(_begun(work), seconds, discard)


class OneAside:
    """Work that is done ``aside`` time and again, one at a time: what hangs keeps one thread, and takes no other by and
    by from those that look elsewhere."""

    def __init__(self) -> None:
        self._last: asyncio.Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        """The last work has not come back."""
        return self._last is not None and not self._last.done()

    async def run(
        self, work: Callable[[], T], seconds: float = ASIDE_SECONDS, discard: Callable[[T], object] | None = None
    ) -> T:
        """As ``aside``. Raises NotSeenError too while the last work is still under way."""
        if self.under_way:
            raise NotSeenError("an earlier look has not come back")
        self._last = done = _begun(work)
        return await _within(done, seconds, discard)


class AsideByOwner:
    """Work that is done ``aside`` for many users: at most ``OWNER_MAX`` at a time for each of them, and one at a time
    of the same name. So what a user makes hang holds up nobody else's; and of the same name it keeps one thread."""

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Semaphore] = {}
        """By uid, of all users who had a pod here."""
        self._under_way: set[str] = set()

    async def run(
        self,
        owner: int,
        name: str,
        work: Callable[[], T],
        seconds: float = ASIDE_SECONDS,
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """As ``aside``, ``seconds`` from when it begins. Raises NotSeenError if its turn has not come within as many
        seconds before that, or if earlier work of this name is still under way."""
        import asyncio

        self._refuse_twice(name)
        turn = self._turns.setdefault(owner, asyncio.Semaphore(OWNER_MAX))
        try:
            async with asyncio.timeout(seconds):
                await turn.acquire()
        except TimeoutError:
            raise NotSeenError(f"{OWNER_MAX} earlier looks for uid {owner} have not come back") from None
        try:
            self._refuse_twice(name)
            done = _in_thread(work)
        except NotSeenError:
            turn.release()
            raise
        self._under_way.add(name)

        def over(_: asyncio.Future[T]) -> None:
            self._under_way.discard(name)
            turn.release()

        done.add_done_callback(over)
        return await _within(done, seconds, discard)

    def _refuse_twice(self, name: str) -> None:
        if name in self._under_way:
            raise NotSeenError("an earlier look has not come back")


def _begun(work: Callable[[], T]) -> asyncio.Future[T]:
    _aside.difference_update([one for one in _aside if one.done() or one.get_loop().is_closed()])
    if len(_aside) >= ASIDE_MAX:
        raise NotSeenError(f"{ASIDE_MAX} looks at users' files have not come back")
    done = _in_thread(work)
    _aside.add(done)
    return done


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    from nodeagent.osutil.threads import in_daemon

    try:
        return in_daemon(work, "untrusted")
    except OSError as error:
        raise NotSeenError(str(error)) from error


async def _within(done: asyncio.Future[T], seconds: float, discard: Callable[[T], object] | None) -> T:
    import asyncio

    def unclaimed(late: asyncio.Future[T]) -> None:
        if discard is not None and not late.cancelled() and late.exception() is None:
            discard(late.result())

    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(done)
    except TimeoutError:
        done.add_done_callback(unclaimed)
        raise HungError(f"it did not come back within {seconds:g} s") from None
    except asyncio.CancelledError:
        done.add_done_callback(unclaimed)
        raise
