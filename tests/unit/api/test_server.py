"""Where the API listens, what loopback HTTP serves, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog.testing

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.view import AgentView
from nodeagent.api.server import ApiServer, ListenError
from nodeagent.ctl.client import Client
from tests.unit.api.fakes import FakeView


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


async def test_binds_and_cleans_up(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        mode = stat.S_IMODE(server.socket_path.stat().st_mode)
        assert mode == (0o666 if os.geteuid() == 0 else 0o600)
        assert names(server.socket_path.parent) == ["api.sock"]
    assert names(server.socket_path.parent) == []


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    path = view.config.dirs.run / "api.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with ApiServer(view, MetricsPage(Metrics())):
        connector = aiohttp.UnixConnector(path=str(path))
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://a/v1/version") as answer:
            assert (await answer.json())["node"] == "n1"


async def test_a_living_one_is_not(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        with pytest.raises(ListenError, match="another agent listens"):
            await ApiServer(view, MetricsPage(Metrics())).__aenter__()
        assert server.socket_path.exists()


async def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    path = view.config.dirs.run / "api.sock"
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(ListenError, match="is not a socket"):
        await ApiServer(view, MetricsPage(Metrics())).__aenter__()
    assert path.read_text() == "precious"


async def test_a_taken_port_ends_no_agent_and_is_listened_on_when_it_is_free(tmp_path: Path) -> None:
    """Any account could have it in the moment of a restart: the agent ended as if its config were wrong, was never
    started again, and what trained on the node ended."""
    view, notified = FakeView(tmp_path), list[str]()
    view.unlike["n1"] = {"http": ""}
    await view.join()
    with structlog.testing.capture_logs() as logged, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        view.config = view.config.model_copy(update={"ports": view.config.ports.model_copy(update={"api": port})})
        async with ApiServer(view, MetricsPage(Metrics()), notify=notified.append, retry=0.01) as server:
            running = asyncio.create_task(server.run())
            found = await asyncio.to_thread(Client([str(server.socket_path)]).get, "/v1/doctor")
            whose = f"cannot listen on 127.0.0.1:{port}; the port belongs to uid {os.geteuid()}"
            assert [f for f in found["items"] if whose in f["what"]]
            assert (notified, server.http_url) == ([], "")
            other.close()
            async with asyncio.timeout(30):
                await running
            assert notified == [server.http_url] == [f"http://127.0.0.1:{port}"]
            async with aiohttp.ClientSession() as session, session.get(server.http_url + "/healthz") as answer:
                assert answer.status == 200
    assert names(view.config.dirs.run) == []
    (line,) = [line for line in logged if "not served on loopback" in line["event"]]
    assert line["why"].endswith(f"Address already in use; the port belongs to uid {os.geteuid()}")


async def test_a_port_that_is_let_go_while_its_holder_is_looked_for_is_listened_on_at_once(tmp_path: Path) -> None:
    """The log said that the port is taken, and that nobody has it; and it was tried again only after a pause."""
    view = FakeView(tmp_path)
    with structlog.testing.capture_logs() as logged, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        view.config = view.config.model_copy(update={"ports": view.config.ports.model_copy(update={"api": port})})

        class LetsGo(ThreadPoolExecutor):
            def submit(self, *work: Any, **more: Any) -> Future[Any]:
                other.close()
                return super().submit(*work, **more)

        async with ApiServer(view, MetricsPage(Metrics()), retry=600.0) as server:
            assert server.http_url == ""
            asyncio.get_running_loop().set_default_executor(LetsGo(1))
            async with asyncio.timeout(30):
                await server.run()
            assert server.http_url == f"http://127.0.0.1:{port}"
    assert logged == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200),
        ("/readyz", 200),
        ("/metrics", 200),
        ("/", 200),
        ("/v1/jobs", 404),
        ("/v1/version", 404),
        ("/page/../app.py", 404),
    ],
)
async def test_loopback_serves_health_and_the_page_only(tmp_path: Path, path: str, status: int) -> None:
    async with (
        ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server,
        aiohttp.ClientSession() as session,
        session.get(server.http_url + path) as answer,
    ):
        assert answer.status == status


async def test_ready_says_why_not(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    view.joined, view.away_since = False, 1.0
    async with (
        ApiServer(view, MetricsPage(Metrics())) as server,
        aiohttp.ClientSession() as session,
        session.get(server.http_url + "/readyz") as answer,
    ):
        reported = await answer.json()
    assert (answer.status, reported["ok"]) == (503, False)
    assert "the id n1 is taken by 10.0.0.9" in reported["reasons"][0]
    assert "the store has not answered" in reported["reasons"][1]


async def test_a_flood_of_requests_for_the_metrics_leaves_the_loop_its_time(tmp_path: Path) -> None:
    made = list[float]()

    class Slow(MetricsPage):
        def text(self, view: AgentView) -> bytes:
            made.append(time.monotonic())
            time.sleep(0.05)  # of a large cluster
            return super().text(view)

    async with ApiServer(FakeView(tmp_path), Slow(Metrics())) as server, aiohttp.ClientSession() as session:
        end, asked = time.monotonic() + 2, 0
        while time.monotonic() < end:
            async with session.get(server.http_url + "/metrics") as answer:
                assert b"nodeagent_" in await answer.read()
            asked += 1
    assert asked > 2 * len(made) > 2
    assert min(later - earlier for earlier, later in pairwise(made)) >= 0.05 / 0.1
