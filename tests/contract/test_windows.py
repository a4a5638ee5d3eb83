"""The record of the maintenance windows: written whole, read by all, and given back to a store that lost it."""

from __future__ import annotations

import pytest

from nodeagent.model.window import Window, Windows, WindowsRecord
from nodeagent.store.base import StoreUnavailableError
from tests.contract.bench import Bench, refused
from tests.contract.test_queues import found_out
from tests.contract.test_restore import read, read_after, rejoin


def windows(*names: str) -> Windows:
    found = (
        Window(id=name, nodes=("n[1-8]",), start=1000, end=2000, starts=1.0, ends=2.0, why='"disk"', by="ann", text="x")
        for name in names
    )
    return Windows(by="ann", windows=tuple(found))


async def write(bench: Bench, rev: int, *names: str, request: str = "") -> WindowsRecord:
    return await bench.store.windows(rev, windows(*names), request or f"q{rev}", "n1 is reserved")


async def names(bench: Bench) -> list[str]:
    reply = await bench.beat("n1")
    assert reply.windows is not None
    return [window.id for window in reply.windows.windows.windows]


async def test_they_are_written_whole_and_come_with_the_next_beat(bench: Bench) -> None:
    await bench.up("n1")
    before = await bench.beat("n1")
    assert before.windows is None
    record = await write(bench, 0, "w1", "w2")
    assert record.windows == windows("w1", "w2").model_copy(update={"rev": 1})
    reply = await bench.beat("n1", rev=before.rev, era=before.era)
    assert (reply.windows, reply.unread, reply.queues) == (record, (), None)
    assert reply.rev == record.rev == reply.asked
    assert (await bench.beat("n1", rev=reply.rev, era=reply.era)).windows is None
    assert (await bench.kinds()).count("WindowsChanged") == 1


async def test_only_who_has_read_the_newest_may_write(bench: Bench) -> None:
    await bench.up("n1")
    await write(bench, 0, "w1")
    await write(bench, 1, "w1", "w2")
    text = await refused("stale", write(bench, 1, "w3", request="other"))
    assert text == "the maintenance windows have revision 2 by now, not 1"
    assert await names(bench) == ["w1", "w2"]


async def test_the_same_request_changes_nothing(bench: Bench) -> None:
    await bench.up("n1")
    first = await write(bench, 0, "w1", request="r")
    assert await write(bench, 0, "w2", request="r") == first
    assert (await bench.kinds()).count("WindowsChanged") == 1


async def test_an_emptied_store_is_given_them_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await write(bench, 0, "w1")
    old = await read(bench)
    record = await write(bench, 1, "w1", "w2")
    new = await read(bench)
    await bench.put_back(None)
    for view in (new, old):
        await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).reply.windows == record
    assert (await write(bench, 2, "w3")).windows.rev == 3


async def test_who_comes_late_brings_them_where_nobody_had_them(bench: Bench) -> None:
    await bench.up("n1", "n2")
    before = await read(bench)
    await write(bench, 0, "w1")
    after = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(before.offer())
    await rejoin(bench, "n1", "n2")
    await bench.recovered("n1")
    assert (await bench.beat("n1")).windows is None
    await bench.store.restore(after.offer())
    assert await names(bench) == ["w1"]


@pytest.mark.parametrize("damage", ["removed", "of another type"])
async def test_a_damaged_record_is_noticed_and_given_back(bench: Bench, damage: str) -> None:
    await bench.up("n1", "n2", "n3")
    record = await write(bench, 0, "w1")
    view = await read(bench)
    if damage == "removed":
        await bench.take("windows")
        assert "damaged windows" in await found_out(bench, view)
    else:
        await bench.spoil("windows")
        with pytest.raises(StoreUnavailableError):  # the step failed, and what it stumbled over is looked for
            await write(bench, 1, "w2")
        await found_out(bench, view)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    assert (await read_after(bench)).reply.windows == record
