"""The plan of a node's pods is made anew whenever something it looks at changed, and only then."""

from __future__ import annotations

from dataclasses import replace

from nodeagent.agent.rounds import PodPlan
from nodeagent.model.node import Incarnation
from nodeagent.plan.cluster import Cluster, Refusal
from nodeagent.plan.pods.pod import Prepare, Retire, Start, plan_pods
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import UID, life, make_cluster, make_generation, make_job, make_node

NODES = [make_node("n1"), make_node("n2")]
GENERATION = make_generation(("n1", "n2"), acks=("n1", "n2"))
RUNS = make_cluster(NODES, make_job("running", GENERATION, active=1))
ME = Incarnation(life=life("n1"), start=3)
PREFORKED = {UID: PodStatus(uid=UID, phase="ready", highest=GENERATION.token)}


def test_the_very_same_view_and_pods_are_planned_once() -> None:
    plan = PodPlan("n1")
    first = plan(RUNS, ME, PREFORKED, 2, ())
    assert [type(action) for action in first] == [Start]
    later = replace(RUNS, served=RUNS.served + 60_000, next_lapse=1)
    assert plan(later, Incarnation(life=life("n1"), start=3), dict(PREFORKED), 2, frozenset()) is first


def test_whatever_changes_is_planned_for_at_once() -> None:
    """Each step changes one thing, and the plan is what a new one would be."""
    plan = PodPlan("n1")
    refused = {UID: Refusal("changed", "changed", False)}
    gone = make_cluster(NODES)
    idle = {UID: PodStatus(uid=UID, phase="ready")}
    paused = make_cluster(NODES, make_job("paused", GENERATION, desired="pause", active=1))
    steps: list[tuple[Cluster, Incarnation, dict[str, PodStatus], int, frozenset[str]]] = [
        (RUNS, ME, PREFORKED, 2, frozenset()),
        (replace(RUNS, refused=refused), ME, PREFORKED, 2, frozenset()),
        (RUNS, ME, idle, 2, frozenset()),
        (make_cluster(NODES, make_job("queued")), ME, {}, 2, frozenset()),
        (RUNS, Incarnation(life="another", start=1), PREFORKED, 2, frozenset()),
        (gone, ME, PREFORKED, 2, frozenset()),
        (replace(gone, unread=frozenset({UID})), ME, PREFORKED, 2, frozenset()),
        (replace(RUNS, lapsed=frozenset({"n1"})), ME, PREFORKED, 2, frozenset()),
        (paused, ME, idle, 1, frozenset()),
        (paused, ME, idle, 0, frozenset()),
    ]
    kinds = []
    for cluster, me, statuses, standbys, lent in steps:
        actions = plan(cluster, me, statuses, standbys, lent)
        assert actions == plan_pods(cluster, "n1", me, statuses, standbys, lent)
        kinds.append([type(action) for action in actions])
    assert {Start, Prepare, Retire} <= {kind for found in kinds for kind in found}
    assert kinds[0] != kinds[1]
    assert kinds[5] != kinds[6]


def test_what_is_lent_counts() -> None:
    """A failsafe member lets go as soon as its promise is over, though nothing else has changed."""
    forming = make_generation(("n1", "n2"), state="forming", number=2, holders=("n1", "n2"), cause="restart")
    keeps = make_job("forming", forming, active=1).model_copy(update={"failsafe_members": {"n1": life("n1")}})
    view, still = make_cluster(NODES, keeps), {UID: PodStatus(uid=UID, phase="exited", highest=forming.token)}
    plan = PodPlan("n1")
    lends, free = plan(view, ME, still, 2, {UID}), plan(view, ME, still, 2, ())
    assert lends == plan_pods(view, "n1", ME, still, 2, {UID})
    assert free == plan_pods(view, "n1", ME, still, 2, ())
