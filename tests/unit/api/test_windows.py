"""Maintenance windows over HTTP: what operators reserve, what is refused, and what is shown of a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import auth, windows
from nodeagent.api.auth import Caller
from nodeagent.api.server import ApiServer
from nodeagent.model.window import Window, Windows
from nodeagent.plan.nodes.availability import KEPT
from tests.unit.api.fakes import FakeView

Json = dict[str, Any]
BOB = Caller(uid=1001, gid=1001, name="bob", operator=False, trusted=False)
HOUR = 3600.0


class Bench:
    """One agent's API, asked over its socket."""

    def __init__(self, view: FakeView, session: aiohttp.ClientSession) -> None:
        self.view, self._session, self._asked = view, session, 0

    async def ask(self, method: str, path: str = "/v1/windows", request: str = "", **body: object) -> Json:
        """The answer; of a refusal the error, with its status."""
        self._asked += 1
        data = None if method == "GET" else {"request_id": request or f"r{self._asked}"} | body
        async with self._session.request(method, f"http://a{path}", json=data) as answer:
            found: Json = await answer.json()
            return found if answer.status < 400 else found["error"] | {"status": answer.status}

    async def reserve(
        self, *nodes: str, after: float = HOUR, seconds: float = HOUR, request: str = "", why: str = ""
    ) -> Json:
        starts = time.time() + after
        return await self.ask("POST", request=request, nodes=list(nodes), starts=starts, seconds=seconds, why=why)

    async def node(self, name: str) -> Json:
        return await self.ask("GET", f"/v1/nodes/{name}")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    view = FakeView(tmp_path)
    await view.join()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Bench(view, session)


async def test_a_window_is_made_shown_and_deleted(bench: Bench) -> None:
    made = await bench.reserve("n[1-2]", after=-60.0, why="kernel update", request="one")
    assert (made["changed"], made["window"]["name"], made["window"]["known"]) == (True, "w1", ["n1", "n2"])
    assert made["saved"]["nodes"] == ["n1", "n2"]
    stored = bench.view.cluster().windows
    assert bench.view.seal.windows_signed(stored), "they are signed as they are stored"
    assert stored.windows[0].end - stored.windows[0].start == HOUR * 1000
    (row,) = (await bench.ask("GET"))["items"]
    assert (row["name"], row["state"], row["why"]) == ("w1", "open", "kernel update")
    assert -120 < row["begins"] <= -60
    node = await bench.node("n2")
    assert node["state"] == "maintenance"
    assert node["reason"].startswith("in maintenance from ")
    assert "kernel update (by " in node["reason"]
    assert (await bench.node("n3"))["state"] == "ready"
    assert (await bench.ask("DELETE", "/v1/windows/w1"))["window"]["name"] == "w1"
    assert (await bench.node("n2"))["state"] == "ready"
    assert (await bench.ask("GET"))["items"] == []
    kinds = [event.kind for event in await bench.view.store.events("0-0", 100)]
    assert kinds.count("WindowsChanged") == 2


async def test_the_same_request_makes_one(bench: Bench) -> None:
    made = await bench.reserve("n1", request="one", after=HOUR)
    again = await bench.reserve("n1", request="one", after=HOUR + 1.0)  # +1h, said a second later
    assert (again["changed"], again["window"]["starts"]) == (False, made["window"]["starts"])
    assert len(bench.view.cluster().windows.windows) == 1


async def test_two_at_once_are_both_made(bench: Bench) -> None:
    await asyncio.gather(*(bench.reserve(name) for name in ("n1", "n2", "n3")))
    assert sorted(window.id for window in bench.view.cluster().windows.windows) == ["w1", "w2", "w3"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/windows"), ("DELETE", "/v1/windows/w1")])
async def test_only_operators_reserve(bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str, path: str) -> None:
    async def who(*_: object) -> Caller:
        return BOB

    monkeypatch.setattr(auth, "caller", who)
    asked: dict[str, Any] = {"nodes": ["n1"], "starts": time.time(), "seconds": 60} if method == "POST" else {}
    error = await bench.ask(method, path, **asked)
    assert (error["status"], error["message"]) == (403, "bob may not reserve nodes: only root and operators may")
    assert bench.view.cluster().windows.rev == 0


@pytest.mark.parametrize(
    ("nodes", "after", "seconds", "code", "message"),
    [
        ([], 0.0, HOUR, "usage", "nodes must be a list of 1 to 64 names"),
        (["n["], 0.0, HOUR, "usage", "'n[' names no nodes"),
        ([7], 0.0, HOUR, "usage", "7 names no nodes"),
        (["n9"], 0.0, HOUR, "not_found", "no node 'n9'"),
        (["n1", "x[1-3]"], 0.0, HOUR, "not_found", "no node 'x[1-3]'"),
        (["n1"], 0.0, 0.0, "usage", "a window lasts 90 d at most, and not 0 s"),
        (["n1"], 0.0, 91 * 86_400.0, "usage", "a window lasts 90 d at most, and not 91 d"),
        (["n1"], -2 * HOUR, HOUR, "usage", "this window is over already"),
        (["n1"], 400 * 86_400.0, HOUR, "usage", "this window ends in more than 400 d"),
    ],
)
async def test_what_cannot_be_is_refused(
    bench: Bench, nodes: list[str], after: float, seconds: float, code: str, message: str
) -> None:
    error = await bench.reserve(*nodes, after=after, seconds=seconds)
    assert (error["code"], error["message"]) == (code, message)
    assert bench.view.cluster().windows.rev == 0


async def test_a_time_from_now_is_counted_by_the_agent(bench: Bench) -> None:
    """The tool may be on a machine whose clock is wrong."""
    before = time.time()
    made = await bench.ask("POST", nodes=["n1"], starts_in=HOUR, seconds=60)
    assert before + HOUR <= made["window"]["starts"] <= time.time() + HOUR
    assert (await bench.ask("POST", nodes=["n1"], seconds=60))["message"] == "starts is missing"


async def test_times_are_numbers(bench: Bench) -> None:
    error = await bench.ask("POST", nodes=["n1"], starts="tomorrow", seconds=60)
    assert (error["code"], error["message"]) == ("usage", "starts must be a number of seconds")


async def test_a_window_that_is_not_there(bench: Bench) -> None:
    assert (await bench.ask("DELETE", "/v1/windows/w1"))["code"] == "not_found"


async def test_there_are_only_so_many_and_those_long_over_go(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_WINDOWS", 1)
    served = bench.view.cluster().served
    old = Window(
        id="w1", nodes=("n1",), start=0, end=served - int(KEPT * 1000) - 1, starts=0.0, ends=1.0, by="ann", text="x"
    )  # fmt: skip
    signed = bench.view.seal.windows(Windows(rev=1, windows=(old,)))
    await bench.view.store.windows(0, signed, "old", "x")
    await bench.view.refresh()
    assert (await bench.ask("GET"))["items"] == []
    assert (await bench.reserve("n1"))["window"]["name"] == "w2"
    assert [window.id for window in bench.view.cluster().windows.windows] == ["w2"]
    error = await bench.reserve("n2")
    assert (error["code"], error["message"]) == ("limit", "there are 1 windows already")


async def test_uncordon_does_not_end_a_window_and_says_what_does(bench: Bench) -> None:
    await bench.reserve("n1", after=-60.0)
    error = await bench.ask("POST", "/v1/nodes/n1/uncordon")
    assert (error["code"], error["next"]) == ("state", "end the window: nodeagentctl reserve delete w1")
    await bench.ask("POST", "/v1/nodes/n1/drain", reason="fan")
    assert "; drained: fan (by " in (await bench.node("n1"))["reason"]
    assert "status" not in await bench.ask("POST", "/v1/nodes/n1/uncordon")
