"""Starts workers: in their containers, forked from a warm interpreter, or as plain programs.

Standard library only. Decides neither who is started nor when. Must never let a process run that nobody can watch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nodeagent.shim.forkserver.binding import bind
from nodeagent.shim.output import RotatingFile, two_captures
from nodeagent.shim.processes import own_limits, start_program, watched
from nodeagent.shim.worker import Parts, Worker


class Launcher:
    """Of one generation. ``launched`` is called once for each worker that was to be launched, when its pid is known, or
    with the reason why it has none."""

    def __init__(
        self,
        parts: Parts,
        number: int,
        environments: Sequence[dict[str, str]],
        launched: Callable[[Worker, str], None],
    ) -> None:
        """``number``: the generation's. ``environments``: by local rank."""
        self._parts, self._number, self._environments = parts, number, environments
        self._done = launched
        self._under_way = 0

    @property
    def forking(self) -> bool:
        """Some workers may run already, with pids that are not known yet."""
        return self._under_way > 0

    def create(self, rank: int, local_rank: int, place: str) -> Worker:
        """One that has not been forked yet. Raises OSError."""
        log = self._parts.file(self._parts.logs / f"g{self._number}" / f"rank{rank}.log")
        error_file = self._parts.state / "errors" / f"g{self._number}-r{rank}.json"
        return self._created(rank, local_rank, place, error_file, log)

    def successor(self, w: Worker) -> Worker:
        """One for the same rank, with the same log, that has not been forked yet. Raises OSError."""
        return self._created(w.rank, w.local_rank, w.place, w.error_file, w.log)

    def _created(self, rank: int, local_rank: int, place: str, error_file: Path, log: RotatingFile) -> Worker:
        error_file.unlink(missing_ok=True)
        return Worker(rank, local_rank, error_file, log, two_captures(self._parts.loop, log), place)

    def launch(self, workers: Sequence[Worker]) -> None:
        """All of them at once."""
        self._under_way += len(workers)
        for w in workers:
            self._begin(w, self._environments[w.local_rank] | {"TORCHELASTIC_ERROR_FILE": str(w.error_file)})
            for capture in w.captures:
                capture.started()
        self._parts.changed()

    def _begin(self, w: Worker, env: dict[str, str]) -> None:
        parts, pod, cwd = self._parts, self._parts.pod, self._parts.pod["working_dir"]
        command = pod["roles"][w.role]["command"] if w.place else pod["command"]
        out, err = w.captures
        limits: Sequence[tuple[int, int]] = own_limits(pod["limits"])
        if parts.containers is not None:
            try:
                command, env = parts.containers.start(command, env, w.local_rank)
            except OSError as error:  # something that cannot be removed has its pidfile's name
                self._launched(w, 0, f"container: {error}")
                return
            limits = parts.containers.limits(limits)
        elif parts.fork_server.takes(command, env):
            w.by_fork_server = True
            parts.fork_server.fork(
                command,
                env,
                cwd,
                limits,
                (out.write_end, err.write_end),
                lambda pid, error: self._launched(w, pid, error),
            )
            return
        try:
            pid = start_program(command, env, cwd, out.write_end, err.write_end, limits=limits, first=lambda: bind(env))
        except OSError as error:
            self._launched(w, 0, f"fork: {error.strerror}")
        else:
            self._launched(w, pid, "")

    def _launched(self, w: Worker, pid: int, error: str) -> None:
        self._under_way -= 1
        if pid:
            try:
                w.pidfd = watched(pid)
            except OSError as problem:
                pid, error = 0, f"it cannot be watched: {problem.strerror}"
        w.pid = pid
        self._done(w, error)
