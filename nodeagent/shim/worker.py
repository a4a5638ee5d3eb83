"""One worker of one generation on this node: what is known of it, and what it shares with all workers of its pod.

Standard library only. Must never act on a worker: it is started by ``launch.py``, asked to stop by ``grace.py``, reaped
by ``exits.py``, and started again by ``restarts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent.shim.container import Containers
from nodeagent.shim.forkserver.client import ForkServer
from nodeagent.shim.hook import Supervision
from nodeagent.shim.loop import Delay
from nodeagent.shim.output import Capture, RotatingFile
from nodeagent.shim.record import Farewell

LOOK_AGAIN = 0.2
"""Seconds until the next look at a worker that could not be looked at."""


class Worker:
    """One rank of one generation on this node. Without a ``pid`` it has not been forked yet."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        error_file: Path,
        log: RotatingFile,
        captures: tuple[Capture, Capture],
        place: str = "",
    ) -> None:
        """``place``: ``trainer.0``; empty in a job of one role."""
        self.rank, self.local_rank, self.place = rank, local_rank, place
        self.error_file, self.log, self.captures = error_file, log, captures
        self.pid, self.pidfd = 0, -1
        self.by_fork_server = False
        self.held = False
        """Other roles have to be ready before it starts."""
        self.ended = self.stopped = self.fenced = False
        self.runtime_failure = ""
        """Why its container could not be started."""
        self.order = 0
        """Among the ends of its generation on this node."""
        self.until: float | None = None
        """When (monotonic) its grace ends, once it was asked to stop."""
        self.leave: Callable[[float], None] | None = None
        """Asks it to leave by itself within so many seconds, which it wants to be instead of a SIGTERM."""
        self.farewell = Farewell()
        self.record: dict[str, Any] | None = None
        """How it ended, once that is known and it is not to be started again."""
        self.failed: dict[str, Any] | None = None
        """How it ended, if it is to be started again."""
        self.again: Delay | None = None
        """It is started again alone when this is over."""
        self.along = False
        """Another worker of its place, or of its role on some node, has failed: it is killed, if it has not ended by
        itself, and started again with that one."""
        self.step: int | None = None
        self.doing = ""
        """Its progress as last reported."""
        self.stepped: float | None = None
        """When (CLOCK_BOOTTIME) it reported its first step."""

    @property
    def role(self) -> str:
        """``trainer`` of the place ``trainer.0``; empty in a job of one role."""
        return self.place.rpartition(".")[0]

    @property
    def lives(self) -> bool:
        """It was forked, and nobody has seen its end."""
        return self.pid != 0 and not self.ended

    @property
    def reaped(self) -> bool:
        """How it ended is known."""
        return self.record is not None or self.failed is not None

    def state(self) -> dict[str, Any]:
        """As model.pod.WorkerState."""
        r = self.record
        code = None if r is None else r["code"] if r["code"] is not None else 128 + r["signal"]
        state = "exited" if r is not None else "running" if self.pid else "starting"
        reported = {"rank": self.rank, "local_rank": self.local_rank, "pid": self.pid or None}
        return reported | {"state": state, "exit": code, "step": self.step, "doing": self.doing}

    def close(self) -> None:
        """Nothing of it is written any more."""
        for capture in self.captures:
            capture.close()
        self.log.close()


@dataclass(frozen=True, slots=True)
class Parts(Supervision):
    """What every generation of one pod shares."""

    fork_server: ForkServer
    containers: Containers | None
    """None: the workers see the node's own file system."""
    pod: Mapping[str, Any]
    state: Path
    logs: Path
    changed: Callable[[], None]
    launched: Callable[[], None]
    """A worker's pid is known, or will never be."""
    file: Callable[[Path], RotatingFile]
    unready: Callable[[str], None]
    """A worker of this place is started again: the place is not ready before it is looked at again."""
    taken: Callable[[], str]
    """Which port that its workers were to bind somebody else has, in words (``rendezvous.taken``)."""
    anew: Callable[[int], None]
    """A worker of this rank is started again: what the one before reported of itself is not the new one's.
    Raises OSError."""

    def process(self, w: Worker) -> int:
        """Of a worker that has been started: the process of its own command, in its container if it has one. Raises
        OSError if there is no descriptor or memory to look."""
        return w.pid if self.containers is None else self.containers.process(w.pid, w.local_rank)
