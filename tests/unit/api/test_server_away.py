"""While the store is away: what a job's JSON says of its time, what health and metrics say, what is refused."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.view import AgentHealth
from nodeagent.api.errors import HICCUP, store_away, what_goes_on
from nodeagent.api.serializers import pods_json
from nodeagent.api.server import ApiServer
from nodeagent.ctl.jobtext import job_lines
from nodeagent.model.pod import Stall
from nodeagent.model.world import PodReport
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError, StoreUnusableError
from nodeagent.store.errors import waits_for
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec
from tests.unit.api.test_metrics import values
from tests.unit.ctl import samples

UID = samples.job().uid


def health(since: float | None = 100.0, lease_left: float = 0.0, **more: Any) -> AgentHealth:
    known: dict[str, Any] = {"lent": {}, "not_lent": {}} | more
    return AgentHealth(
        joined=True, reason="", lease_left=lease_left, beat_age=9.0, store_away_since=since, loop_lag=0.0, **known
    )  # fmt: skip


def test_pods_that_could_not_be_asked_for_are_unknown() -> None:
    job = samples.job()
    own = {"n1": samples.published(job)["n1"]}
    gang, _ = pods_json(job, samples.cluster(job), own, away=True)
    assert [(p["node"], p["phase"]) for p in gang] == [("n1", "running"), ("n2", "unknown")]
    assert gang[1]["reason"] == "the store does not answer"
    gang, _ = pods_json(job, samples.cluster(job), own, away=False)
    assert gang[1]["phase"] == "preparing"


def test_failsafe_members_of_a_live_job_are_shown_with_their_state() -> None:
    answered = samples.listed(samples.job(failsafe_members={"n10": "x", "n4": "life-n4", "n2": "life-n2"}))[
        "failsafe_members"
    ]
    assert [(k["node"], k["live"]) for k in answered] == [("n2", True), ("n4", False), ("n10", False)]
    assert samples.listed(samples.FAILED)["failsafe_members"] == []


async def test_the_metrics(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), MetricsPage(Metrics())
    page = values(metrics.text(view))
    assert (page["nodeagent_store_away_seconds", ()], page["nodeagent_failsafe_jobs", ()]) == (0, 0)
    view.away_since, view.lent = time.time() - 40, {"u1": 2.0, "u2": 1.0}
    page = values(metrics.text(view))
    assert 40 <= page["nodeagent_store_away_seconds", ()] < 100
    assert page["nodeagent_failsafe_jobs", ()] == 2


class Trying(FakeView):
    """Notices with a beat that the store is back, or (``refused``) that its lease is not its own any more."""

    refused = False
    asked = 0

    async def refresh(self) -> None:
        self.asked += 1
        if self.refused:
            raise StoreRefusedError("lost", "this life was declared lost")
        await super().refresh()
        self.away_since = None


@asynccontextmanager
async def served(view: FakeView) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        ApiServer(view, MetricsPage(Metrics())) as server,
        aiohttp.ClientSession("http://agent", connector=aiohttp.UnixConnector(path=str(server.socket_path))) as session,
    ):
        yield session


async def answered(session: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    async with session.get(path) as answer:
        return answer.status, await answer.json()


def test_an_answer_names_failsafe_time_only_where_something_runs_on_it(tmp_path: Path) -> None:
    """Whoever asked over a link that was dead was told that the jobs run on it, while the agent's own beats came."""
    view = FakeView(tmp_path)
    assert "failsafe" not in store_away(view, "none", StoreUnavailableError("it did not answer")).message
    view.away_since, view.lent = time.time() - 40, {"u1": 2.0}
    assert "running jobs go on, 1 of those on this node on failsafe time" in store_away(view, "none").message


def test_an_agent_that_alone_has_no_answer_names_the_lease_that_its_node_goes_on_with() -> None:
    """The page said failsafe time, while the lease process had the store on a link of its own."""
    assert what_goes_on(health(lease_left=2.1)) == "running jobs go on, those on this node on its lease"
    assert what_goes_on(health(lease_left=0.0)).endswith("but not on this node, whose lease has run out")


async def test_alive_but_not_ready(tmp_path: Path) -> None:
    """An agent that is restarted because the store is away would forget who lends its workers time."""
    view = FakeView(tmp_path)
    view.away_since, view.lent, view.not_lent = time.time() - 12, {"u1": 2.0}, {"u2": "n3 does not answer"}
    async with served(view) as session:
        alive, health_reported = await answered(session, "/healthz")
        ready, ready_reported = await answered(session, "/readyz")
    assert (alive, health_reported["ok"], health_reported["reasons"]) == (200, True, [])
    assert (ready, ready_reported["ok"]) == (503, False)
    (reason,) = ready_reported["reasons"]
    assert "nothing can be changed, started or recovered; 1 of the jobs here run on failsafe time" in reason
    for body in (health_reported, ready_reported):
        assert (body["lent"], body["not_lent"]) == ({"u1": 2.0}, {"u2": "n3 does not answer"})
        assert body["store_away_since"] == view.away_since


async def test_a_lease_that_only_its_process_cannot_renew_has_not_ended_what_runs_on_failsafe_time(
    tmp_path: Path,
) -> None:
    """The store answered the agent and refused each renewal, all workers ran on, and people read that they had been
    stopped."""
    view = FakeView(tmp_path)
    view.lease_left, view.lent = 0.0, {"u1": 2.0}
    async with served(view) as session:
        _, ready = await answered(session, "/readyz")
    stopped = "the lease has run out: this node's workers were stopped"
    assert ready["reasons"] == [f"{stopped}, but for those that run on failsafe time (jobs: 1)"]
    view.lent = {}
    async with served(view) as session:
        _, ready = await answered(session, "/readyz")
    assert ready["reasons"] == [stopped]


async def test_a_node_without_a_lease_and_failsafe_time_runs_nothing(tmp_path: Path) -> None:
    """The store answered some agents and refused others: who was refused was told only that nothing can be changed."""
    view = FakeView(tmp_path)
    view.away_since, view.lease_left = time.time() - 12, 0.0
    async with served(view) as session:
        _, ready = await answered(session, "/readyz")
    (reason,) = ready["reasons"]
    assert reason.endswith("started or recovered; nothing runs on this node, which has no lease")


async def test_a_change_is_refused_and_never_sent(tmp_path: Path) -> None:
    view = Trying(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec(), 1000, 1.0, "alice", "r1")
    await view.refresh()
    view.away_since, view.store.away = time.time(), True  # its answer may just have been late
    async with served(view) as session:
        async with session.post("/v1/jobs/digits/stop", json={"request_id": "r2"}) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (503, "store_away")
        assert "nothing was changed, and nothing can be until it answers" in error["message"]
        assert "nodeagentctl doctor" in error["next"]
        view.store.away = False  # it is back, though nobody has noticed yet
        assert await view.store.request("r2") is None
        async with session.post("/v1/jobs/digits/stop", json={"request_id": "r2"}) as answer:
            assert answer.status == 200
    assert await view.store.request("r2") is not None


async def test_a_change_is_refused_at_once_while_the_store_is_known_to_be_away(tmp_path: Path) -> None:
    """Each change had the agent ask it, for two timeouts, and wait for those before it."""
    view = Trying(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec(), 1000, 1.0, "alice", "r1")
    await view.refresh()
    view.away_since, view.asked = time.time() - HICCUP - 1, 0
    async with served(view) as session:
        for _ in range(3):
            async with session.post("/v1/jobs/digits/stop", json={"request_id": "r2"}) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (503, "store_away")
            assert "nothing was changed, and nothing can be until it answers" in error["message"]
        assert (view.asked, await view.store.request("r2")) == (0, None)
        view.away_since = None  # the agent's own beat was answered
        async with session.post("/v1/jobs/digits/stop", json={"request_id": "r2"}) as answer:
            assert answer.status == 200


async def test_a_store_that_refuses_our_lease_answers(tmp_path: Path) -> None:
    view = Trying(tmp_path)
    await view.join()
    view.away_since, view.refused = time.time(), True
    async with served(view) as session, session.post("/v1/nodes/n2/forget", json={"request_id": "r"}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (409, "state")
    assert "n2 holds its lease" in error["message"], "it was asked"


async def test_an_agent_that_started_while_the_store_is_away_says_so(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    view.joined, view.away_since = False, time.time() - 3
    view.reason = "the store at 10.0.0.1:6379 refused this agent (WRONGPASS ...)"
    async with served(view) as session:
        status, body = await answered(session, "/v1/jobs")
    assert (status, body["error"]["code"]) == (503, "not_joined")
    assert view.reason in body["error"]["message"]


async def test_whom_a_store_that_lost_writes_waits_for_is_every_jobs_reason(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec(), 1000, 1.0, "alice", "r1")
    await view.refresh()
    view.reasons = ("2 nodes are wanted",)
    async with served(view) as session:
        _, before = await answered(session, "/v1/jobs/digits")
        view.store_waits = waits_for(("n7", "n8"), 2, 42.0)
        _, detail = await answered(session, "/v1/jobs/digits")
        _, listed = await answered(session, "/v1/jobs")
    assert before["why"] == ["2 nodes are wanted"]
    assert detail["why"] == [view.store_waits, "2 nodes are wanted"]
    assert (before["store_waits"], detail["store_waits"]) == ("", view.store_waits)
    assert (detail["reason"], listed["items"][0]["reason"]) == (view.store_waits, view.store_waits)
    assert "start their agents, if you can" in "\n".join(job_lines(detail))
    assert "start their agents" not in "\n".join(job_lines(before))


async def test_a_stall_that_is_no_hang_yet_is_reported(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec(), 1000, 1.0, "alice", "r1")
    await view.obey()
    async with served(view) as session:
        _, before = await answered(session, "/v1/jobs/digits")
        generation, stall = view.job("digits").generation, Stall(limit=600.0, suspects=True, ranks=())
        assert generation is not None
        (member, *_) = generation.ordered()
        report = PodReport(state="running", stall=stall)
        await view.store.report("u1", generation.token, member.node, view.lives[member.node], report)
        await view.refresh()
        _, after = await answered(session, "/v1/jobs/digits")
    assert (before["phase"], before["no_progress"]) == ("running", "")
    assert after["no_progress"].startswith(f"no progress seen on {member.node}; waits for what ")
    assert "nothing yet: if it hangs, it is restarted by itself" in job_lines(after)[-1]


async def test_why_a_store_that_answers_cannot_serve_is_reported(tmp_path: Path) -> None:
    view = Trying(tmp_path)
    await view.join()
    view.store.error = StoreUnusableError("it is full (OOM): see its log")
    view.away_since, view.store.away = time.time(), True
    async with served(view) as session, session.post("/v1/jobs/x/stop", json={"request_id": "r2"}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (503, "store_away")
    assert "cannot use the store since" in error["message"]
    assert "it is full (OOM): see its log; nothing was changed" in error["message"]
