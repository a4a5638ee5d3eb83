"""The plan of a node's pods is made anew whenever something it looks at changed, and only then. What a proposal says
that it was decided on. And a decision that raises concerns its job alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from nodeagent.agent.apply import Applier
from nodeagent.agent.metrics import Metrics, RestartCounter
from nodeagent.agent.rounds import PodPlan, ProposalTurns, Rounds
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Cluster, Refusal
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.actions import Prepare, Retire, Start
from nodeagent.plan.steps import Decision, Remove
from nodeagent.pods.base import PodStatus
from nodeagent.store.base import StepFailedError, StoreRefusedError
from nodeagent.store.messages import Proposal
from tests.unit.plan.build import READY, UID, WALL, life, make_cluster, make_generation, make_job, make_node, make_spec
from tests.unit.plan.planning import plan_node

NODES = [make_node("n1"), make_node("n2")]
GENERATION = make_generation(("n1", "n2"), acks=("n1", "n2"))
RUNS = make_cluster(NODES, make_job("running", GENERATION, active=1))
ME = Incarnation(life=life("n1"), start=3)
PREFORKED = {UID: PodStatus(uid=UID, phase="ready", highest=GENERATION.token)}


def test_the_very_same_view_and_pods_are_planned_once() -> None:
    plan = PodPlan("n1", Undecided("n1", Metrics().left_undecided))
    first = plan(RUNS, ME, PREFORKED, 2, ())
    assert [type(action) for action in first] == [Start]
    later = replace(RUNS, served=RUNS.served + 60_000, next_lapse=1)
    assert plan(later, Incarnation(life=life("n1"), start=3), dict(PREFORKED), 2, frozenset()) is first


def test_whatever_changes_is_planned_for_at_once() -> None:
    """Each step changes one thing, and the plan is what a new one would be."""
    plan = PodPlan("n1", Undecided("n1", Metrics().left_undecided))
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
        assert actions == plan_node(cluster, "n1", me, statuses, standbys, lent)
        kinds.append([type(action) for action in actions])
    assert {Start, Prepare, Retire} <= {kind for found in kinds for kind in found}
    assert kinds[0] != kinds[1]
    assert kinds[5] != kinds[6]


def test_what_is_lent_counts() -> None:
    """A failsafe member lets go as soon as its promise is over, though nothing else has changed."""
    forming = make_generation(("n1", "n2"), state="forming", number=2, holders=("n1", "n2"), cause="restart")
    keeps = make_job("forming", forming, active=1).model_copy(update={"failsafe_members": {"n1": life("n1")}})
    view, still = make_cluster(NODES, keeps), {UID: PodStatus(uid=UID, phase="exited", highest=forming.token)}
    plan = PodPlan("n1", Undecided("n1", Metrics().left_undecided))
    lends, free = plan(view, ME, still, 2, {UID}), plan(view, ME, still, 2, ())
    assert lends == plan_node(view, "n1", ME, still, 2, {UID})
    assert free == plan_node(view, "n1", ME, still, 2, ())


class Proposals:
    """A store that takes every proposal, and fails at an activation."""

    def __init__(self) -> None:
        self.made: list[Proposal] = []
        self.failed = 0

    async def activate(self, uid: str, token: Token) -> JobRecord:
        self.failed += 1
        raise StepFailedError("the store cannot serve now (ERR user_script:1: no number)")

    async def propose(self, proposal: Proposal) -> JobRecord:
        self.made.append(proposal)
        return make_job(uid=proposal.uid)

    async def remove(self, uid: str, by: str) -> None:
        raise StoreRefusedError("stale", f"job {uid} still stops its workers on node n2")


class Me:
    node = "n1"
    beats = 0

    async def beat(self) -> None:
        self.beats += 1


async def test_a_proposal_names_the_view_that_it_was_decided_on() -> None:
    """A beat comes between the first and the second of one round: what it brought nobody has counted."""
    snapshot, store, me = Snapshot(Timing()), Proposals(), Me()
    snapshot.rev = 7
    jobs = [make_job(uid=f"u-{i}", spec=make_spec(name=f"j{i}", size=(1, 1))) for i in range(2)]
    nodes = [make_node("n1", ready=dict.fromkeys(("u-0", "u-1"), READY))]
    view = replace(make_cluster(nodes, *jobs), rev=snapshot.cluster(0.0).rev)
    context = SimpleNamespace(
        node="n1", timing=Timing(), store=store, host=SimpleNamespace(status=dict), clock=SimpleNamespace(now=float),
        random_id=lambda: "g", snapshot=snapshot, undecided=Undecided("n1", Metrics().left_undecided),
    )  # fmt: skip
    none = cast(Any, None)
    applier = Applier(cast(Any, context), cast(Any, me), seal=none, verifier=none, stopwatch=none, reach=none)
    turns = ProposalTurns(cast(Any, context), applier)
    decision = decide(view, jobs[0], WALL)
    refused = await turns.take(view, jobs[0], Decision(Remove(), ("it has ended",)), 0)
    assert (refused, me.beats) == ((False, None), 1), "a removal that is refused keeps no other job back"
    for job in jobs:
        await turns.take(view, job, decision, 0)
        snapshot.rev += 1
    assert [one.read for one in store.made] == [7, 7]
    assert snapshot.cluster(0.0).rev == 9, "another view, though all else is as it was"


class Nothing:
    """The parts of a round that are not about jobs' next steps: none of them has anything to do."""

    next_end, due = None, 1e9
    pods: Mapping[str, PodStatus] = MappingProxyType({})

    def plan(self, cluster: Cluster) -> int:
        return id(cluster.jobs)

    def is_news(self, cluster: Cluster) -> bool:
        return False

    async def act(self, cluster: Cluster) -> tuple[bool, bool]:
        return False, True

    async def none(self, cluster: Cluster) -> bool:
        return False

    publish = remove = shelve = tell_recoveries = none


def the_rounds(
    view: Callable[[], Cluster], store: Proposals, undecided: Undecided, snapshot: Snapshot | None = None
) -> Rounds:
    """Of n1, with nothing to do but the jobs' next steps. ``snapshot``: one of which there is something to count."""
    metrics = Metrics()
    nothing, none = cast(Any, Nothing()), cast(Any, None)
    context = cast(Any, SimpleNamespace(
        node="n1", timing=Timing(), store=store, host=SimpleNamespace(status=dict),
        clock=SimpleNamespace(now=itertools.count().__next__, wall=lambda: WALL), random_id=lambda: "g",
        snapshot=snapshot or Snapshot(Timing()), metrics=metrics, undecided=undecided,
    ))  # fmt: skip
    applier = Applier(context, cast(Any, Me()), seal=none, verifier=none, stopwatch=none, reach=none)
    return Rounds(
        context, view, own=nothing, publisher=nothing, turns=ProposalTurns(context, applier), ended=nothing,
        restarts=RestartCounter("n1", metrics),
    )  # fmt: skip


def test_what_was_counted_is_looked_at_again_only_when_a_record_has_changed() -> None:
    """With each beat, it would be a part of what an agent at rest does."""
    snapshot, looks = Snapshot(Timing()), list[int]()
    job = make_job("running", GENERATION, active=1)

    def view() -> Cluster:
        looks.append(snapshot.rev)
        return RUNS

    def count(times: int = 2) -> list[int]:
        looks.clear()
        for _ in range(times):
            rounds.count()
        return looks

    rounds = the_rounds(view, Proposals(), Undecided("n1", Metrics().left_undecided), snapshot)
    assert count() == [], "of a view that is not whole nobody knows what it lacks"
    snapshot.rev, snapshot.complete = 5, True
    assert count() == [5]
    snapshot.rev = 6  # as of a node
    assert count() == [6]
    snapshot.absorb_job(job.model_copy(update={"rev": 7}))  # by a wake, before the beat that brings the revision
    assert count() == [6]
    snapshot.era = "another"
    assert count() == [6]
    assert count() == []


async def test_jobs_behind_one_whose_step_fails_each_time_are_decided() -> None:
    """The round ended there, in every agent: no job behind that one was looked at."""
    store = Proposals()
    forming = make_generation(("n1",), state="forming", acks=("n1",))
    jobs = [
        make_job("forming", forming, uid="u-0", spec=make_spec(name="j0", size=(1, 1))),
        make_job(uid="u-1", spec=make_spec(name="j1", size=(1, 1)), order=1),
    ]
    ready = dict.fromkeys(("u-0", "u-1"), READY)
    view = make_cluster([make_node("n1", ready=ready), make_node("n2", ready=ready)], *jobs)
    rounds = the_rounds(lambda: view, store, Undecided("n1", Metrics().left_undecided))
    for _ in range(5):  # of these jobs one is another agent's turn first
        await rounds.once()
    assert store.failed >= 3
    assert [proposal.uid for proposal in store.made][:3] == ["u-1"] * 3


def odd(uid: str, *acks: str) -> JobRecord:
    """No cause can be read: of a member that is gone no step can be decided, nor how its pod here is stopped."""
    generation = make_generation(("n1", "n2"), state="forming", acks=acks).model_copy(update={"cause": None})
    return make_job("forming", generation, uid=uid, spec=make_spec(name="odd", size=(1, 2)))


def undecided_total(metrics: Metrics, kind: str) -> float | None:
    return metrics.registry.get_sample_value("nodeagent_undecided_total", {"decision": kind})


async def test_a_decision_that_raises_concerns_its_job_alone() -> None:
    """It ended the agent, on each node that had the record, again and again."""
    store, metrics = Proposals(), Metrics()
    undecided = Undecided("n1", metrics.left_undecided)
    good = make_job(uid="u-1", spec=make_spec(name="good", size=(1, 1)), order=1)
    nodes = [make_node("n1", ready={"u-1": READY}), make_node("n2", lost=True)]
    views = [make_cluster(nodes, odd("u-0"), good), make_cluster(nodes, odd("u-0"))]
    shown = views[0]
    rounds = the_rounds(lambda: shown, store, undecided)
    with capture_logs() as logs:
        for _ in range(3):
            await rounds.once()
        assert {proposal.uid for proposal in store.made} == {"u-1"}
        shown = views[1]
        changed, _ = await rounds.once()
        assert not changed
    errors = [one for one in logs if one["event"].startswith("a decision failed")]
    assert [(one["uid"], one["decision"], one["log_level"]) for one in errors] == [("u-0", "step", "error")]
    assert isinstance(errors[0]["exc_info"], AttributeError), "with the traceback"
    assert (undecided_total(metrics, "step"), undecided_total(metrics, "pod")) == (1, 0)
    assert "its next step" in undecided.of("u-0")[0]
    assert "AttributeError in job/gang.py, line " in undecided.now["u-0"]
    assert rounds.rests_until == 0, "it is not tried again and again: only another view lets it be looked at"
    shown = make_cluster(nodes)
    await rounds.once()
    assert not undecided.now, "it is gone"


def test_words_that_raise_concern_their_job_alone() -> None:
    """They are worked out when somebody asks, and not where the step is decided."""
    undecided = Undecided("n1", Metrics().left_undecided)
    good = make_job(spec=make_spec(size=(3, 3)))
    no_cordon = make_node("n1", ready={}).model_copy(update={"cordon": False})  # and not None either
    roles = tuple(good.spec.role.model_copy(update={"name": name}) for name in "ab")
    several = make_job(uid="u-1", spec=good.spec.model_copy(update={"roles": roles}), order=1)
    view = make_cluster([no_cordon, "n2", make_node("n3", lost=True)], good, several)
    rounds = the_rounds(lambda: view, Proposals(), undecided)
    assert rounds.step(view, several) is not None
    assert not undecided.now
    with capture_logs():
        assert rounds.why(view, several) == ()
    assert [*undecided.now] == ["u-1"]
    assert rounds.why(view, good) == ("needs 3 nodes, 1 fit",)
    assert [*undecided.now] == ["u-1"]


def test_a_pod_whose_rule_raises_keeps_no_other_from_its_own() -> None:
    metrics = Metrics()
    undecided = Undecided("n1", metrics.left_undecided)
    plan = PodPlan("n1", undecided)
    good = make_job("running", GENERATION, active=1)
    view = make_cluster(NODES, odd("u-0"), good)
    runs = PodStatus(uid="u-0", phase="running", highest=GENERATION.token)
    with capture_logs() as logs:
        for _ in range(3):
            actions = plan(view, ME, PREFORKED | {"u-0": runs.model_copy()}, 2, ())
            assert [(type(action), action.uid) for action in actions] == [(Start, UID)], "what runs is left"
    assert [one["decision"] for one in logs] == ["pod"]
    assert undecided_total(metrics, "pod") == 1
    repaired = make_job("forming", make_generation(("n1", "n2"), state="forming"), uid="u-0")
    assert len(plan(make_cluster(NODES, repaired, good), ME, PREFORKED | {"u-0": runs}, 2, ())) == 2
    assert not undecided.now
    assert not undecided.of("u-0")


@pytest.mark.parametrize("raised", [asyncio.CancelledError, KeyboardInterrupt, MemoryError])
def test_what_is_no_defect_of_a_decision_is_not_caught(raised: type[BaseException]) -> None:
    undecided = Undecided("n1", (metrics := Metrics()).left_undecided)

    def decide_it() -> Decision:
        raise raised

    with pytest.raises(raised):
        undecided.guard("step", UID, decide_it)
    assert undecided_total(metrics, "step") == 0
    assert not undecided.now


def test_a_job_that_is_gone_is_forgotten() -> None:
    undecided = Undecided("n1", (metrics := Metrics()).left_undecided)
    for known in ({UID}, {UID}, set[str](), {UID}):
        undecided.guard("step", UID, lambda: 1 // 0)
        undecided.keep(known, ())
        assert bool(undecided.now) == bool(known)
    assert undecided_total(metrics, "step") == 2
