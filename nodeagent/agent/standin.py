"""The planned end of an agent (SIGTERM). Where somebody counts on it, a copy of its process goes on as before, as its
stand-in, until the next start takes its place; so a restart may take its time, and nothing of the protocol changes.

Owns the split of the process, and how long a stand-in waits. Must never be there beside another agent of the node: the
next start kills it before it joins (``identity.py``).
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from nodeagent.agent.clock import Clock
from nodeagent.agent.loop import Agent
from nodeagent.workers.linux import die_with_parent, power_mark

T = TypeVar("T")

HOLD = 2.0
"""Seconds for which a stand-in holds the next start off at a time."""
PARENT_TIMEOUT = 5.0
"""Seconds for the first process to end: it has nothing left to do."""


async def end_as_planned(
    agent: Agent,
    *,
    split: Callable[[], Awaitable[int]],
    awaited: Callable[[], bool],
    hold_off: Callable[[float], None],
    clock: Clock,
) -> None:
    """Returns when nobody counts on this agent any more and its lease was given back; a stand-in that is replaced does
    not live to see it. ``split`` makes the stand-in and returns its pid, in it; ``awaited``: the next start is under
    way; ``hold_off``: it is to wait until then (our clock) at least."""
    log = structlog.get_logger("standin").bind(node=agent.node)
    why, patience = agent.missed(), agent.config.stand_in
    if why:
        try:
            pid = await split()
        except OSError as error:
            log.error("no stand-in: the next start has only what is left of the fence", why=str(error))
            return
        agent.stands_in(pid)
        log.info("takes over until the next start", pid=pid, because=why, at_most=patience)
        since = clock.now()
        while agent.missed():
            if not agent.settled:  # it may be the only one that knows what the store has lost
                hold_off(clock.now() + HOLD)
            if awaited():
                since = clock.now()
            if clock.now() - since > patience:
                log.warning("nobody came to take over: stops the workers and leaves", waited=patience)
                break
            await asyncio.sleep(agent.config.timing.heartbeat / 2)
    await agent.leave()


class Split:
    """Runs a coroutine that may ask, once, to go on in a copy of the process while the first one ends.

    The loop does not run while the process is copied: what waits on it is the copy's alone afterwards.
    """

    def __init__(self) -> None:
        self._wanted, self._done = asyncio.Event(), asyncio.Event()
        self._tell: Callable[[int], None] = lambda _pid: None
        self._error: OSError | None = None

    async def __call__(self, tell: Callable[[int], None]) -> int:
        """Returns in the copy, with its pid, once the first process has ended. ``tell`` is called in the first one with
        that pid. Raises OSError, in the first one, if there can be none."""
        self._tell = tell
        self._wanted.set()
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return os.getpid()

    def run(self, main: Coroutine[object, object, T]) -> T:
        """As ``asyncio.run``."""
        with asyncio.Runner() as runner:
            task = runner.get_loop().create_task(main)
            runner.run(self._until_wanted(task))
            if not task.done():
                self._fork()
                runner.get_loop().set_default_executor(ThreadPoolExecutor())  # threads are not copied
                self._done.set()
                runner.run(_ended(task))
            return task.result()

    async def _until_wanted(self, task: asyncio.Task[T]) -> None:
        wanted = asyncio.ensure_future(self._wanted.wait())
        await asyncio.wait({task, wanted}, return_when=asyncio.FIRST_COMPLETED)
        wanted.cancel()

    def _fork(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        first = os.pidfd_open(os.getpid())
        try:
            pid = os.fork()
        except OSError as error:
            self._error = error
            os.close(first)
            return
        if pid:
            try:
                self._tell(pid)
            finally:
                os._exit(0)  # without a word to what the two share: it is the copy's now
        ended = select.poll()
        ended.register(first, select.POLLIN)
        ended.poll(PARENT_TIMEOUT * 1000)
        os.close(first)
        if power_mark():
            die_with_parent(os.getppid())  # a local cluster ends with its supervisor


async def _ended(task: asyncio.Task[T]) -> None:
    await asyncio.wait({task})
