"""When the places of one generation on this node are ready: others wait for that before they start.

Standard library only. Looks at what runs; must never decide who starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from nodeagent.osutil.tcp import listening
from nodeagent.shim.gang import LocalGang
from nodeagent.shim.hook import Hook, Program
from nodeagent.shim.output import note
from nodeagent.shim.processes import own_limits
from nodeagent.shim.worker import Parts, Worker

EACH = 0.25
"""Seconds between two looks at a port."""
COMMAND_EACH, COMMAND_BOUND = 1.0, 10.0
"""Seconds between two runs of a command, and that each may take."""
MOST_ANSWER = 200
"""Characters of a command's answer that people are shown."""


class PlaceReadiness:
    """``changed`` is called when a place has become ready, or another reason why it is not is known."""

    def __init__(self, parts: Parts, gang: LocalGang, changed: Callable[[], None]) -> None:
        self._parts, self._gang, self._changed = parts, gang, changed
        self._asking: dict[str, Hook] = {}
        self._again_at: dict[str, float] = {}
        """Place to when (CLOCK_MONOTONIC) a command that found no process is tried again."""
        self._reported: set[str] = set()
        self._problems: dict[str, str] = {}
        """Place to what its command last said."""
        self._closed = self._looks = False
        self.ready: list[str] = []

    @property
    def notes(self) -> str:
        """Why places are not ready yet, as far as their commands say it."""
        return "; ".join(self._problems.values())

    def watch(self) -> None:
        """Look until all places are ready, or the generation stops."""
        self._looks = False
        if self._closed or self._gang.settled or self._gang.stopping or self._gang.refused:
            return
        before = len(self.ready)
        for name, workers in self._places().items():
            idle = name not in self._asking and time.monotonic() >= self._again_at.get(name, 0.0)
            if name not in self.ready and idle and all(w.pid for w in workers):
                self._look(name, workers)
        if len(self.ready) > before:
            self._changed()
        self._look_later()

    def again(self, name: str) -> None:
        """A worker of this place is started again: nothing that was seen of it counts any more."""
        if name in self.ready:
            self.ready.remove(name)
        self._problems.pop(name, None)
        if (hook := self._asking.pop(name, None)) is not None:
            hook.kill("asked a worker that has ended")
        self._look_later()

    def _look_later(self) -> None:
        if not self._looks and len(self.ready) < len(self._places()):
            self._looks = True
            self._parts.loop.after(EACH, self.watch)

    def close(self) -> None:
        """Its generation stops: nothing is asked any more."""
        self._closed = True
        self._problems.clear()
        for hook in self._asking.values():
            hook.kill("was stopped")

    def _places(self) -> dict[str, list[Worker]]:
        found: dict[str, list[Worker]] = {}
        for w in self._gang.workers:
            found.setdefault(w.place, []).append(w)
        return found

    def _look(self, name: str, workers: list[Worker]) -> None:
        ready: Mapping[str, Any] | None = self._parts.pod["roles"][name.rpartition(".")[0]]["ready"]
        first = workers[0]
        if ready is None or all(w.record is not None and w.record["code"] == 0 for w in workers):
            self.ready.append(name)
        elif ready["port"]:
            if _listened_on(int(self._gang.environments[first.local_rank]["NODEAGENT_PORT"])):
                self.ready.append(name)
        else:
            self._ask(name, ready["command"], self._gang.environments[first.local_rank])

    def _ask(self, name: str, command: list[str], env: Mapping[str, str]) -> None:
        pod, parts = self._parts.pod, self._parts
        log = parts.file(parts.logs / "pod.log")

        def done(problem: str) -> None:
            if self._asking.get(name) is not hook:
                return
            before = self._problems.pop(name, "")
            if not problem:
                self.ready.append(name)
                del self._asking[name]
                self._changed()
            elif self._closed:
                del self._asking[name]
            else:
                if name not in self._reported:
                    self._reported.add(name)
                    note(parts.file(parts.logs / "pod.log"), f"{problem}; it is asked again")
                parts.loop.after(COMMAND_EACH, lambda: self._asking.pop(name, None))
                self._problems[name] = " ".join(problem.split())[:MOST_ANSWER]
                if self._problems[name] != before:
                    self._changed()

        try:
            program = Program(command, env, pod["working_dir"], limits=own_limits(pod["limits"]))
            hook = self._asking[name] = Hook(f"ready {name}", program, COMMAND_BOUND, log, parts, done)
        except OSError as error:  # a full process table, say
            self._again_at[name] = time.monotonic() + COMMAND_EACH
            if name not in self._reported:
                self._reported.add(name)
                note(log, f"ready {name}: no process for it: {error.strerror}; it is asked again")


def _listened_on(port: int) -> bool:
    """Whether any socket of this network namespace listens on the port, which is this pod's alone."""
    try:
        return port in listening()
    except OSError:  # no descriptor to look with: it is looked at again
        return False
