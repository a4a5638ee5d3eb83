"""A request id is for one change: another one is refused and nothing is done, the same again is answered as before."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api.once import as_asked, once
from nodeagent.api.server import ApiServer
from nodeagent.model.jobspec import Submission
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, asked, spec

Json = dict[str, Any]
Change = tuple[str, str, Json]


class Bench:
    """One agent's API, asked over its socket, with a job and a queue."""

    def __init__(self, view: FakeView, session: aiohttp.ClientSession) -> None:
        self.view, self._session = view, session

    async def ask(self, change: Change, request: str) -> tuple[int, Json]:
        """The answer, with its status."""
        method, path, body = change
        async with self._session.request(method, f"http://a/v1/{path}", json={"request_id": request} | body) as answer:
            return answer.status, await answer.json()

    async def state(self) -> Json:
        """All that a change can change."""
        await self.view.refresh()
        cluster = self.view.cluster()
        return {
            "jobs": {job.name: job.control for job in cluster.jobs.values()},
            "cordons": {node.id: node.cordon for node in cluster.nodes.values()},
            "queues": cluster.queues,
            "windows": cluster.windows,
            "events": await self.view.store.events("0-0", 1000),
        }


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    view = FakeView(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec("digits", target=2), 1000, 1.0, "alice", "r-digits")
    await view.refresh()
    await view.obey()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            bench = Bench(view, session)
            assert (await bench.ask(("POST", "queues/team/create", {}), "team"))[0] == 200
            assert (await bench.ask(window("n2"), "window"))[0] == 200
            yield bench


def window(node: str, **more: object) -> Change:
    return "POST", "windows", {"nodes": [node], "starts": time.time() + 30 * 86_400.0, "seconds": 60.0} | more


def submit(*names: str, **more: object) -> Change:
    return "POST", "jobs", asked(*(spec(name).model_copy(update=more) for name in names))


REASON = {"reason": "disk"}
CHANGES: dict[str, Change] = {
    "cordon": ("POST", "nodes/n1/cordon", REASON),
    "uncordon": ("POST", "nodes/n1/uncordon", {}),
    "drain": ("POST", "nodes/n1/drain", REASON),
    "pause": ("POST", "jobs/digits/pause", {}),
    "restart": ("POST", "jobs/digits/restart", {}),
    "stop": ("POST", "jobs/digits/stop", {}),
    "delete": ("DELETE", "jobs/digits", {}),
    "scale": ("POST", "jobs/digits/scale", {"target": 1}),
    "submit": submit("other"),
    "submit-two": submit("one", "two"),
    "queue-create": ("POST", "queues/more/create", {"settings": ["weight=2"]}),
    "queue-set": ("POST", "queues/team/set", {"settings": ["weight=3"]}),
    "queue-close": ("POST", "queues/team/close", {}),
    "queue-delete": ("DELETE", "queues/team", {}),
    "queue-apply": ("PUT", "queues", {"queues": [{"name": "only"}]}),
    "reserve": window("n1"),
    "reserve-delete": ("DELETE", "windows/w1", {}),
}


@pytest.mark.parametrize("verb", CHANGES)
async def test_the_request_id_of_another_change_is_refused(bench: Bench, verb: str) -> None:
    """Of each other node, job or queue too, which the first one was not about."""
    assert (await bench.ask(("POST", "nodes/n3/cordon", REASON), "taken"))[0] == 200
    before = await bench.state()
    status, answer = await bench.ask(CHANGES[verb], "taken")
    assert (status, answer["error"]["code"]) == (409, "state")
    assert (
        answer["error"]["message"] == "the request id 'taken' was used for another change before; nothing was changed"
    )
    assert await bench.state() == before
    status, _ = await bench.ask(CHANGES[verb], "new")
    assert status in (200, 201)
    assert verb == "uncordon" or await bench.state() != before, "with an id of its own it is done"


@pytest.mark.parametrize("verb", CHANGES)
async def test_the_same_again_is_answered_and_does_nothing(bench: Bench, verb: str) -> None:
    status, first = await bench.ask(CHANGES[verb], "same")
    before = await bench.state()
    again, answer = await bench.ask(CHANGES[verb], "same")
    assert again == status in (200, 201)
    for key in ("uid", "name", "jobs"):
        assert answer.get(key) == first.get(key)
    assert answer.get("changed") in (None, False)
    assert await bench.state() == before


SIMILAR: list[tuple[Change, Change]] = [
    (("POST", "nodes/n1/cordon", REASON), ("POST", "nodes/n1/cordon", {"reason": "fan"})),
    (("POST", "nodes/n1/cordon", REASON), ("POST", "nodes/n1/drain", REASON)),
    (("POST", "nodes/n1/cordon", REASON), ("POST", "nodes/n2/cordon", REASON)),
    (("POST", "jobs/digits/pause", {}), ("POST", "jobs/digits/resume", {})),
    (submit("other"), submit("other", priority=7)),
    (submit("other"), submit("another")),
    (submit("one", "two"), submit("one", "three")),
    (
        ("POST", "queues/team/set", {"settings": ["weight=2"]}),
        ("POST", "queues/team/set", {"settings": ["weight=3"]}),
    ),
    (window("n1"), window("n1", seconds=90.0)),
]


@pytest.mark.parametrize(("one", "other"), SIMILAR)
async def test_what_differs_in_anything_is_another_change(bench: Bench, one: Change, other: Change) -> None:
    assert (await bench.ask(one, "same"))[0] in (200, 201)
    before = await bench.state()
    assert (await bench.ask(other, "same"))[0] == 409
    assert await bench.state() == before


async def test_a_repeated_pause_does_not_undo_a_resume(bench: Bench) -> None:
    await bench.ask(CHANGES["pause"], "first")
    await bench.ask(("POST", "jobs/digits/resume", {}), "second")
    status, answer = await bench.ask(CHANGES["pause"], "first")
    assert (status, answer["changed"], answer["repeated"], answer["desired"]) == (200, False, True, "run")


async def test_what_was_so_already_is_remembered_too(bench: Bench) -> None:
    await bench.ask(CHANGES["pause"], "first")
    assert (await bench.ask(CHANGES["pause"], "again"))[1]["changed"] is False
    await bench.ask(("POST", "jobs/digits/resume", {}), "second")
    assert (await bench.ask(CHANGES["pause"], "again"))[1]["desired"] == "run"
    assert (await bench.ask(CHANGES["stop"], "again"))[0] == 409


async def test_of_a_job_that_is_gone_the_request_is_not_answered_with_another(bench: Bench) -> None:
    _, first = await bench.ask(submit("other"), "same")
    await bench.ask(("DELETE", "jobs/other", {}), "delete")
    await bench.view.obey()
    await bench.view.obey()
    assert first["jobs"][0]["uid"] not in bench.view.cluster().jobs
    status, answer = await bench.ask(submit("other"), "same")
    assert (status, answer["error"]["next"]) == (404, "submit anew, with another request id")
    assert answer["error"]["message"] == "this request was carried out before, and the job is not there any more"


async def test_of_several_jobs_one_that_is_there_is_enough_for_the_same_answer(bench: Bench) -> None:
    status, first = await bench.ask(submit("one", "two"), "same")
    for name in ("one", "two"):
        again, answer = await bench.ask(submit("one", "two"), "same")
        assert (again, answer["jobs"]) == (status, first["jobs"]), f"{name} is there"
        await bench.view.end(bench.view.job(name), "stopped", "by hand")
        await bench.view.store.remove(bench.view.job(name).uid)
    again, answer = await bench.ask(submit("one", "two"), "same")
    assert (again, answer["error"]["message"].endswith("and the jobs are not there any more")) == (404, True), answer


async def test_who_stops_an_array_under_a_used_id_is_refused(bench: Bench) -> None:
    method, path, body = submit("sweep")
    body["jobs"][0]["array"] = "0-1"
    assert (await bench.ask((method, path, body), "array"))[0] == 201
    before = await bench.state()
    assert (await bench.ask(("POST", "arrays/sweep/stop", {}), "array"))[0] == 409
    assert await bench.state() == before


def test_which_change_it_is_has_one_word_of_a_bounded_length() -> None:
    long = once("r", "submit", "x" * 1_000_000)
    assert (len(long.change), " " in long.did()) == (len("submit:") + 32, False)
    assert once("r", "cordon", "n1", "") != once("r", "cordon", "n", "1")


def test_a_job_is_the_same_from_elsewhere_and_a_moment_later() -> None:
    one = spec("digits")
    elsewhere = one.submitter.model_copy(update={"cwd": "/tmp", "host": "n9"})

    def of(array: str = "", **changes: object) -> dict[str, object]:
        return as_asked(Submission(one.model_copy(update=changes), array=array))

    assert of() == of(submitter=elsewhere, begin=5.0)
    assert of() != of(priority=7)
    assert of() != of(array="0-3")
