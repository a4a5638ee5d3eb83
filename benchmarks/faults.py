"""The faults, and what each is measured by. The same code drives both launchers, so that a second means the same.

Each function takes a training that steps, does one thing to it, and waits until it steps again with all its ranks.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.launcher import Launcher, LaunchError
from benchmarks.steplog import Gang, NotReachedError, standstill, steps_lost
from nodeagent.shim.forkserver.pool import REFILL_AFTER

TIMEOUT = 120.0
"""Seconds for a gang to step again."""
SETTLE = (2.0, 3.0)
"""Seconds of undisturbed steps before each fault, drawn anew each time so that no timer is in step with it."""
TRIES = 5
"""Of a second kill that must come soon after the first."""
PATIENCE = 60.0
"""Seconds after which a gang that is not expected to come back is given up."""


class Trial(NamedTuple):
    """One of them: seconds, and steps that had been done and were to be done again."""

    seconds: float
    lost: int


class EndedError(Exception):
    """The launcher does not get over this fault; ``str()`` is what happened instead."""


def settle() -> None:
    time.sleep(random.uniform(*SETTLE))


def kill_worker(training: Launcher, world: int) -> Trial:
    """kill -9 of a random worker, rank 0 as likely as any. Seconds to the first step of the gang of ``world`` after
    it, which is when the last of its ranks has done one."""
    settle()
    old = training.log.newest()
    at = _kill_one(old)
    return _since(training, at, old, _next(training, old, world))


def kill_worker_again(training: Launcher, world: int) -> Trial:
    """kill -9 of a worker that has only just started: the second of two kills, so soon after the first that nothing
    can have been pre-forked in between. Those that came too late are tried again."""
    for _ in range(TRIES):
        settle()
        old = training.log.newest()
        first = _kill_one(old)
        between = training.log.wait(world, TIMEOUT, after=old.number, check=training.check, poll=0.002)
        at = _kill_one(between)
        new = _next(training, between, world)
        if at - first < REFILL_AFTER:
            return _since(training, at, between, new)
    raise EndedError("the machine is too busy for it")


def kill_worker_for_good(training: Launcher, world: int) -> Trial:
    """As ``kill_worker``, of a launcher that is not expected to get over it."""
    settle()
    old = training.log.newest()
    at = _kill_one(old)
    try:
        new = training.log.wait(world, PATIENCE, after=old.number, check=training.check)
    except LaunchError:
        raise EndedError("its job ended") from None
    except NotReachedError:
        raise EndedError(f"no step within {PATIENCE:g} s") from None
    return _since(training, at, old, new)


def hang_worker(training: Launcher, world: int) -> Trial:
    """SIGSTOP of a random worker. Seconds to the first step of the gang after it."""
    settle()
    old = training.log.newest()
    at = time.monotonic()
    os.kill(random.choice(sorted(old.pids.values())), signal.SIGSTOP)
    return _since(training, at, old, _next(training, old, world))


def kill_node(training: Launcher, full: int, left: int) -> Trial:
    """SIGKILL of everything on a random node that may die. Seconds to the first step of the ``left`` ranks that
    remain. Then the node comes back, and the gang is ``full`` again when this returns."""
    settle()
    return lose_node(training, random.choice(training.killable()), full, left)


def lose_node(training: Launcher, node: str, full: int, left: int) -> Trial:
    """As ``kill_node``, of this node."""
    old = training.log.newest()
    at = training.kill_node(node)
    new = _next(training, old, left)
    trial = _since(training, at, old, new)
    settle()
    training.start_node(node)
    _next(training, new, full)
    return trial


def kill_hosting_node(training: Launcher, node: str, left: int) -> Trial:
    """SIGKILL of everything on the node without which the launcher cannot go on."""
    settle()
    old = training.log.newest()
    at = training.kill_node(node)
    try:
        new = training.log.wait(left, PATIENCE, after=old.number, check=training.check)
    except LaunchError:
        raise EndedError("its job is dead") from None
    except NotReachedError:
        raise EndedError(f"no step within {PATIENCE:g} s") from None
    return _since(training, at, old, new)


def join_node(training: Launcher, node: str, before: int, after: int) -> Trial:
    """A further node starts. Seconds by which training stands still for it, counted by rank 0's steps. Then it is
    killed, and the gang is as it was when this returns."""
    settle()
    old = training.log.newest()
    training.start_node(node)
    new = _next(training, old, after)
    settle()
    trial = stood(training, old, new)
    training.kill_node(node)
    _next(training, new, before)
    return trial


def leave_in_order(training: Launcher, node: str, leave: Callable[[str], object], full: int, left: int) -> Trial:
    """A node is asked to leave. Seconds by which training stands still. Then it comes back."""
    settle()
    old = training.log.newest()
    leave(node)
    new = _next(training, old, left)
    settle()
    trial = stood(training, old, new)
    training.start_node(node)
    _next(training, new, full)
    return trial


def stood(training: Launcher, old: Gang, new: Gang) -> Trial:
    """What a planned change has cost: seconds by which training stood still for it."""
    gangs = training.log.gangs()
    return Trial(standstill(gangs, old, new), steps_lost(gangs, old, new))


def _kill_one(gang: Gang) -> float:
    victim = random.choice(sorted(gang.pids.values()))
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return at


def _since(training: Launcher, at: float, old: Gang, new: Gang) -> Trial:
    return Trial(new.first_step - at, steps_lost(training.log.gangs(), old, new))


def _next(training: Launcher, old: Gang, world: int) -> Gang:
    return training.log.wait(world, TIMEOUT, after=old.number, check=training.check)
