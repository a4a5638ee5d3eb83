"""The newest part of the audit log: read once, then only what is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.api.jobdetail import EVENTS, AuditTail
from nodeagent.model.job import JobEvent
from tests.unit.api.fakes import FakeView, FlakyStore


class Counted(FlakyStore):
    """Counts the events that it gives out."""

    given = 0

    async def events(self, after: str, limit: int, before: str = "") -> tuple[JobEvent, ...]:
        found = await super().events(after, limit, before)
        self.given += len(found)
        return found


@pytest.fixture
def view(tmp_path: Path) -> FakeView:
    made = FakeView(tmp_path)
    made.store = Counted(made.server)
    return made


def write(view: FakeView, count: int, first: int = 0) -> list[str]:
    texts = [f"event {n}" for n in range(first, first + count)]
    for text in texts:
        view.server.run("event({ kind = 'Note', text = A.text })", text=text)
    return texts


async def read(tail: AuditTail) -> list[str]:
    found = await tail.read()
    assert found is not None
    return [event.text for event in found]


async def test_an_event_is_read_once(view: FakeView) -> None:
    tail, texts = AuditTail(view), write(view, 50)
    assert await read(tail) == texts
    assert await read(tail) == texts
    texts += write(view, 3, first=50)
    assert await read(tail) == texts
    assert isinstance(view.store, Counted)
    assert view.store.given == 53


async def test_it_reaches_back_so_far_however_long_nobody_asked(view: FakeView) -> None:
    tail = AuditTail(view)
    write(view, 10)
    await tail.read()
    texts = write(view, EVENTS + 500, first=10)
    assert await read(tail) == texts[-EVENTS:]


async def test_another_history_is_read_anew(view: FakeView) -> None:
    tail = AuditTail(view)
    await view.join()
    write(view, 5)
    assert len(await read(tail)) > 5
    view.server.restart(keep_data=False)
    await view.join()
    texts = write(view, 1)
    assert (await read(tail))[-1:] == texts
    assert "event 4" not in await read(tail)


async def test_a_store_that_is_away_is_asked_once(view: FakeView) -> None:
    tail = AuditTail(view)
    write(view, 5)
    view.store.away = True
    assert await tail.read() is None
    view.store.away = False
    assert len(await read(tail)) == 5
