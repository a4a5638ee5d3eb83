"""The power switch of a local node. Owns the mark that every process of a node carries in its environment, and the
power cut: all processes of the node stop at one moment, and none continues. Must never touch a process without the mark
or a marked ancestor.

The supervisor puts the mark into each agent's environment; shims, fork servers and workers inherit it. Workers are
found by their initial environment, which the kernel keeps even if they change it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from nodeagent.local.layout import LocalError
from nodeagent.osutil.linux import POWER, is_over, is_running, read_environ, stat_fields

MARK = POWER
"""Environment variable: ``<cluster uid>/<node>``."""


def mark(cluster_uid: str, node: str) -> str:
    return f"{cluster_uid}/{node}"


def unmarked(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without a mark: a cluster started from inside a worker is not part of that worker's node."""
    return {key: value for key, value in environ.items() if key != MARK}


def processes(cluster_uid: str, node: str | None = None) -> set[int]:
    """Every living process of a node (None: of the whole cluster): those that carry its mark, and their
    descendants."""
    wanted = f"{MARK}={mark(cluster_uid, node or '')}".encode()
    marked: set[int] = set()
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # gone in the meantime, or another user's and so not ours
            fields = stat_fields(pid)
            if fields is None or is_over(fields):
                continue
            children.setdefault(int(fields[1]), []).append(pid)
            for variable in read_environ(pid).split(b"\0"):
                if variable == wanted or (node is None and variable.startswith(wanted)):
                    marked.add(pid)
    waiting = list(marked)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in marked:
                marked.add(child)
                waiting.append(child)
    return marked - {os.getpid()}


def cut(cluster_uid: str, node: str | None = None, *, bound: float = 5.0) -> int:
    """Kill every process of a node (None: of the whole cluster). Returns their number once none is left.

    The processes are first stopped, until no new one appears, and then killed: as in a power cut, none sees another
    die. Raises
    LocalError ``bound`` seconds after the first SIGKILL, naming the processes that even that did not end. To find and
    stop them takes as long at most: on a busy machine that alone may take seconds.
    """
    deadline = time.monotonic() + bound
    killed: set[int] = set()
    ends_by = 0.0
    while True:
        stopped: set[int] = set()
        while new := processes(cluster_uid, node) - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
            if time.monotonic() > deadline:
                break
        _signal(stopped, signal.SIGKILL)
        ends_by = ends_by or time.monotonic() + bound
        killed |= stopped
        # A process that lost its parent and has no mark of its own cannot be found any more; it may still exist.
        left = processes(cluster_uid, node) | {pid for pid in killed if is_running(pid)}
        if not left:
            return len(killed)
        if time.monotonic() > ends_by:
            raise LocalError(
                f"not ended {bound:g} s after SIGKILL: {', '.join(map(str, sorted(left)))} "
                f"(see `ps -o pid,stat,wchan,cmd -p PID`: state D is stuck in the kernel)"
            )
        time.sleep(0.005)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
