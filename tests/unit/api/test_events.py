"""The audit log over HTTP: as much as was asked for, however long the log is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import events
from nodeagent.api.server import ApiServer
from nodeagent.model.node import Cordon
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec

FAN = Cordon(reason="fan", by="ann", at=1.0)


class Bench:
    """One agent's API: pages of 5 events, 10 without a limit, and a log that begins with the events of a job."""

    def __init__(self, view: FakeView, session: aiohttp.ClientSession) -> None:
        self.view, self._session = view, session

    async def fill(self, count: int) -> None:
        for number in range(count):
            await self.view.store.cordon("n1", None if number % 2 else FAN, f"c{number}")

    async def ids(self, query: str) -> list[str]:
        async with self._session.get(f"http://a/v1/events{query}") as answer:
            assert answer.status == 200, await answer.text()
            lines: list[dict[str, Any]] = [json.loads(line) for line in (await answer.text()).splitlines()]
        assert lines[-1] == {"end": True}
        return [line["id"] for line in lines[:-1]]

    async def refused(self, query: str) -> str:
        async with self._session.get(f"http://a/v1/events{query}") as answer:
            assert answer.status == 404, await answer.text()
            return str((await answer.json())["error"]["message"])

    async def all(self) -> list[str]:
        return [event.id for event in await self.view.store.events("0-0", 1000)]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(events, "PAGE", 5)
    monkeypatch.setattr(events, "DEFAULT", 10)
    view = FakeView(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec(), 1000, 1.0, "alice", "r1")
    await view.refresh()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Bench(view, session)


@pytest.mark.parametrize(("query", "newest"), [("", 10), ("?limit=12", 12), ("?limit=3", 3), ("?limit=0", 0)])
async def test_the_newest_come_in_any_number(bench: Bench, query: str, newest: int) -> None:
    await bench.fill(30)
    every = await bench.all()
    assert await bench.ids(query) == every[len(every) - newest :]


async def test_a_limit_beyond_the_whole_log_shows_it(bench: Bench) -> None:
    await bench.fill(20)
    assert await bench.ids("?limit=1000") == await bench.all()


async def test_of_a_job_the_events_that_are_older_than_a_page_are_found(bench: Bench) -> None:
    await bench.fill(20)
    own = [event.id for event in await bench.view.store.events("0-0", 1000) if event.uid == "u1"]
    assert own
    assert await bench.ids("?job=digits") == await bench.ids("?job=digits&limit=7") == own


async def test_events_of_a_deleted_job_are_found_by_its_name_and_by_its_uid(bench: Bench) -> None:
    view = bench.view
    await view.end(view.cluster().jobs["u1"], "stopped", "by alice")
    await view.store.remove("u1")
    await view.refresh()
    await bench.fill(20)
    own = [event.id for event in await view.store.events("0-0", 1000) if event.uid == "u1"]
    assert len(own) > 2
    assert await bench.ids("?job=digits") == await bench.ids("?job=u1") == own
    assert await bench.ids("?job=digits&limit=1") == own[-1:]
    assert await bench.ids(f"?job=digits&after={own[0]}") == own[1:]
    assert "digit" in await bench.refused("?job=digit")


async def test_after_the_first_place_is_all(bench: Bench) -> None:
    await bench.fill(20)
    every = await bench.all()
    assert await bench.ids("?after=0-0") == every
    assert await bench.ids("?after=0-0&limit=7") == every[:7]
    assert await bench.ids(f"?after={every[1]}&limit=17") == every[2:19]


@pytest.mark.parametrize("query", ["follow", "follow&limit=2", "follow&limit=0", "follow&job=digits"])
async def test_following_goes_on_behind_the_newest(bench: Bench, query: str) -> None:
    await bench.fill(20)
    before = await bench.ids("?" + query.replace("follow", "", 1).lstrip("&"))
    async with bench._session.get(f"http://a/v1/events?{query}") as answer:
        for one in before:
            assert json.loads(await answer.content.readline())["id"] == one
        await bench.fill(20)  # the same requests again: nothing new
        job = bench.view.job("digits")
        control = job.control.model_copy(update={"desired": "stop", "by": "ann"})
        await bench.view.store.control(job.uid, 1, control, "s", "JobStopRequested", "stop")
        assert json.loads(await answer.content.readline())["kind"] == "JobStopRequested"


async def test_a_store_that_goes_away_meanwhile_is_not_the_end_of_the_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.fill(20)
    read = bench.view.store.events

    async def last(*given: Any) -> Any:
        bench.view.store.away = True
        return await read(*given)

    monkeypatch.setattr(bench.view.store, "events", last)
    async with bench._session.get("http://a/v1/events?after=0-0") as answer:
        lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    assert len(lines) == events.PAGE and {"end": True} not in lines
