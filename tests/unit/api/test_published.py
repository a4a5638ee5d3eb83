"""Whom the API asks for the pods of which jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

from nodeagent.agent.view import AgentView
from nodeagent.api.published import places, published_of
from nodeagent.model.node import Readiness
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import StoreUnavailableError
from tests.unit.plan.build import make_generation, make_job, make_node

READY = Readiness(state="ready")
RUNS = make_job("running", make_generation(["n1", "n2"], holders=["n3"]), uid="runs")
WAITS, IDLE = make_job(uid="waits"), make_job(uid="idle")
ENDED = make_job("failed", uid="ended")
NODES = [*(make_node(f"n{i}") for i in (1, 2, 3, 5)), make_node("n4", ready={"waits": READY, "runs": READY})]
CLUSTER = Cluster(served=0, nodes={n.id: n for n in NODES}, jobs={j.uid: j for j in (RUNS, WAITS, IDLE, ENDED)})


class Asked:
    """A store that remembers what it was asked."""

    def __init__(self, *, away: bool = False) -> None:
        self.questions: list[dict[str, set[str]]] = []
        self._away = away

    async def pods(self, wanted: Mapping[str, Collection[str]]) -> dict[str, tuple[PodState, ...]]:
        self.questions.append({uid: set(nodes) for uid, nodes in wanted.items()})
        if self._away:
            raise StoreUnavailableError("no answer")
        reported = PodState(uid="runs", job="train", role="worker", node="n1", phase="running")
        return {uid: (reported,) if uid == "runs" else () for uid in wanted}


def view(store: Asked) -> AgentView:
    health = SimpleNamespace(store_away_since=None, unreachable={})
    parts: dict[str, Any] = {"cluster": lambda: CLUSTER, "health": lambda: health, "store": store, "pods": dict}
    return cast("AgentView", SimpleNamespace(**parts))


def test_a_pod_is_looked_for_where_its_job_has_to_do_with_a_node() -> None:
    assert places(CLUSTER, RUNS) == {"n1", "n2", "n3", "n4"}
    assert places(CLUSTER, WAITS) == {"n4"}
    assert places(CLUSTER, IDLE) == set(), "of a job that waits no node is asked"


async def test_all_jobs_are_one_question() -> None:
    store = Asked()
    found, answered = await published_of(view(store), CLUSTER.jobs.values())
    assert answered and list(found["runs"]) == ["n1"]
    assert found["waits"] == found["idle"] == found["ended"] == {}
    assert store.questions == [{"runs": {"n1", "n2", "n3", "n4"}, "waits": {"n4"}, "idle": set()}]


async def test_a_store_that_does_not_answer_is_asked_once() -> None:
    store = Asked(away=True)
    found, answered = await published_of(view(store), CLUSTER.jobs.values())
    assert not answered and found["runs"] == {} and len(store.questions) == 1
    await published_of(view(store), CLUSTER.jobs.values(), asking=False)
    assert len(store.questions) == 1
