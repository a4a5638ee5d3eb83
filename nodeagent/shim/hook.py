"""One run of a hook, or of a helper: a program, its output in the pod's own log, a bound, an outcome.

Standard library only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.shim.fence import ProcessGuard
from nodeagent.shim.loop import Loop
from nodeagent.shim.output import RotatingFile, two_captures
from nodeagent.shim.processes import ShimChildren, reap, start_program, watched


@dataclass(frozen=True, slots=True)
class Supervision:
    """Who looks after a process that the shim starts."""

    loop: Loop
    guard: ProcessGuard
    """Kills it when the pod's time is over."""
    children: ShimChildren
    """Says that it has ended."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run, and how."""

    argv: Sequence[str]
    env: Mapping[str, str]
    working_dir: str
    keep: Sequence[int] = ()
    """Descriptors it inherits."""
    limits: Sequence[tuple[int, int]] = ()
    """Of its resources."""


class Hook:
    """Runs at once; ``done`` gets "" or what went wrong, exactly once."""

    def __init__(
        self,
        name: str,
        program: Program,
        timeout: float,
        log: RotatingFile,
        supervision: Supervision,
        done: Callable[[str], None],
    ) -> None:
        """``name``: how it is called when something goes wrong. ``timeout``: seconds until it is killed. Raises OSError
        if there is no process for it, and then nothing is left of it."""
        loop, guard, children = supervision.loop, supervision.guard, supervision.children
        self._name, self._timeout = name, timeout
        self._guard, self._children, self._done = guard, children, done
        self._why, self._log = "", log
        self._captures = two_captures(loop, log)
        out, err = self._captures
        try:
            self._pid = start_program(
                program.argv, program.env, program.working_dir, out.write_end, err.write_end, program.keep,
                program.limits,
            )  # fmt: skip
            pidfd = watched(self._pid)
        except OSError:
            for capture in self._captures:
                capture.started()
                capture.close()
            raise
        for capture in self._captures:
            capture.started()
        children.expect(self._pid, self._ended)
        guard.hold(self._pid, pidfd)
        self._bound = loop.after(timeout, lambda: self.kill(f"was not done after {timeout:g} s"))

    def kill(self, why: str) -> None:
        self._why = self._why or why
        self._guard.signal(self._pid, signal.SIGKILL)

    def _ended(self) -> None:
        self._bound.cancel()
        fenced = self._guard.release(self._pid)
        self._children.forget(self._pid)
        code = os.waitstatus_to_exitcode(reap(self._pid))
        for capture in self._captures:
            capture.drain()
        tail = self._captures[1].tail()
        for capture in self._captures:
            capture.close()
        self._log.close()
        # No colon: what is behind the first one is output, which not everybody may read (plan/pods/report.py).
        why = "was stopped, since nobody granted this pod time" if fenced else self._why
        if not why and code:
            why = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        self._done(f"{self._name} {why}{': ' + tail if tail else ''}" if why else "")
