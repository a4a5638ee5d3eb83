"""Work in daemon threads: its result or its error reaches the one that waits, also one that comes late."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
from weakref import WeakSet, ref

import pytest

from nodeagent.osutil.threads import MOST, WAITING, DaemonPool, Newest, in_daemon


async def test_the_result_and_the_error_reach_the_one_that_waits() -> None:
    assert await in_daemon(lambda: threading.current_thread().daemon, "works") is True
    with pytest.raises(ZeroDivisionError):
        await in_daemon(lambda: 1 // 0, "fails")


async def test_what_is_not_waited_for_any_more_is_still_under_way() -> None:
    goes = threading.Event()
    done = in_daemon(lambda: goes.wait(30), "hangs")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.shield(done)
    assert not done.done()
    goes.set()
    assert await done is True


def test_while_a_write_hangs_only_the_newest_waits_for_it() -> None:
    goes, begun, ended = threading.Event(), threading.Event(), threading.Event()
    written = list[str]()

    def write(text: str) -> None:
        written.append(text)
        begun.set()
        assert goes.wait(30)
        if text == "c":
            ended.set()

    newest = Newest(write, "writes")
    newest.put("a")
    assert begun.wait(30)
    newest.put("b")
    newest.put("c")
    assert written == ["a"]
    goes.set()
    assert ended.wait(30)
    assert written == ["a", "c"]


def test_a_write_that_failed_is_followed_by_the_next() -> None:
    written = threading.Event()
    newest = Newest(lambda text: written.set() if text == "b" else int(text), "fails")
    caught = list[type[BaseException]]()
    before, threading.excepthook = threading.excepthook, lambda hook: caught.append(hook.exc_type)
    try:
        newest.put("a")
        for thread in threading.enumerate():
            if thread.name == "fails":
                thread.join(30)
        newest.put("b")
        assert written.wait(30)
    finally:
        threading.excepthook = before
    assert caught == [ValueError]


def test_an_end_after_that_of_the_loop_is_no_error(recwarn: pytest.WarningsRecorder) -> None:
    goes = threading.Event()

    async def begin() -> None:
        in_daemon(lambda: goes.wait(30), "late")

    asyncio.run(begin())
    (late,) = [thread for thread in threading.enumerate() if thread.name == "late"]
    goes.set()
    late.join(30)
    assert not late.is_alive()
    assert not recwarn.list


async def test_a_pool_uses_a_thread_again_and_brings_errors() -> None:
    asyncio.get_running_loop().set_default_executor(DaemonPool())
    names = {await asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"pool-1"}
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(lambda: 1 // 0)


async def test_a_pool_has_so_many_threads_and_the_rest_waits_its_turn() -> None:
    asyncio.get_running_loop().set_default_executor(DaemonPool())
    goes, begun = threading.Event(), threading.Semaphore(0)

    def work() -> str:
        begun.release()
        goes.wait(30)
        return threading.current_thread().name

    calls = [asyncio.ensure_future(asyncio.to_thread(work)) for _ in range(MOST + 3)]
    await in_daemon(lambda: [begun.acquire(timeout=30) for _ in range(MOST)], "counts")
    assert not begun.acquire(blocking=False)
    goes.set()
    assert len(set(await asyncio.gather(*calls))) == MOST


class Work:
    """Is known to be kept for as long as somebody keeps it."""

    def run(self) -> bool:
        return True


async def test_calls_that_were_given_up_do_not_pile_up_before_a_pool_that_hangs() -> None:
    pool, goes = DaemonPool(1), threading.Event()
    kept = WeakSet[Work]()

    def begin() -> concurrent.futures.Future[bool]:
        work = Work()
        kept.add(work)
        return pool.submit(work.run)

    hung = pool.submit(goes.wait, 30)
    first, *others = [begin() for _ in range(10 * WAITING)]
    for one in others:
        one.cancel()
    last = begin()
    assert len(kept) <= WAITING
    goes.set()
    assert [await asyncio.wrap_future(one) for one in (hung, first, last)] == [True, True, True]


def test_neither_the_loop_nor_the_process_waits_for_what_hangs_in_a_pool() -> None:
    script = (
        "import asyncio, threading\n"
        "from nodeagent.osutil.threads import DaemonPool\n"
        "async def main():\n"
        "    asyncio.get_running_loop().set_default_executor(DaemonPool())\n"
        "    asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.to_thread(int)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


class Result:
    """What a work brings."""


async def test_a_thread_that_has_nothing_to_do_keeps_no_result() -> None:
    found = await asyncio.get_running_loop().run_in_executor(DaemonPool(1), Result)
    kept = ref(found)
    del found
    for _ in range(300):
        if kept() is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the thread that made it still has it")
