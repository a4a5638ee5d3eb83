"""Linux primitives that the shim and its host share: process identity, marks, death signals, socket paths, small reads
of /proc.

Standard library only, because the shim imports it. Must never hold a policy (the caller decides when to kill).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Set
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    import ctypes

_T = TypeVar("_T")

MARK = "NODEAGENT_SHIM"
"""Environment variable that every process of a pod carries; its value is unique to one shim."""
MarkedProcesses = tuple[str, int]
"""A pod's processes: the mark that they carry, and the uid that they run as."""
POWER = "NODEAGENT_POWER"
"""Environment variable of every process on one node of a local cluster: a power cut (``local/power.py``) kills these
processes."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER = 1, 36, 0x59616D61
_TFD_CLOEXEC, _TFD_TIMER_ABSTIME, _CLOCK_BOOTTIME = 0o2000000, 1, 7
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_SUN_PATH = 107
_SO_PASSRIGHTS = 83
_CREDENTIALS = struct.Struct("3i")
_BOOT_ID = "proc/sys/kernel/random/boot_id"

ENVIRON_MAX = 8 << 20
"""The most bytes of a process's environment that are read: more than exec accepts (a process may later declare any of
its memory as its environment)."""
DEPTH = 64
"""Generations of processes through which one is looked up."""
CHILDREN_MAX = 1 << 20
"""The most bytes that are read of a thread's children."""
_PASSING = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOMEM,
    errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT,
})  # fmt: skip
PREFERRED = -10
"""Niceness of processes on whose speed the workers depend: agents, shims, and a private Redis."""


@cache
def _libc() -> ctypes.CDLL:
    """What Python has no function for. Loaded by the first call: a lease process makes none, and is the smaller."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _raise(function: str) -> NoReturn:
    import ctypes

    raise OSError(ctypes.get_errno(), function)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0):
        _raise("prctl")


def prefer(process: int = 0) -> None:
    """Schedules this process, or a child that was just started, and its later children before others if cores are
    short; only root may."""
    if os.getpriority(os.PRIO_PROCESS, process) > PREFERRED:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, process, PREFERRED)
    prefer_session(process or os.getpid())


def prefer_session(leader: int) -> None:
    """Does the same for the session that this process leads: if the kernel first divides time among sessions
    (autogroup), niceness counts only within a session."""
    with contextlib.suppress(OSError):  # it has ended, we lack the right, or the kernel has no such groups
        if os.getsid(leader) == leader:
            Path(f"/proc/{leader}/autogroup").write_text(str(PREFERRED))


def prefer_no_more() -> None:
    """Reverts a parent's ``prefer`` in this process, which is about to run a program that is not nodeagent's."""
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME: they advance while the machine is suspended, and never step."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def power_mark() -> dict[str, str]:
    """This process's own power mark, for the environment of its children; empty on a real node."""
    return {POWER: os.environ[POWER]} if POWER in os.environ else {}


_HOST_PIDS = 0xEFFFFFFC
"""Inode of the machine's own pid namespace."""


def in_container() -> bool:
    """This process has a pid namespace other than the machine's: there others may know its processes by other numbers,
    and the kernel shows it devices that are its host's."""
    return Path("/proc/self/ns/pid").stat().st_ino != _HOST_PIDS


def boot_id() -> str:
    """The kernel's id of this boot, or a container's replacement of it. Read through init's root, since a sandbox may
    hide the replacement. Only root can read it there; other users are in no sandbox."""
    with contextlib.suppress(OSError):
        return Path("/proc/1/root", _BOOT_ID).read_text().strip()
    return Path("/", _BOOT_ID).read_text().strip()


def die_with_parent(parent: int) -> None:
    """Request SIGKILL at the parent's death; a parent that died before this call counts too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracer(pid: int) -> None:
    """If Yama is active, only ancestors may trace a process, or a process that it names: it names ``pid`` and its
    children. The permission survives exec; without Yama the call fails without harm."""
    _libc().prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def become_subreaper() -> None:
    """Makes orphans below this process its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def boottime_timer() -> int:
    """A timerfd on CLOCK_BOOTTIME that is not armed."""
    fd: int = _libc().timerfd_create(_CLOCK_BOOTTIME, _TFD_CLOEXEC)
    if fd < 0:
        _raise("timerfd_create")
    return fd


def arm_timer(fd: int, at: float) -> None:
    """Makes ``fd`` readable once CLOCK_BOOTTIME reaches ``at`` (at once if it has passed); replaces an earlier time."""
    nanoseconds = max(1, int(at * 1e9))
    spec = struct.pack("qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
    if _libc().timerfd_settime(fd, _TFD_TIMER_ABSTIME, spec, None):
        _raise("timerfd_settime")


def read_proc(path: str) -> bytes:
    """A small file of /proc; empty if the process has ended, or if the kernel refuses. Takes a third of pathlib's
    time."""
    try:
        return _read_proc(path)
    except OSError:
        return b""


def _read_proc(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 14)
    finally:
        os.close(fd)


def proc_stat(path: str) -> list[bytes]:
    """Fields of a ``stat`` file from the state on; empty if there is no such process. Raises OSError if there is no
    descriptor or memory to look."""
    try:
        text = _read_proc(path)
    except OSError as error:
        if short(error):
            raise
        return []
    return text.rpartition(b")")[2].split()


def read_children(pid: int, thread: int | str) -> list[int]:
    """The children of one thread, zombies included; none if it has ended. The kernel gives a page at a time. Raises
    OSError if there is no descriptor or memory to look."""
    try:
        fd = os.open(f"/proc/{pid}/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if short(error):
            raise
        return []
    found = b""
    try:
        while len(found) < CHILDREN_MAX and (page := os.read(fd, 1 << 14)):
            found += page
    except OSError:  # it has ended
        pass
    finally:
        os.close(fd)
    return [int(word) for word in found.split()]


def family(roots: Iterable[int], most: int) -> list[int]:
    """The roots and, recursively, the children of their main threads: each once, at most ``most``. What
    there is no descriptor or memory to look at counts as childless."""
    found: dict[int, None] = {}
    waiting = deque(islice(roots, most))
    while waiting and len(found) < most:
        pid = waiting.popleft()
        if pid in found:
            continue
        found[pid] = None
        with contextlib.suppress(OSError):
            waiting += read_children(pid, pid)
    return list(found)


def descends(pid: int, roots: Container[int]) -> bool:
    """Whether the process is one of these, or was started below one. Raises OSError if there is no descriptor or memory
    to look."""
    for _ in range(DEPTH):
        if pid in roots:
            return True
        fields = stat_fields(pid)
        if fields is None or pid <= 1:
            return False
        pid = int(fields[1])
    return False


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None if there is no such process. Raises OSError if there is no
    descriptor or memory to look."""
    try:
        text = _read_proc(f"/proc/{pid}/stat").decode(errors="replace")
    except OSError as error:
        if short(error):
            raise
        return None
    return text.rpartition(")")[2].split()


def passing(error: OSError) -> bool:
    """What failed may succeed later although nobody changes the request: a disk or a table is full, a file server is
    silent, something is mounted in the way."""
    return error.errno in _PASSING


def short(error: OSError) -> bool:
    """What failed lacked a descriptor or memory: nothing was learned of what was to be looked at."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def unseen(error: OSError) -> bool:
    """The same of what may lie on a file server, which may be silent, too."""
    return short(error) or error.errno in (errno.ESTALE, errno.ETIMEDOUT)


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process started: with the pid and boot id, its identity."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def is_running(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    fields = stat_fields(pid)
    return fields is not None and not is_over(fields)


def is_over(fields: list[str]) -> bool:
    """Whether the process of these ``stat_fields`` runs no code any more. The letter is its main thread's alone: other
    threads may go on without it."""
    return fields[0] in "ZX" and int(fields[17]) <= 1


def own_children() -> list[int]:
    """Children of this process, zombies included."""
    me = os.getpid()
    try:
        found: list[int] = []
        for task in Path(f"/proc/{me}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
        return found
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in pids() if (fields := stat_fields(pid)) and int(fields[1]) == me]


def pids() -> Iterator[int]:
    """Every process of this machine that /proc lists."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def has_mark(pid: int, mark: str, owner: int) -> bool:
    """Returns whether this is the user's process, started with this pod's mark in its environment. (A user can write
    any mark into their own processes and files, so the mark alone would let them name another user's.) Raises OSError
    if there is no descriptor or memory to look."""
    return bool(_marks(pid, {(mark, owner)}))


def _marks(pid: int, wanted: Set[MarkedProcesses]) -> list[MarkedProcesses]:
    """Those of these that the process carries."""
    owners = {owner for _, owner in wanted}
    try:
        if os.stat(f"/proc/{pid}").st_uid not in owners | {0}:  # noqa: PTH116 (0: also of who may not be looked into)
            return []
        uid = user(pid)
        if uid not in owners:
            return []
        environ = frozenset(read_environ(pid).split(b"\0"))
    except OSError as error:  # the process is gone, or belongs to another user
        if short(error):
            raise
        return []
    return [(mark, owner) for mark, owner in wanted if owner == uid and f"{MARK}={mark}".encode() in environ]


def user(pid: int) -> int:
    """The uid that the process runs as, also if its files are root's because nobody may look into it. Raises
    OSError."""
    return next(iter(_uids(pid)), -1)


def may_signal(pid: int, uid: int) -> bool:
    """Whether a process of this user, without privileges, may signal it; also of one that has ended. Raises OSError if
    there is no descriptor or memory to look."""
    try:
        real, _, saved, *_ = _uids(pid) or [uid] * 3
    except OSError as error:
        if short(error):
            raise
        return True
    return uid in (real, saved)


def _uids(pid: int) -> list[int]:
    """Real, effective, saved and of files. Raises OSError."""
    status = _read_proc(f"/proc/{pid}/status").splitlines()
    return next(([int(word) for word in line.split()[1:]] for line in status if line.startswith(b"Uid:")), [])


def read_environ(pid: int) -> bytes:
    """Its environment. Raises OSError. A process whose main thread has ended has it in its other threads only."""
    try:
        return _environ(f"/proc/{pid}/environ")
    except ProcessLookupError:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                return _environ(f"{thread}/environ")
        raise


def _environ(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read(ENVIRON_MAX)


def marked(wanted: Set[MarkedProcesses]) -> dict[MarkedProcesses, list[int]]:
    """Processes (no zombies, not the caller) by which of these they carry, from one look at all there are. It may
    block: a process that hangs in the kernel can hold what its environment is read under. Raises OSError."""
    found: dict[MarkedProcesses, list[int]] = {one: [] for one in wanted}
    for pid in pids():
        if pid != os.getpid() and (marks := _marks(pid, wanted)) and is_running(pid):
            for one in marks:
                found[one].append(pid)
    return found


def kill_marked(wanted: Set[MarkedProcesses]) -> dict[MarkedProcesses, list[int]]:
    """SIGKILL every process that carries one of these; returns those that were alive. As ``marked``."""
    found = marked(wanted)
    for pid in {pid for some in found.values() for pid in some}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = os.pidfd_open(pid)
            try:
                if _marks(pid, wanted):  # the pid may have been reused before the pidfd pinned it
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)
    return found


def pidfd_ended(pidfd: int) -> bool:
    """Returns whether the process behind the pidfd has ended (reaped or not)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill_group(pid: int, pidfd: int, number: int = signal.SIGKILL) -> None:
    """Signal the group that this process leads. If it has made no session yet, signal only the process; SIGKILL is
    always sent to the process too. The leader must not have been reaped: only it pins the group's number."""
    grouped = False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        grouped = True
    if not grouped or number == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, number)


def detach_mount(path: str) -> None:
    """Take what is mounted on this out of the tree of files at once, also if it is in use. A link is not followed. It
    may wait for who serves it. Raises OSError."""
    if _libc().umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW):
        _raise("umount2")


def saves_itself(pid: int) -> bool:
    """Returns whether this is a Python that handles SIGTERM: it may save, and needs its own helpers (a DataLoader's
    workers) for that. Other programs, such as shells, do not pass the signal on. Raises OSError if there is no
    descriptor or memory to look."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError as error:  # it has ended, or may not be looked into
        if short(error):
            raise
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return program.startswith("python") and bool(caught >> (signal.SIGTERM - 1) & 1)


@contextlib.contextmanager
def socket_path(path: Path) -> Iterator[str]:
    """The path in a form that unix sockets accept (at most 107 bytes): through an open folder if it is longer."""
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}"
        if len(os.fsencode(short)) > _SUN_PATH:
            raise OSError(errno.ENAMETOOLONG, f"the socket's own name is too long: {path.name}")
        yield short
    finally:
        os.close(folder)


def bind_private(link: socket.socket, path: Path) -> None:
    """Bind a unix socket that only this user can reach; a file with that name is removed. Raises OSError."""
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with socket_path(path) as short:
            link.bind(short)
    finally:
        os.umask(before)


def peer_credentials(link: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end of a unix socket, as the kernel knows them: of the one that
    connected, or listens. Raises OSError."""
    pid, uid, gid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def refuse_descriptors(link: socket.socket) -> bool:
    """From now on nobody can pass a descriptor to this unix socket, or to the connections that it accepts: who tries
    gets EPERM. The kernel closes those that nobody takes in the thread that reads, and the sender chooses how long that
    lasts (a TCP socket that lingers). False: the kernel is older than Linux 6.16, and cannot."""
    try:
        link.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return False
    return True


def can_refuse_descriptors() -> bool:
    """Whether this kernel can."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        return refuse_descriptors(link)


def listens(path: str | Path, seconds: float) -> bool:
    """Whether somebody listens at a unix socket, also if too many wait there; looks for at most so many seconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(seconds)
        try:
            link.connect(os.fspath(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


class NotPlainError(OSError):
    """What the path names is no regular file."""


def open_plain(path: os.PathLike[str] | str, flags: int = 0) -> BinaryIO:
    """A regular file, for reading. Who opens a FIFO waits for a writer, for ever and without a word. ``flags``: more of
    them, such as ``O_NOFOLLOW``. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotPlainError(errno.EINVAL, "it is no regular file: replace it", os.fspath(path))
    return os.fdopen(fd, "rb")


def write_atomic(path: Path, content: str | bytes, durable: bool, mode: int = 0o600) -> None:
    """Replace the whole file; ``durable`` also waits until file and name are on the disk. Raises OSError; then the file
    is unchanged."""
    left = memoryview(content.encode() if isinstance(content, str) else content)
    draft = path.with_name(path.name + ".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        while left:  # a disk that becomes full writes a part first, and then refuses
            left = left[os.write(fd, left) :]
        if durable:
            os.fsync(fd)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    draft.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in this folder are on the disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hold_folder(path: Path) -> int:
    """Have systemd-tmpfiles, which removes from /tmp what nobody has touched for some days, pass over this folder and
    all below it, until the descriptor that is returned is closed. Raises OSError."""
    import fcntl

    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # it is cleaned at this very moment, or its file system knows no locks
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def keep_damaged(path: Path) -> str:
    """Give a file that cannot be read a second name, ``.damaged`` behind its own, under which it outlives the one that
    replaces it. The one that was kept so before goes. Returns that name, or why there is none."""
    kept = path.with_name(path.name + ".damaged")
    try:
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)
    except OSError as error:
        return f"nowhere ({error.strerror})"
    return str(kept)


class ReplacedFile(Generic[_T]):
    """A reader of a small file that ``write_atomic`` replaces: each version of it is read and parsed once. It holds on
    to the file that it has read, since another one cannot have that one's number while it is open."""

    def __init__(self, path: Path, parse: Callable[[bytes], _T], none: _T, most: int = 1 << 16) -> None:
        """``none``: where there is no file, or none that can be read; ``most``: bytes that it may have."""
        self._path, self._parse, self._none, self._most = str(path), parse, none, most
        self._found, self._fd, self._of = none, -1, (0, 0)

    def check(self) -> _T:
        """As it is now. Raises OSError, ValueError for one that is too long, and what ``parse`` raises: once for each
        version that cannot be read."""
        try:
            now = os.stat(self._path)  # noqa: PTH116 (called many times a minute: pathlib takes longer than the call)
        except FileNotFoundError:
            self.close()
            return self._none
        if self._fd < 0 or (now.st_dev, now.st_ino) != self._of:
            self.close()
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            held = os.fstat(self._fd)
            self._of = held.st_dev, held.st_ino
            if held.st_size > self._most:
                raise ValueError(f"it has more than {self._most} bytes")
            self._found = self._parse(os.pread(self._fd, held.st_size, 0))
        return self._found

    def read(self) -> _T:
        """The same; ``none`` instead of an error."""
        try:
            return self.check()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return self._none

    def once(self) -> _T:
        """As ``read``, and nothing is kept for another time."""
        try:
            return self.read()
        finally:
            self.close()

    def close(self) -> None:
        self._found = self._none
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
