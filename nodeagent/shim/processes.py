"""Processes as the shim starts, reaps and ends them: a plain start (fork, own session, tied to the shim's life, exec),
its children, and all that runs below it.

A shim is a subreaper, so all that its pod ever started is below it: a process that leaves its session, or whose parent
has ended, becomes the shim's child. Standard library only: the watchdog imports it. Must never hold a policy (when to
kill, and whom to spare, is the caller's decision), nor reap a child that somebody waits for: its handler does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from nodeagent.osutil.linux import (
    allow_tracer,
    die_with_parent,
    is_running,
    own_children,
    pidfd_ended,
    pids,
    prefer_no_more,
    prefer_session,
    read_children,
    short,
    stat_fields,
)

RLIMITS: dict[str, int] = {
    name.removeprefix("RLIMIT_").lower(): getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}
"""``nofile``, ``memlock``, ...: all that this system knows."""


USUAL_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""How many descriptors this process was to have, and all programs that it starts."""
SHIM_FILES = 65536
"""Descriptors that a shim has at the most. Each worker takes three, and four more while it starts."""


def open_more_files() -> None:
    """Let this process have more descriptors than is usual (1024): a pod may have hundreds of workers."""
    soft, hard = USUAL_FILES
    most = SHIM_FILES if hard == resource.RLIM_INFINITY else min(hard, SHIM_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit_value(value: int | str) -> int:
    return resource.RLIM_INFINITY if value == "infinity" else int(value)


def own_limits(limits: Mapping[str, int | str]) -> list[tuple[int, int]]:
    """A job's limits as (number, value), for its own processes only: a shim that had them could not end what runs."""
    return [(RLIMITS[name], limit_value(value)) for name, value in limits.items() if name in RLIMITS]


def start_program(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    out: int,
    err: int,
    keep: Sequence[int] = (),
    limits: Sequence[tuple[int, int]] = (),
    first: Callable[[], None] = lambda: None,
) -> int:
    """Run a program, found as a shell in ``cwd`` with this environment would find it, in a new session with /dev/null
    as input; returns its pid. What goes wrong after the fork is written to ``err`` with exit code 126 or 127, as a
    shell does. ``keep``: descriptors it inherits under their numbers. ``limits``: as of ``own_limits``. ``first``: what
    the child does before it is the program."""

    def program() -> None:
        first()
        enter(cwd)
        for fd in keep:
            os.set_inheritable(fd, True)
        resource.setrlimit(resource.RLIMIT_NOFILE, USUAL_FILES)
        for number, value in limits:
            resource.setrlimit(number, (value, value))
        os.execvpe(argv[0], list(argv), dict(env))

    return start_function(program, out, err, argv[0])


UNENTERED = "nodeagent: cannot enter working_dir "
"""How the text begins that a worker leaves in whose folder nobody can work; ``forkserver/server.py`` writes it, too."""


def enter(folder: str) -> None:
    """Make it this process' working folder. Ends the process with code 126 and a sentence if that fails."""
    try:
        os.chdir(folder)
    except OSError as error:
        os.write(2, f"{UNENTERED}{folder}: {error.strerror}\n".encode())
        os._exit(126)


def start_function(body: Callable[[], None], out: int, err: int, what: str, *, preferred: bool = False) -> int:
    """Run ``body`` in a forked child with the same care as a program; it ends with code 0 when ``body`` returns.
    ``preferred``: at the shim's own priority, not at the usual one."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 126
    try:
        os.setsid()
        die_with_parent(parent)
        allow_tracer(parent)
        _default_signals()
        if preferred:
            prefer_session(os.getpid())
        else:
            prefer_no_more()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        body()
        code = 0
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"nodeagent: cannot run {what}: {error.strerror}\n".encode())
    except Exception as error:  # noqa: BLE001 (the process ends here, and is not to end without a word)
        os.write(2, f"nodeagent: cannot run {what}: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _default_signals() -> None:
    """As a login's process has them: nothing ignored, nothing blocked."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class ShimChildren:
    """Children by pid; unknown ones are orphans of the pod's processes."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], None]] = {}
        self.changed: Callable[[int, bool], None] | None = None
        """Called with each child that is expected (True), or no longer is (False)."""

    def expected(self) -> list[int]:
        """Those that somebody waits for."""
        return list(self._handlers)

    def expect(self, pid: int, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the child is a zombie; it must reap it and ``forget`` it."""
        self._handlers[pid] = ended
        if self.changed is not None:
            self.changed(pid, True)

    def forget(self, pid: int) -> None:
        if self._handlers.pop(pid, None) is not None and self.changed is not None:
            self.changed(pid, False)

    def collect(self) -> None:
        """After SIGCHLD: hand every zombie to its handler, reap orphans."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            handler = self._handlers.get(found.si_pid)
            if handler is None:
                os.waitpid(found.si_pid, 0)
            else:
                handler()

    def orphans(self) -> list[int]:
        """Living processes that workers left behind."""
        return [pid for pid in own_children() if pid not in self._handlers and is_running(pid)]

    def kill_orphans(self) -> list[int]:
        """SIGKILL what workers left behind, and all below it. What these start meanwhile become orphans in turn."""
        return kill_below(os.getpid(), self._handlers)


def watched(pid: int) -> int:
    """A pidfd of a child that has just been started. Raises OSError, and then has killed it: what cannot be watched may
    not run. Nobody has reaped it, so it is that one."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        raise


def is_reaped_elsewhere(pid: int) -> bool:
    """Whether somebody has reaped this process, which has ended: nobody can learn its status any more. Raises OSError
    if there is no descriptor or memory to look."""
    return (stat_fields(pid) or [""])[0] != "Z"


def kill_session(session: int) -> None:
    """SIGKILL what is below the shim in this session, whose leader has ended and is not reaped yet. Raises OSError if
    there is no descriptor or memory to look."""
    for pid, _ in below(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                stat = stat_fields(pid)  # after the pidfd pinned it: the number may have been reused
                if stat and int(stat[3]) == session:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def reap(pid: int) -> int:
    """Wait status of a child that has ended."""
    return os.waitpid(pid, 0)[1]


MOST = 1 << 16
"""Processes that one look takes in; the next look finds the others."""


def children_of(pid: int) -> list[int]:
    """Children of all of its threads, zombies included. Raises OSError if there is no descriptor or memory to look."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (names only, and half the price)
    except OSError as error:
        if short(error):
            raise
        return []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):  # noqa: PTH110 (a kernel without CONFIG_PROC_CHILDREN)
        return [other for other in pids() if parent_of(other) == pid]
    return [child for thread in threads for child in read_children(pid, thread)]


def parent_of(pid: int) -> int:
    """Its parent's pid; 0 if there is no such process. Raises OSError if there is no descriptor or memory to look."""
    stat = stat_fields(pid)
    return int(stat[1]) if stat else 0


def below(root: int, spared: Container[int] = ()) -> Iterator[tuple[int, int]]:
    """(pid, parent) of all below ``root`` but the spared ones and what is below those, parents first."""
    waiting, seen = [root], {root}
    while waiting and len(seen) < MOST:
        parent = waiting.pop(0)
        for pid in children_of(parent):
            if pid not in seen and pid not in spared:
                seen.add(pid)
                waiting.append(pid)
                yield pid, parent


def users_below(root: int) -> set[int]:
    """Users (uids) of this process and of all below ``root``: a container's processes may be others' than the shim.
    Raises OSError if there is no descriptor or memory to look."""
    found = {os.getuid()}
    for pid, _ in below(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.add(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116 (half the price)
    return found


def kill_below(root: int, spared: Container[int] = ()) -> list[int]:
    """SIGKILL what is below ``root`` now; returns what was found alive. Call it until nothing is: what a dying process
    started meanwhile has become a child of the subreaper above it. Raises OSError if there is no descriptor or memory
    to look: there may be others."""
    found = []
    for pid, parent in below(root, spared):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                stat = stat_fields(pid)  # after the pidfd pinned it: the number may have been reused
                if stat and int(stat[1]) in (parent, root) and not pidfd_ended(pidfd):
                    found.append(pid)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
    return found
