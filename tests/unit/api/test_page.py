"""The status page's server side: who may look where, what the answer holds and never holds, what looking costs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import loopback, status
from nodeagent.api.errors import error_middleware
from nodeagent.api.loopback import guest_middleware
from nodeagent.api.server import ApiServer
from nodeagent.api.status import MAX_ENDED, PATH, SETTLED, Stories, shown
from nodeagent.model.job import BudgetEntry, JobEvent
from nodeagent.model.jobspec import Nodes
from nodeagent.model.world import Cause
from nodeagent.osutil.tcp import SocketAddress, user_of
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, FlakyStore, spec, spec_of_roles

Owner = Callable[[SocketAddress, SocketAddress], int | None]


async def fetched(server: ApiServer, path: str, **headers: str) -> tuple[int, Any, Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(server.http_url + path) as reply,
    ):
        body = await reply.read()
        return reply.status, reply.headers, json.loads(body) if "json" in reply.content_type else body.decode()


async def running(folder: Path) -> FakeView:
    """A job that was hit once, with a secret in its spec and in its last words."""
    view = FakeView(folder)
    await view.join()
    job = spec("digits", env={"WORD": "s3cret"})
    await submit_one(view.store, "u1", job, 1000, time.time(), "alice", "r1")
    await view.refresh()
    await view.form(view.job("digits"), 2)
    await view.refresh()
    fault = BudgetEntry(
        at=view.cluster().served, wall=time.time(), kind="worker_failed", counts=True, node="n1", rank=0,
        text="rank 0 on n1 failed first", error="Traceback: s3cret",
    )  # fmt: skip
    await view.form(view.job("digits"), 2, Cause(kind="worker_failed", text="rank 0 on n1 failed first"), fault)
    await view.refresh()
    return view


@pytest.mark.parametrize("path", loopback.FILES)
async def test_every_file_is_served_with_headers_that_let_nothing_else_in(tmp_path: Path, path: str) -> None:
    async with ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server:
        status, headers, body = await fetched(server, path)
        assert (status, headers["Content-Type"]) == (200, f"{loopback.FILES[path][1]}; charset=utf-8")
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == (
            "'none'",
            "'self'",
            "'none'",
        )
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "innerHTML" not in body and "http://" not in body.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in body


def test_all_files_are_named_and_small() -> None:
    files = {file.name: file.stat().st_size for file in loopback.FOLDER.iterdir()}
    assert set(files) == {name for name, _ in loopback.FILES.values()}
    assert sum(files.values()) < 64_000


async def test_the_status_of_a_job_with_a_fault(tmp_path: Path) -> None:
    async with ApiServer(await running(tmp_path), MetricsPage(Metrics())) as server:
        status, headers, reported = await fetched(server, PATH)
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    (job,) = reported["jobs"]
    assert (job["name"], job["phase"], job["generation"], job["restarts"]) == ("digits", "running", 2, 1)
    assert (job["budget"]["used"], job["all_known"], job["downtime"]) == (
        1,
        True,
        job["generations"][1]["downtime"],
    )
    assert 0 <= job["goodput"] <= 1
    first, second = job["generations"]
    assert (first["ended_by"]["kind"], second["cause"]) == ("worker_failed", "rank 0 on n1 failed first")
    assert abs(second["active"] - time.time()) < 60
    assert [node["name"] for node in reported["nodes"]] == ["n1", "n2", "n3"]
    assert reported["nodes"][1]["pods"][0]["ranks"] == [2, 3]


async def test_the_status_of_a_job_of_roles(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec_of_roles(), 1000, time.time(), "alice", "r1")
    await view.refresh()
    await view.form(view.job("ctr"), 2)
    await view.refresh()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        _, _, reported = await fetched(server, PATH)
    assert reported["jobs"][0]["roles"] == {"server": {"target": 2, "places": 2}, "trainer": {"target": 2, "places": 2}}
    assert reported["nodes"][1]["pods"][0]["places"] == ["server.1", "trainer.1"]


async def test_the_status_of_a_job_that_borrows_nodes(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    role = spec().role.model_copy(update={"nodes": Nodes(min=1, max=3, target=1, auto=True)})
    job = spec("digits").model_copy(update={"roles": (role,)})
    await submit_one(view.store, "u1", job, 1000, time.time(), "alice", "r1")
    await view.refresh()
    await view.form(view.job("digits"), 3)
    await view.refresh()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        _, _, reported = await fetched(server, PATH)
    (row,) = reported["jobs"]
    assert (row["world_nodes"], row["target"], row["borrowed"]) == (3, 1, 2)


async def test_what_could_be_secret_is_not_in_it(tmp_path: Path) -> None:
    async with ApiServer(await running(tmp_path), MetricsPage(Metrics())) as server:
        _, _, reported = await fetched(server, PATH)
    text = json.dumps(reported)
    assert "digits" in text
    assert "s3cret" not in text and "train.py" not in text


async def test_an_agent_that_has_not_joined_says_so(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    view.joined = False
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        status, _, reported = await fetched(server, PATH)
    assert (status, reported["error"]["code"]) == (503, "not_joined")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST:8080", "[::1]:9470"])
async def test_names_of_loopback_are_answered(tmp_path: Path, name: str) -> None:
    async with ApiServer(await running(tmp_path), MetricsPage(Metrics())) as server:
        assert (await fetched(server, PATH, Host=name))[0] == 200


@pytest.mark.parametrize("name", ["evil.example", "evil.example:9470", "127.0.0.1.evil.example", "localhost.evil:1"])
@pytest.mark.parametrize("path", [PATH, "/", "/metrics"])
async def test_a_name_that_a_page_from_elsewhere_pointed_here_is_not(tmp_path: Path, name: str, path: str) -> None:
    async with ApiServer(await running(tmp_path), MetricsPage(Metrics())) as server:
        status, _, reported = await fetched(server, path, Host=name)
        assert (status, reported["error"]["code"]) == (403, "permission")
        assert (await fetched(server, "/healthz", Host=name))[0] == 200, "a load balancer may use any name"


@asynccontextmanager
async def guarded(folder: Path, uid: int, owner: Owner) -> AsyncIterator[int]:
    """The port of something that the agent of this user guards."""
    app = web.Application(middlewares=[error_middleware(FakeView(folder)), guest_middleware([], uid, owner)])
    app.router.add_get("/x", _nothing)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def answered(folder: Path, uid: int, client_family: socket.AddressFamily, owner: Owner) -> str:
    """The first line that a client gets."""
    async with guarded(folder, uid, owner) as port:
        there = "127.0.0.1" if client_family == socket.AF_INET else "::ffff:127.0.0.1"
        reader, writer = await asyncio.open_connection(there, port, family=client_family)
        writer.write(b"GET /x HTTP/1.0\r\nHost: localhost\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line.decode().strip()


async def _nothing(_request: web.Request) -> web.Response:
    return web.Response()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_the_kernel_says_whose_the_other_end_is(tmp_path: Path, family: socket.AddressFamily) -> None:
    answer: list[int | None] = []

    def noted(client: SocketAddress, mine: SocketAddress) -> int | None:
        answer.append(user_of(client, mine))
        return 4242

    assert await answered(tmp_path, 4242, family, noted) == "HTTP/1.0 200 OK"
    assert answer == [os.geteuid()]


CLIENT = r"""
exec 3<>/dev/tcp/127.0.0.1/$0
printf 'GET /x HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3
head -n 1 <&3
"""
"""Of bash: what another user can run whatever may be read of this Python."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("client", "line"), [(65534, "200 OK"), (0, "200 OK"), (1, "403 Forbidden")])
async def test_a_real_other_user_is_refused(tmp_path: Path, client: int, line: str) -> None:
    async with guarded(tmp_path, 65534, user_of) as port:
        asked = await asyncio.create_subprocess_exec(
            "bash", "-c", CLIENT, str(port), stdout=asyncio.subprocess.PIPE, user=client, group=client, cwd="/"
        )
        answer, _ = await asyncio.wait_for(asked.communicate(), 10)
    assert answer.decode().strip() == f"HTTP/1.0 {line}"


@pytest.mark.parametrize(
    ("agent", "client", "line"),
    [(4242, 4242, "200 OK"), (4242, 0, "200 OK"), (4242, 4243, "403 Forbidden"), (4242, None, "403 Forbidden"),
     (0, 4243, "200 OK")],
)  # fmt: skip
async def test_who_may_read_the_socket_may_look(tmp_path: Path, agent: int, client: int | None, line: str) -> None:
    assert await answered(tmp_path, agent, socket.AF_INET, lambda _client, _mine: client) == f"HTTP/1.0 {line}"


# --- what looking costs


class CountingStore(FlakyStore):
    """Counts how often the audit log is read."""

    read = 0

    async def events(self, after: str, limit: int, before: str = "") -> tuple[JobEvent, ...]:
        self.read += 1
        return await super().events(after, limit, before)


async def test_the_audit_log_is_read_when_something_has_changed(tmp_path: Path) -> None:
    view = await running(tmp_path)
    store = view.store = CountingStore(view.server)
    stories = Stories(view)

    async def read(at: float) -> list[int]:
        rows = await stories.read(shown(view.cluster())[0], at)
        return [row["number"] for row in rows["u1"]]

    assert (await read(100.0), store.read) == ([1, 2], 1)
    assert (await read(101.0), store.read) == ([1, 2], 2), "how long the recovery took may come yet"
    assert (await read(101.0 + SETTLED), store.read) == ([1, 2], 2), "nothing happens"
    await view.form(view.job("digits"), 1)
    await view.refresh()
    assert (await read(200.0), store.read) == ([1, 2, 3], 3)
    await view.form(view.job("digits"), 2)
    await view.refresh()
    view.away_since = time.time()
    assert (await read(300.0), store.read) == ([1, 4], 3), "what the record says, without the store"
    view.away_since = None
    assert (await read(301.0), store.read) == ([1, 2, 3, 4], 4)
    view.away_since = time.time()
    assert (await read(302.0), store.read) == ([1, 2, 3, 4], 4), "what was known stays"


async def test_one_answer_serves_all_who_ask_while_it_is_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "FRESH", 60.0)
    async with ApiServer(await running(tmp_path), MetricsPage(Metrics())) as server:
        answers = await asyncio.gather(*(fetched(server, PATH) for _ in range(10)))
    assert len({reported["now"] for _, _, reported in answers}) == 1


async def test_ended_jobs_that_are_shown_are_few_and_the_newest(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    for number in range(MAX_ENDED + 2):
        await submit_one(view.store, f"u{number:02}", spec(f"job{number:02}"), 1000, 1.0, "alice", f"r{number}")
        await view.refresh()
        await view.form(view.job(f"job{number:02}"), 1)
        await view.refresh()
        await view.succeed(view.job(f"job{number:02}"))
        await view.refresh()
    await submit_one(view.store, "live", spec("live"), 1000, 1.0, "alice", "r-live")
    await view.refresh()
    jobs, more = shown(view.cluster())
    assert [job.name for job in jobs] == ["live", *(f"job{n:02}" for n in range(MAX_ENDED + 1, 1, -1))]
    assert more == 2
