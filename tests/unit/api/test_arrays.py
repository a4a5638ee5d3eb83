"""An array is ended as one, whatever becomes of its members meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.view import AgentView
from nodeagent.api.requests import find_any_job
from nodeagent.api.server import ApiServer
from nodeagent.model.job import JobRecord
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, asked, spec


class RacingView(FakeView):
    """Before the first change of a member something happens to the next two, which the view learns of only if
    ``looks``."""

    looks = False

    async def join(self) -> None:
        await super().join()
        await submit_one(self.store, "u0", spec("other"), 1000, 1.0, "alice", "r-other")
        await self.refresh()
        control = self.store.control

        async def late(uid: str, *rest: Any) -> JobRecord:
            self.store.__dict__.pop("control")
            ended, gone = self.job("sweep-1"), self.job("sweep-2")
            await self.end(ended, "failed", "it failed")
            await self.end(gone, "stopped", "stopped")
            await self.store.remove(gone.uid)
            if self.looks:
                await self.refresh()
            return await control(uid, *rest)

        self.store.__dict__["control"] = late


class Bench:
    """The agent's API, with an array of four."""

    def __init__(self, view: RacingView, session: aiohttp.ClientSession) -> None:
        self.view, self._session = view, session

    async def submit(self, name: str) -> None:
        """An array of four with this name."""
        body = asked(spec(name)) | {"request_id": f"submit-{name}"}
        body["jobs"][0]["array"] = "0-3"
        status, answer = await self.post(body)
        assert status == 201, answer

    async def post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self._session.post("http://a/v1/jobs", json=body) as answer:
            return answer.status, await answer.json()

    async def end(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        async with self._session.request(method, f"http://a/v1/arrays/{path}", json={"request_id": "end"}) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    view = RacingView(tmp_path)
    await view.join()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            made = Bench(view, session)
            await made.submit("sweep")
            yield made


@pytest.mark.parametrize("looks", [False, True])
async def test_members_that_end_or_go_meanwhile_keep_no_other_from_being_stopped(bench: Bench, looks: bool) -> None:
    bench.view.looks = looks
    status, answer = await bench.end("POST", "sweep/stop")
    assert status == 200, answer
    assert [job["name"] for job in answer["jobs"]] == ["sweep-0", "sweep-3"]
    wanted = {job.name: job.control.desired for job in bench.view.cluster().jobs.values()}
    assert wanted == {"other": "run", "sweep-0": "stop", "sweep-1": "run", "sweep-3": "stop"}


@pytest.mark.parametrize("looks", [False, True])
async def test_all_members_that_there_still_are_are_deleted(bench: Bench, looks: bool) -> None:
    bench.view.looks = looks
    status, answer = await bench.end("DELETE", "sweep")
    assert status == 200, answer
    assert [job["name"] for job in answer["jobs"]] == ["sweep-0", "sweep-1", "sweep-3"]
    deleted = {job.name: job.control.delete for job in bench.view.cluster().jobs.values()}
    assert deleted == {"other": False, "sweep-0": True, "sweep-1": True, "sweep-3": True}


async def test_the_id_of_an_array_is_not_the_name_of_another(bench: Bench) -> None:
    array = next(job.spec.array for job in bench.view.cluster().jobs.values() if job.spec.array is not None)
    await bench.submit(array.id)
    status, answer = await bench.end("DELETE", array.id)
    assert (status, answer["id"]) == (200, array.id)
    deleted = {job.name for job in bench.view.cluster().jobs.values() if job.control.delete}
    assert deleted == {"sweep-0", "sweep-1", "sweep-3"}


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoreRefusedError("recovering", "it waits"), 503), (StoreUnavailableError("no answer"), 503)],
)
async def test_whatever_else_the_store_refuses_is_answered(bench: Bench, error: Exception, code: int) -> None:
    async def refuse(*_: Any) -> JobRecord:
        raise error

    bench.view.store.__dict__["control"] = refuse
    assert (await bench.end("POST", "sweep/stop"))[0] == code


async def test_a_name_that_many_jobs_come_after_is_looked_for_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    async def find(view: AgentView, ref: str) -> JobRecord:
        looks.append(ref)
        return await find_any_job(view, ref)

    monkeypatch.setattr("nodeagent.api.submit.find_any_job", find)
    body = asked(*(spec(f"b{i}") for i in range(5))) | {"request_id": "many"}
    for row in body["jobs"]:
        row["after"] = {"sweep-0": "any", "other": "ok"}
    status, answer = await bench.post(body)
    assert status == 201, answer
    assert sorted(looks) == ["other", "sweep-0"]
    assert [len(bench.view.job(f"b{i}").spec.after) for i in range(5)] == [2] * 5


async def test_a_name_of_two_arrays_means_the_callers_own(bench: Bench) -> None:
    """Another user's array took its name once all its jobs had ended: their owner could delete and name it no more."""
    view = bench.view
    for i in range(4):
        await view.end(view.job(f"sweep-{i}"), "stopped", "stopped")
    mine = view.job("sweep-0").spec.array
    assert mine is not None
    array = mine.model_copy(update={"id": "array-other", "index": 100})
    await submit_one(view.store, "x", spec("sweep-100", array=array), 7, 1.0, "mallory", "r-x")
    await view.refresh()
    status, answer = await bench.end("GET", "sweep")
    assert (status, answer["id"]) == (200, mine.id)
    body = asked(spec("b")) | {"request_id": "after"}
    body["jobs"][0]["after"] = {"sweep": "any"}
    status, answer = await bench.post(body)
    assert status == 201, answer
    assert [after.uid for after in view.job("b").spec.after] == [mine.id]
    status, answer = await bench.end("DELETE", "sweep")
    assert status == 200, answer
    assert [job["name"] for job in answer["jobs"]] == [f"sweep-{i}" for i in range(4)]
