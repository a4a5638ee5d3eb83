"""Queues over HTTP: what operators change, what is refused, and what is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import auth
from nodeagent.api.auth import Caller
from nodeagent.api.server import ApiServer
from nodeagent.model.queue import Queue, Queues
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec

Json = dict[str, Any]
BOB = Caller(uid=1001, gid=1001, name="bob", operator=False, trusted=False)


class Bench:
    """One agent's API, asked over its socket."""

    def __init__(self, view: FakeView, session: aiohttp.ClientSession) -> None:
        self.view, self._session, self._asked = view, session, 0

    async def ask(self, method: str, path: str = "", request: str = "", **body: object) -> Json:
        """The answer; of a refusal the error, with its status."""
        self._asked += 1
        data = None if method == "GET" else {"request_id": request or f"r{self._asked}"} | body
        async with self._session.request(method, f"http://a/v1/queues{path}", json=data) as answer:
            found: Json = await answer.json()
            return found if answer.status < 400 else found["error"] | {"status": answer.status}

    async def create(self, name: str, *settings: str) -> Json:
        return await self.ask("POST", f"/{name}/create", settings=list(settings))

    async def submit(self, name: str, queue: str) -> None:
        job = spec(name).model_copy(update={"queue": queue})
        await submit_one(self.view.store, f"u-{name}", job, 1000, 1.0, "alice", f"s-{name}")
        await self.view.refresh()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    view = FakeView(tmp_path)
    await view.join()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Bench(view, session)


async def test_a_cluster_without_queues_has_one(bench: Bench) -> None:
    (row,) = (await bench.ask("GET"))["items"]
    assert (row["name"], row["weight"], row["state"], row["entitled"]) == ("default", 1.0, "open", 1.0)


async def test_a_queue_is_made_changed_and_removed(bench: Bench) -> None:
    made = await bench.create("team", "weight=3", "capability.slots=8")
    assert made["changes"] == [{"name": "team", "change": "created", "keys": []}]
    assert made["saved"]["nodes"] == ["n1", "n2"]
    changed = await bench.ask("POST", "/team/set", settings=["weight=", "users=[ann]"])
    assert changed["changes"] == [{"name": "team", "change": "changed", "keys": ["weight", "users"]}]
    tree = bench.view.cluster().queues
    assert (tree.rev, tree.queues[0].users, tree.queues[0].capability.slots) == (2, ("ann",), 8)
    assert bench.view.seal.shares(tree), "it is signed as it is stored"
    await bench.ask("POST", "/team/close")
    assert bench.view.cluster().queues.by_name["team"].state == "closed"
    await bench.ask("POST", "/team/open")
    assert bench.view.cluster().queues.by_name["team"].state == "open"
    await bench.ask("DELETE", "/team")
    assert bench.view.cluster().queues.queues == ()
    events = await bench.view.store.events("0-0", 100)
    assert [e.text.partition(" (by")[0] for e in events if e.kind == "QueueChanged"] == [
        "queue team created", "queue team: weight=, users=[ann]", "queue team closed", "queue team opened",
        "queue team deleted",
    ]  # fmt: skip


async def test_the_same_request_is_carried_out_once(bench: Bench) -> None:
    first = await bench.ask("POST", "/team/create", request="same")
    again = await bench.ask("POST", "/team/create", request="same")
    assert (first["changed"], again["changed"]) == (True, False)
    assert bench.view.cluster().queues.rev == 1


async def test_two_changes_at_once_are_both_made(bench: Bench) -> None:
    done = await asyncio.gather(*(bench.create(f"q{i}") for i in range(3)))
    assert all(one["changed"] for one in done)
    assert [queue.name for queue in bench.view.cluster().queues.queues] == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/team/create", {}),
        ("POST", "/default/set", {"settings": ["weight=2"]}),
        ("POST", "/default/close", {}),
        ("DELETE", "/default", {}),
        ("PUT", "", {"queues": []}),
        ("POST", "/team/create", {"dry_run": True}),
    ],
)
async def test_only_operators_change_queues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Json
) -> None:
    async def who(*_: object) -> Caller:
        return BOB

    monkeypatch.setattr(auth, "caller", who)
    error = await bench.ask(method, path, **body)
    assert (error["status"], error["message"]) == (403, "bob may not change queues: only root and operators may")
    assert bench.view.cluster().queues.rev == 0


async def test_a_tree_that_cannot_be_is_refused_whole(bench: Bench) -> None:
    await bench.create("team")
    error = await bench.create("vision", "parent=tema")
    assert (error["code"], error["problems"]) == (
        "state", ["queue vision: its parent tema does not exist: did you mean 'team'?"],
    )  # fmt: skip
    error = await bench.ask("POST", "/team/set", settings=["weight=0", "wait=1"])
    assert (error["code"], len(error["problems"])) == ("spec", 2)
    assert "set team" in (await bench.create("team"))["next"]
    assert (await bench.ask("POST", "/teem/set", settings=["weight=2"]))["code"] == "not_found"
    assert (await bench.ask("POST", "/team/set"))["code"] == "usage"
    assert bench.view.cluster().queues.rev == 1


async def test_a_queue_with_jobs_or_children_is_not_removed(bench: Bench) -> None:
    await bench.create("team")
    await bench.submit("one", "team")
    error = await bench.ask("DELETE", "/team")
    assert error["problems"] == ["queue team: it has live jobs (one): close it, and delete it when they have ended"]
    error = await bench.create("vision", "parent=team")
    assert error["problems"] == ["queue team: it has live jobs (one), so it can have no children (vision)"]
    await bench.create("other")
    await bench.create("below", "parent=other")
    assert (await bench.ask("DELETE", "/other"))["message"] == "queue 'other' has queues below it (below)"
    assert "always exists" in (await bench.ask("DELETE", "/default"))["message"]
    await bench.view.end(bench.view.job("one"), "stopped", "by hand")
    await bench.view.refresh()
    assert (await bench.ask("DELETE", "/team"))["changed"]


async def test_a_file_is_applied_whole_or_not_at_all(bench: Bench) -> None:
    await bench.create("old")
    wanted = [
        Queue(name="new", weight=2).model_dump(mode="json"),
        Queue(name="kid", parent="new").model_dump(mode="json"),
    ]
    dry = await bench.ask("PUT", queues=wanted, dry_run=True)
    assert [(c["name"], c["change"]) for c in dry["changes"]] == [
        ("kid", "created"),
        ("new", "created"),
        ("old", "deleted"),
    ]
    assert bench.view.cluster().queues.rev == 1, "nothing was written"
    error = await bench.ask("PUT", queues=[*wanted, Queue(name="bad", parent="none").model_dump(mode="json")])
    assert "its parent none does not exist" in error["problems"][0]
    assert (await bench.ask("PUT", queues=wanted))["changes"] == dry["changes"]
    assert (await bench.ask("PUT", queues=wanted))["changed"] is False
    assert [queue.name for queue in bench.view.cluster().queues.queues] == ["kid", "new"]
    for queues in ("all", [{"name": "UPPER"}], [{"name": "a", "speed": 1}]):
        assert (await bench.ask("PUT", queues=queues))["status"] == 400


async def test_who_waits_in_a_queue_is_shown_in_the_order_of_the_line(bench: Bench) -> None:
    await bench.create("team", "capability.slots=8")
    await bench.create("other")
    for name, queue in (("one", "team"), ("two", "team"), ("three", "other")):
        await bench.submit(name, queue)
    await bench.view.form(bench.view.job("one"), 2)
    await bench.view.refresh()
    shown = await bench.ask("GET", "/team")
    assert [(j["name"], j["phase"], j["place"], j["used"]["slots"]) for j in shown["work"]] == [
        ("one", "running", None, 4), ("two", "queued", 2, 0),
    ]  # fmt: skip
    assert (shown["used"], shown["share"]) == ({"gpus": 0, "nodes": 2, "slots": 4}, pytest.approx(2 / 3, abs=1e-3))
    assert [one["used"]["slots"] for one in shown["by_user"]] == [4]
    rows = {row["name"]: row for row in (await bench.ask("GET"))["items"]}
    assert (rows["team"]["jobs"], rows["team"]["waiting"], rows["other"]["waiting"]) == (2, 1, 1)
    assert (await bench.ask("GET", "/tema"))["status"] == 404


async def test_of_one_that_waits_a_queue_shows_why_nobody_makes_room(bench: Bench) -> None:
    await bench.create("team", "reclaimable=false")
    await bench.create("other")
    for name in ("one", "two"):
        await bench.submit(name, "team")
        await bench.view.form(bench.view.job(name), 3)
    await bench.submit("three", "other")
    bench.view.reasons = ("needs 1 node, 0 fit",)
    (row,) = (await bench.ask("GET", "/other"))["work"]
    assert row["reason"] == "needs 1 node, 0 fit; nobody makes room for it: queue team is not reclaimable"


async def test_a_tree_that_was_put_back_by_hand_can_be_changed(bench: Bench) -> None:
    """The store has an older tree than the agents act on: a change is of the newer, and above both."""
    await bench.create("a")
    good = bench.view.cluster().queues
    await bench.view.store.queues(1, Queues(queues=(Queue(name="forged"),)), "x", "by hand")
    await bench.view.refresh()
    forged = bench.view.cluster()
    assert forged.queues.rev == 2
    bench.view.trusted = good
    assert (await bench.create("b"))["changed"]
    bench.view.trusted = None
    assert [q.name for q in bench.view.cluster().queues.queues] == ["a", "b"]
    assert bench.view.cluster().queues.rev == 3


async def test_a_guarantee_of_more_than_there_is_is_made_with_a_warning(bench: Bench) -> None:
    assert (await bench.create("small", "guarantee.nodes=1"))["warning"] == ""
    made = await bench.create("large", "guarantee.nodes=99", "guarantee.slots=2000")
    assert made["changed"]
    over = "queues are guaranteed 100 nodes, and the live nodes have 3"
    assert made["warning"] == f"{over}; queues are guaranteed 2000 slots, and the live nodes have 12"
    assert (await bench.ask("POST", "/large/set", settings=["weight=2"]))["warning"] == "", "said before"
    tried = await bench.ask("POST", "/large/set", settings=["guarantee.gpus=9"], dry_run=True)
    assert tried["warning"] == "queues are guaranteed 9 gpus, and the live nodes have 0"
