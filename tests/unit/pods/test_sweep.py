"""One look at the processes for all pods of a user that wait for it, beside the loop; its failure is known to all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator, Set
from queue import SimpleQueue

import pytest

from nodeagent.osutil.linux import MarkedProcesses, kill_marked
from nodeagent.pods.sweep import Sweeper
from tests.processes import marked_sleep

BOUND = 20.0


class Look:
    """In the place of ``kill_marked``: remembers what it was asked, and does not come back before it may."""

    def __init__(self) -> None:
        self.asked = SimpleQueue[set[str]]()
        self.may_return = threading.Semaphore(0)
        self.error: OSError | None = None

    def __call__(self, wanted: Set[MarkedProcesses]) -> dict[MarkedProcesses, list[int]]:
        assert threading.current_thread() is not threading.main_thread()
        self.asked.put({mark for mark, _ in wanted})
        self.may_return.acquire(timeout=BOUND)
        if self.error is not None:
            raise self.error
        return {(mark, owner): [len(mark)] for mark, owner in wanted}


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the mark "one"."""
    with marked_sleep("one") as process:
        yield process
        process.kill()


async def test_what_a_pod_left_is_killed(left: subprocess.Popen[bytes]) -> None:
    sweeper, me = Sweeper(kill_marked), os.geteuid()
    async with asyncio.timeout(BOUND):
        assert await sweeper.kill("other", me) == []
        assert left.poll() is None
        assert await sweeper.kill("one", me) == [left.pid]
        await asyncio.to_thread(left.wait)
        assert await sweeper.kill("one", me) == []


async def test_pods_that_ask_while_a_look_is_under_way_share_the_next_one() -> None:
    look = Look()
    sweeper = Sweeper(look)
    first, second, third, gone = (sweeper.kill(mark, 0) for mark in ("a", "bb", "ccc", "dddd"))
    assert look.asked.get(timeout=BOUND) == {"a"}
    gone.cancel()
    look.may_return.release(2)
    async with asyncio.timeout(BOUND):
        assert [await first, await second, await third] == [[1], [2], [3]]
    assert look.asked.get(timeout=BOUND) == {"bb", "ccc"}, "nobody waits for the fourth any more"
    last = sweeper.kill("a", 0)
    look.may_return.release()
    async with asyncio.timeout(BOUND):
        assert await last == [1]


async def test_a_user_whose_process_hangs_holds_up_nobody_elses_pod() -> None:
    look = Look()
    sweeper = Sweeper(look)
    hangs = sweeper.kill("a", 1001)
    assert look.asked.get(timeout=BOUND) == {"a"}
    other = sweeper.kill("bb", 1002)
    assert look.asked.get(timeout=BOUND) == {"bb"}, "while the first look is under way"
    assert not hangs.done()
    look.may_return.release(2)
    async with asyncio.timeout(BOUND):
        assert [await hangs, await other] == [[1], [2]]


async def test_a_look_that_fails_fails_for_all_that_shared_it_and_for_nobody_else() -> None:
    look = Look()
    look.error = OSError("too many open files")
    sweeper = Sweeper(look)
    first, second = sweeper.kill("a", 0), sweeper.kill("bb", 0)
    first.cancel()
    look.may_return.release(2)
    async with asyncio.timeout(BOUND):
        with pytest.raises(OSError, match="too many open files"):
            await second
        look.error = None
        look.may_return.release()
        assert await sweeper.kill("a", 0) == [1]


async def test_without_a_thread_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    sweeper = Sweeper(kill_marked)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        with pytest.raises(OSError, match="can't start new thread"):
            await sweeper.kill("one", os.geteuid())
    async with asyncio.timeout(BOUND):
        assert await sweeper.kill("one", os.geteuid()) == []
