"""Steps per second of two trainings on a noisy machine: both are up; in turns, one steps while the other is frozen.

Whatever else the machine does then strikes both alike, since a turn is shorter than most disturbances. All processes
of the frozen one stop, its launcher or agents and store too, so that neither pays for the other's upkeep; a turn is
well below nodeagent's fence, so that its agents notice nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Iterator

from benchmarks.launcher import Launcher
from benchmarks.steplog import steps_per_second

TURN = 0.7
"""Seconds."""
SETTLE = 0.1
"""Seconds after a thaw that are not counted."""


def in_turns(one: Launcher, other: Launcher, turns: int) -> tuple[list[float], list[float]]:
    """Steps per second in each turn: ``turns`` of ``one``, each between two of the ``turns + 1`` of ``other``."""
    spans: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    with _frozen(one), _frozen(other):
        for turn in range(2 * turns + 1):
            training = other if turn % 2 == 0 else one
            _signal(training, signal.SIGCONT)
            start = time.monotonic() + SETTLE
            time.sleep(TURN)
            spans[turn % 2].append((start, time.monotonic()))
            _stop(training)
    return _rates(one, spans[1]), _rates(other, spans[0])


def ratios(one: list[float], other: list[float]) -> list[float]:
    """Each turn of ``one`` over the mean of the turns of ``other`` before and after it."""
    return [rate / statistics.mean(other[turn : turn + 2]) for turn, rate in enumerate(one)]


def _rates(training: Launcher, spans: list[tuple[float, float]]) -> list[float]:
    gang = training.log.newest()
    return [steps_per_second(gang, start, end) for start, end in spans]


@contextlib.contextmanager
def _frozen(training: Launcher) -> Iterator[None]:
    _stop(training)
    try:
        yield
    finally:
        _signal(training, signal.SIGCONT)


def _stop(training: Launcher) -> None:
    stopped: set[int] = set()
    while new := training.processes() - stopped:  # what one of them has just started
        _send(new, signal.SIGSTOP)
        stopped |= new


def _signal(training: Launcher, number: signal.Signals) -> None:
    _send(training.processes(), number)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
