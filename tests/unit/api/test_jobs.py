"""The list of jobs: what of it is made beside the agent's loop, and how long the rest may hold the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import jobs, serializers
from nodeagent.api.server import ApiServer
from nodeagent.plan.cluster import Cluster, Notes, Refusal
from nodeagent.plan.queueing.queue import places
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec

MANY = 30


class Turning(FakeView):
    """Notes in which turn of the loop each reason was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.turn = 0
        self.turns: list[int] = []

    def why(self, uid: str) -> tuple[str, ...]:
        self.turns.append(self.turn)
        return super().why(uid)

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


@pytest.fixture
async def view(tmp_path: Path) -> Turning:
    view = Turning(tmp_path)
    await view.join()
    view.reasons = ("2 nodes are wanted",)
    for i in range(MANY):
        await submit_one(view.store, f"u{i}", spec(f"j{i}"), 1000, 1.0, "alice", f"r{i}")
    await view.refresh()
    return view


@asynccontextmanager
async def counted(view: Turning) -> AsyncIterator[aiohttp.ClientSession]:
    """A caller, while the loop's turns are counted."""
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession("http://agent", connector=connector) as session:
            counting = asyncio.create_task(view.count())
            try:
                yield session
            finally:
                counting.cancel()


async def test_rows_are_built_beside_the_loop_and_what_is_kept_with_a_view_is_asked_for_in_it(
    view: Turning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand jobs stopped every recovery of the node for as long; and a thread beside it loses what is kept."""
    loop, building, planning = threading.get_ident(), set[int](), set[int]()
    build, keep = serializers.job_json, Notes.once

    def built(*given: Any) -> Any:
        building.add(threading.get_ident())
        return build(*given)

    def kept(*given: Any) -> Any:
        planning.add(threading.get_ident())
        return keep(*given)

    monkeypatch.setattr(jobs, "job_json", built)
    monkeypatch.setattr(Notes, "once", kept)
    async with counted(view) as session, session.get("/v1/jobs") as answer:
        rows = (await answer.json())["items"]
    assert len(building) == 1 and loop not in building
    assert planning == {loop}
    assert [row["name"] for row in rows] == [f"j{i}" for i in range(MANY)]
    assert rows[4]["queue"] == {"place": 5, "of": MANY}
    assert rows[4]["reason"] == f"2 nodes are wanted; number 5 of {MANY} in the queue"


async def test_the_loop_goes_on_while_many_jobs_are_asked_why_they_wait(
    view: Turning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are lined up once: by a later turn what is kept may belong to a newer view."""
    lined_up = list[Cluster]()

    def line_up(cluster: Cluster) -> Mapping[str, int]:
        lined_up.append(cluster)
        return places(cluster)

    monkeypatch.setattr(jobs, "places", line_up)
    monkeypatch.setattr(jobs, "SLICE", -1.0)  # each job takes longer
    async with counted(view) as session, session.get("/v1/jobs") as answer:
        assert len((await answer.json())["items"]) == MANY
    assert (len(set(view.turns)), len(lined_up)) == (MANY, 1)


async def test_the_list_and_the_detail_say_the_same_of_a_job(view: Turning) -> None:
    await view.form(view.job("j0"), 2)
    await view.refresh()
    view.away_since, view.lent = 1.0, {"u0": 2.0}
    async with counted(view) as session:
        listed = (await (await session.get("/v1/jobs")).json())["items"][:2]
        details = [await (await session.get(f"/v1/jobs/{row['uid']}")).json() for row in listed]
    same = [[{k: v for k, v in one.items() if k != "age"} for one in rows] for rows in (listed, details)]
    assert same[0] == [{key: one[key] for key in shown} for one, shown in zip(same[1], same[0], strict=True)]
    assert listed[0]["lent"]["state"] == "stopped" and listed[1]["lent"] is None


async def test_the_detail_says_whether_the_record_is_refused(view: Turning) -> None:
    view._cluster = replace(view.cluster(), refused={"u0": Refusal("ended", "it has ended before", False)})
    async with counted(view) as session:
        details = [await (await session.get(f"/v1/jobs/j{n}")).json() for n in (0, 1)]
    assert [(one["refused"], "ended" in one["reason"]) for one in details] == [(True, True), (False, False)]
