"""Work in daemon threads: its result or its error reaches the one that waits, also one that comes late."""

from __future__ import annotations

import asyncio
import threading

import pytest

from nodeagent.osutil.threads import in_daemon


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
