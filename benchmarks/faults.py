"""The faults, and what each is measured by. The same code drives both launchers, so that a second means the same.

Each function takes a training that steps, does one thing to it, and waits until it steps again with all its ranks.
"""

from __future__ import annotations

import os
import random
import signal
import time

from benchmarks.launcher import Launcher
from benchmarks.steplog import Gang, standstill

TIMEOUT = 120.0
"""Seconds for a gang to step again."""
SETTLE = (2.0, 3.0)
"""Seconds of undisturbed steps before each fault, drawn anew each time so that no timer is in step with it."""


def settle() -> None:
    time.sleep(random.uniform(*SETTLE))


def kill_worker(training: Launcher, world: int) -> float:
    """kill -9 of a random worker, rank 0 as likely as any. Seconds to the first step of the gang of ``world`` after
    it, which is when the last of its ranks has done one."""
    settle()
    old = training.log.newest()
    victim = random.choice(sorted(old.pids.values()))
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return _next(training, old, world).first_step - at


def kill_node(training: Launcher, full: int, left: int) -> float:
    """SIGKILL of everything on a random node that may die. Seconds to the first step of the ``left`` ranks that
    remain. Then the node comes back, and the gang is ``full`` again when this returns."""
    settle()
    old = training.log.newest()
    node = random.choice(training.killable())
    at = training.kill_node(node)
    new = _next(training, old, left)
    settle()
    training.start_node(node)
    _next(training, new, full)
    return new.first_step - at


def join_node(training: Launcher, node: str, before: int, after: int) -> float:
    """A further node starts. Seconds by which training stands still for it, counted by rank 0's steps. Then it is
    killed, and the gang is as it was when this returns."""
    settle()
    old = training.log.newest()
    training.start_node(node)
    new = _next(training, old, after)
    settle()
    stood = standstill(training.log.gangs(), old, new)
    training.kill_node(node)
    _next(training, new, before)
    return stood


def _next(training: Launcher, old: Gang, world: int) -> Gang:
    return training.log.wait(world, TIMEOUT, after=old.number, check=training.check)
