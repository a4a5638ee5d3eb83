"""What a path does not have is refused, in the query and in the body: a misspelt name would be as if it had not been
given."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yarl

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api.errors import ApiError
from nodeagent.api.requests import MOST_OPENED, find_job, written
from nodeagent.api.server import ApiServer
from nodeagent.model.jobspec import Array
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec
from tests.unit.plan.build import make_cluster, make_job, make_spec


@asynccontextmanager
async def served(folder: Path, *jobs: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the API of one node."""
    view = FakeView(folder, ("n1",))
    await view.join()
    for name in jobs:
        await submit_one(view.store, f"u-{name}", spec(name), os.getuid(), 1.0, "alice", f"r-{name}")
    await view.refresh()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield session


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/v1/nodes?limt=5", "did you mean limit?"),
        ("/v1/nodes?limit=5&limit=6", ""),
        ("/v1/history?after=x&size=3", "it has: after, limit"),
        ("/v1/jobs?limit=5", "it has: none"),
        ("/v1/doctor?peer", "did you mean peers?"),
        ("/v1/events?folow=1", "did you mean follow?"),
        ("/v1/usage?group=user", "it has: by, since, until"),
        ("/v1/jobs?local_only=1", ""),
        ("/v1/status?now=1", "it has: none"),
    ],
)
async def test_unknown_query_parameters(tmp_path: Path, path: str, step: str) -> None:
    async with served(tmp_path) as session, session.get(f"http://agent{path}") as answer:
        error = (await answer.json()).get("error", {})
    assert (answer.status, error.get("next", "")) == ((400 if step else 200), step), error


@pytest.mark.parametrize(
    ("method", "path", "field", "step"),
    [
        ("POST", "/v1/jobs", "dryrun", "did you mean dry_run?"),
        ("POST", "/v1/jobs/a/scale", "timout", "did you mean timeout?"),
        ("POST", "/v1/jobs/a/scaleout", "target", "it has: count, timeout, request_id"),
        ("POST", "/v1/jobs/a/scalein", "node", "did you mean nodes?"),
        ("POST", "/v1/jobs/a/stop", "grace", "it has: request_id"),
        ("DELETE", "/v1/jobs/a", "now", "it has: request_id"),
        ("POST", "/v1/jobs/a/restart", "r" * 100, "it has: request_id"),
        ("POST", "/v1/arrays/a/stop", "grace", "it has: request_id"),
        ("POST", "/v1/nodes/n1/drain", "reasn", "did you mean reason?"),
        ("POST", "/v1/nodes/n1/cordon", "drain", "it has: reason, request_id"),
        ("POST", "/v1/nodes/n1/uncordon", "reason", "it has: request_id"),
        ("POST", "/v1/nodes/n1/forget", "force", "it has: request_id"),
        ("POST", "/v1/nodes/n1/health/ack", "gpus", "did you mean gpu?"),
        ("POST", "/v1/nodes/n1/health/inject", "rule", "it has: xid, gpu, request_id"),
        ("POST", "/v1/nodes/n1/diag", "force", "it has: gpu, busy, request_id"),
        ("POST", "/v1/queues/q/create", "weight", "it has: settings, dry_run, request_id"),
        ("POST", "/v1/queues/q/set", "setting", "did you mean settings?"),
        ("POST", "/v1/queues/q/close", "why", "it has: dry_run, request_id"),
        ("DELETE", "/v1/queues/q", "force", "it has: dry_run, request_id"),
        ("PUT", "/v1/queues", "queue", "did you mean queues?"),
        ("POST", "/v1/windows", "start", "did you mean starts?"),
        ("DELETE", "/v1/windows/w1", "force", "it has: request_id"),
    ],
)
async def test_unknown_fields_of_a_body(tmp_path: Path, method: str, path: str, field: str, step: str) -> None:
    async with served(tmp_path) as session:
        asked = {"request_id": "r1", field: 1}
        async with session.request(method, f"http://agent{path}", json=asked) as answer:
            error = (await answer.json())["error"]
    problem = f"the body has the unknown field {field[:64]!r}"
    assert (answer.status, error["message"], error["next"]) == (400, problem, step)


async def test_unknown_fields_of_a_job_in_a_batch(tmp_path: Path) -> None:
    spec = make_spec().model_dump(mode="json", exclude={"submitter"})
    jobs = [{"spec": spec, "aftr": {"b": "ok"}}]
    body = {"request_id": "r1", "submitter": {"uid": 0, "gid": 0, "name": "root"}, "jobs": jobs}
    async with served(tmp_path) as session, session.post("http://agent/v1/jobs", json=body) as answer:
        error = (await answer.json())["error"]
    assert (error["message"], error["next"]) == ("a job has the unknown field 'aftr'", "did you mean after?")


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/v1/nodes?limit={DIGITS}", ""),
        ("GET", "/v1/nodes?limit=%D9%A3", ""),
        ("GET", "/v1/jobs/mine/logs?tail=100000000000000000000", ""),
        ("GET", f"/v1/jobs/mine/logs?generation={DIGITS}", ""),
        ("GET", f"/v1/events?limit={DIGITS}", ""),
        ("POST", "/v1/windows", f'{{"request_id": "r", "nodes": ["n1"], "seconds": 60, "starts": 1{"0" * 400}}}'),
        ("POST", "/v1/windows", f'{{"request_id": "r", "nodes": ["n1"], "starts": 1, "seconds": 1{"0" * 400}}}'),
        ("POST", "/v1/jobs/mine/scale", f'{{"request_id": "r", "target": 1, "timeout": 1{"0" * 400}}}'),
        ("POST", "/v1/nodes/n1/cordon", f'{{"request_id": "r", "reason": {DIGITS}}}'),
    ],
)
async def test_numbers_that_are_too_large(tmp_path: Path, method: str, path: str, body: str) -> None:
    """They are mistakes of whoever asks, not of the agent."""
    url = yarl.URL(f"http://agent{path}", encoded=True)
    async with served(tmp_path, "mine") as session, session.request(method, url, data=body) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (400, "usage"), error


@pytest.mark.parametrize(
    "path",
    [
        "events?after=99999999999999999999", "events?after=1-99999999999999999999", "events?after=%D9%A3",
        "events?after=18446744073709551615-18446744073709551615", "events?after=1-", "events?after=1%0A",
        "history?after=e%20x", "history?after=1e%20x", "history?after=1.2.3%20x", "history?after=%2B%20x",
        "history?after=%D9%A3%20x", "history?after=1%20x%0A",
    ],
)  # fmt: skip
async def test_places_that_the_store_cannot_read(tmp_path: Path, path: str) -> None:
    """The store would refuse them, as if it were broken itself."""
    url = yarl.URL(f"http://agent/v1/{path}", encoded=True)
    async with served(tmp_path) as session, session.get(url) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (400, "usage"), error


@pytest.mark.parametrize(
    "path",
    ["events?after=18446744073709551615", "events?after=1-18446744073709551615", "history?after=-1.5e%2B300%20x"],
)
async def test_places_that_the_store_can_read(tmp_path: Path, path: str) -> None:
    url = yarl.URL(f"http://agent/v1/{path}", encoded=True)
    async with served(tmp_path) as session, session.get(url) as answer:
        assert answer.status == 200


def test_a_live_array_goes_before_an_ended_job_of_its_name() -> None:
    array = Array(id="a1", name="sweep", index=0, first=0, last=3, count=4, at_once=0)
    member = make_job("running", uid="u-0", spec=make_spec(name="sweep.0").model_copy(update={"array": array}))
    ended = make_job("failed", uid="u-old", spec=make_spec(name="sweep"))
    with pytest.raises(ApiError, match="'sweep' is an array with live jobs, and the name of an ended job") as raised:
        find_job(make_cluster(["n1"], member, ended), "sweep")
    assert (raised.value.code, raised.value.next_step) == ("not_found", "the ended job is found by its uid: u-old")
    over = member.model_copy(update={"phase": "succeeded"})
    assert find_job(make_cluster(["n1"], over, ended), "sweep") == ended
    live = ended.model_copy(update={"phase": "queued"})
    assert find_job(make_cluster(["n1"], member, live), "sweep") == live


async def test_a_body_of_more_lists_than_a_request_has_is_not_decoded(tmp_path: Path) -> None:
    async with served(tmp_path) as session:
        for data in (b"[" + b"[]," * MOST_OPENED + b"[]]", b'{"spec": {"preload": [' + b"{}," * MOST_OPENED):
            async with session.post("http://agent/v1/jobs", data=data) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["message"].endswith(f"more than {MOST_OPENED}")) == (400, True), error


async def test_however_many_lists_are_written_few_threads_compete_with_the_loop() -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def write() -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        return 7

    assert await asyncio.gather(*(written(write) for _ in range(32))) == [7] * 32
    assert most <= 2
