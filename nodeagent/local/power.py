"""The power switch of a local node. Owns the mark that every process of a node carries in its environment, and the
power cut: all processes of the node stop at one moment, and none continues. Must never touch a process without the mark
or a marked ancestor.

The supervisor puts the mark into each agent's environment; shims, fork servers and workers inherit it. Workers are
found by their initial environment, which the kernel keeps even if they change it. To read that may take for ever, as
its user can see to. So it is read of the own user's processes only (root's cluster has jobs of other users: of all), of
none below one that was found, and in a thread that is left behind where it hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from nodeagent.local.layout import LocalError
from nodeagent.osutil.linux import POWER, is_over, is_running, pids, read_environ, stat_fields, user

MARK = POWER
"""Environment variable: ``<cluster uid>/<node>``."""


def mark(cluster_uid: str, node: str) -> str:
    return f"{cluster_uid}/{node}"


def unmarked(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without a mark: a cluster started from inside a worker is not part of that worker's node."""
    return {key: value for key, value in environ.items() if key != MARK}


HELD = 2.0
"""Seconds after which an environment counts as one that somebody holds."""
MOST_HELD = 4
"""So many of them are waited for at a time; what is left then is not read."""


def processes(cluster_uid: str, node: str | None = None) -> set[int]:
    """As ``Search.processes``, once."""
    return Search(cluster_uid, node).processes()


class Search:
    """For all of one node (None: of the whole cluster), again and again: what hangs is waited for once."""

    def __init__(self, cluster_uid: str, node: str | None) -> None:
        self._mark = f"{MARK}={mark(cluster_uid, node or '')}".encode()
        self._whole = node is None
        self._held: dict[bool, dict[int, threading.Thread]] = {True: {}, False: {}}
        """Processes whose environment has not come yet: own ones, and those of others."""

    def processes(self) -> set[int]:
        """Every living process of it: those that carry its mark, and their descendants. One whose environment is held,
        and that has no such ancestor, is not found."""
        children = _family()
        living = {pid for some in children.values() for pid in some}
        found: set[int] = set()
        level = [pid for parent, some in children.items() if parent not in living for pid in some]
        while level:
            marked = self._carriers(level)
            found |= set(_below(marked, children))
            level = [child for pid in level if pid not in marked for child in children.pop(pid, ())]
        return found - {os.getpid()}

    def _carriers(self, some: Iterable[int]) -> set[int]:
        """Those that carry the mark."""
        found: set[int] = set()
        for mine, group in _by_owner(some).items():
            held = self._held[mine] = {pid: reader for pid, reader in self._held[mine].items() if reader.is_alive()}
            left = [pid for pid in group if pid not in held]
            waiting = iter(left)
            while left and len(held) < MOST_HELD:
                reading = [0]
                reader = threading.Thread(target=self._read, args=(waiting, reading, found), daemon=True)
                try:
                    reader.start()
                except RuntimeError:  # no thread to be had
                    if mine:
                        self._read(waiting, reading, found)
                    break
                before = -1
                while reader.is_alive() and before != reading[0]:
                    before = reading[0]
                    reader.join(HELD)
                if not reader.is_alive():
                    break
                held[before] = reader
        return set(found)  # a reader that was left may still come back

    def _read(self, waiting: Iterator[int], reading: list[int], found: set[int]) -> None:
        for pid in waiting:
            reading[0] = pid
            with contextlib.suppress(OSError):  # gone in the meantime, or another user's and so not ours
                variables = read_environ(pid).split(b"\0")
                if any(one == self._mark or (self._whole and one.startswith(self._mark)) for one in variables):
                    found.add(pid)


def _family() -> dict[int, list[int]]:
    """Of all that live, by their parents."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        with contextlib.suppress(OSError):  # gone in the meantime
            fields = stat_fields(pid)
            if fields is not None and not is_over(fields):
                children.setdefault(int(fields[1]), []).append(pid)
    return children


def _by_owner(some: Iterable[int]) -> dict[bool, list[int]]:
    """Own processes (True), which no other user is to keep from being read; and, if this is root, those of others."""
    mine, others = list[int](), list[int]()
    for pid in some:
        with contextlib.suppress(OSError):  # gone in the meantime
            (mine if user(pid) == os.geteuid() else others).append(pid)
    return {True: mine, False: others if os.geteuid() == 0 else []}


def _below(roots: Iterable[int], children: Mapping[int, list[int]]) -> Iterator[int]:
    """These, and all below them."""
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        yield (pid := waiting.pop())
        new = [child for child in children.get(pid, ()) if child not in seen]
        seen.update(new)
        waiting += new


def cut(cluster_uid: str, node: str | None = None, *, bound: float = 5.0) -> int:
    """Kill every process of a node (None: of the whole cluster). Returns their number once none is left.

    The processes are first stopped, until no new one appears, and then killed: as in a power cut, none sees another
    die. Raises
    LocalError ``bound`` seconds after the first SIGKILL, naming the processes that even that did not end. To find and
    stop them takes as long at most: on a busy machine that alone may take seconds.
    """
    deadline = time.monotonic() + bound
    search = Search(cluster_uid, node)
    killed: set[int] = set()
    ends_by = 0.0
    while True:
        stopped: set[int] = set()
        while new := search.processes() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
            if time.monotonic() > deadline:
                break
        _signal(stopped, signal.SIGKILL)
        ends_by = ends_by or time.monotonic() + bound
        killed |= stopped
        # A process that lost its parent and has no mark of its own cannot be found any more; it may still exist.
        left = search.processes() | {pid for pid in killed if is_running(pid)}
        if not left:
            return len(killed)
        if time.monotonic() > ends_by:
            raise LocalError(
                f"not ended {bound:g} s after SIGKILL: {', '.join(map(str, sorted(left)))} "
                f"(see `ps -o pid,stat,wchan,comm -p PID`: state D is stuck in the kernel)"
            )
        time.sleep(0.005)


def _signal(some: set[int], number: signal.Signals) -> None:
    for pid in some:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
