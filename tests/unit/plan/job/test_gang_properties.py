"""Safety of decisions over random states: never an exception, never a proposal that the store would have to refuse,
never a step that the table of phases does not know."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import assume, given
from hypothesis import strategies as st

from nodeagent.model.job import TERMINAL, BudgetEntry, Control, Desired, JobRecord, Phase, Scale
from nodeagent.model.jobspec import Policy, RestartLimits
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodPhase
from nodeagent.model.world import CauseKind, Generation, Member, PodReport
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.members import gone_nodes
from nodeagent.plan.pods.actions import SendAck, SetFailsafeMembers, Start
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.steps import Activate, End, Propose, Remove, Settle, phase_may_become
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    READY,
    REPEATABLE,
    SUCCEEDED,
    UNFIT,
    VICTIM,
    WALL,
    failed,
    life,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_node,
    make_spec,
    spend,
)
from tests.unit.plan.planning import plan_node

NAMES = [f"n{i}" for i in range(1, 7)]
UIDS = ["u-a", "u-b", "u-c"]
SOME = st.sets(st.sampled_from(NAMES))
REPORTS: list[PodReport] = [
    PodReport(state="running"), SUCCEEDED, SUCCEEDED, failed(make_exit(code=7)), failed(make_exit(error=VICTIM)),
    failed(make_exit(code=101)), failed(make_exit(signal=9)), PodReport(state="lost", seq=1),
    PodReport(state="fenced", seq=2), PodReport(state="refused", seq=3),
]  # fmt: skip
LIVE: list[Phase] = ["queued", "forming", "running", "holding", "pausing", "paused"]
DESIRED: list[Desired] = ["run", "run", "run", "run", "pause", "stop"]
CAUSES: list[CauseKind] = ["start", "collective", "worker_failed", "node_lost", "scale"]
KINDS = ["collective", "collective", "worker_failed", "node_lost"]


@st.composite
def generations(draw: st.DrawFn, phase: Phase, free: dict[str, list[str]], size: tuple[int, int]) -> Generation | None:
    """A generation that suits the phase, on devices that no other job has."""
    able = [n for n in NAMES if free[n]]
    low, high = size
    if phase == "queued" or len(able) < low:
        return None
    chosen = draw(st.lists(st.sampled_from(able), unique=True, min_size=low, max_size=min(high, len(able))))
    state = {"forming": "forming", "running": "active"}.get(phase, "ended")
    holders = draw(st.sets(st.sampled_from(chosen))) if state != "active" and phase != "paused" else set()
    generation = make_generation(
        chosen,
        number=draw(st.integers(1, 3)),
        cause=draw(st.sampled_from(CAUSES)),
        acks=[n for n in chosen if n not in holders and draw(st.booleans())] if state == "forming" else chosen,
        reports={n: draw(st.sampled_from(REPORTS)) for n in chosen if draw(st.booleans())} if state == "active" else {},
        since=draw(st.sampled_from([0, NOW - 1000])),
        deadline=draw(st.sampled_from([NOW - 1, NOW + 1])),
        control_rev=draw(st.integers(1, 2)),
        planned=draw(st.booleans()),
    )
    members: dict[str, Member] = {}
    for n, m in generation.members.items():
        of_life = life(n) if draw(st.integers(0, 5)) else "an-old-life"
        members[n] = m.model_copy(update={"devices": (free[n].pop(),), "life": of_life})
    held = {n: members[n] for n in holders}
    return Generation.model_validate(generation.model_dump() | {"state": state, "members": members, "holders": held})


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes: list[NodeRecord] = []
    for n in draw(SOME):
        readiness = {uid: draw(st.sampled_from([READY, READY, READY, PREPARING, UNFIT])) for uid in UIDS}
        flags = draw(st.sampled_from(["", "", "", "", "cordon", "drain", "lost", "left"]))
        nodes.append(
            make_node(
                n,
                slots=draw(st.integers(2, 4)),
                ready=readiness if draw(st.integers(0, 4)) else {},
                cordon=flags == "cordon",
                drain=flags == "drain",
                lost=flags == "lost",
                left=flags == "left",
                joined=draw(st.sampled_from([0, NOW - 1000])),
            )
        )
    free = {n: ["cpu1", "cpu0"] for n in NAMES}
    jobs = [draw(jobs_on(uid, free, i)) for i, uid in enumerate(UIDS[: draw(st.integers(1, 3))])]
    return make_cluster(nodes, *jobs, lapsed=draw(st.sets(st.sampled_from(NAMES), max_size=2)))


@st.composite
def jobs_on(draw: st.DrawFn, uid: str, free: dict[str, list[str]], order: int) -> JobRecord:
    low = draw(st.integers(1, 3))
    size = (low, low + draw(st.integers(0, 2)))
    phase: Phase = draw(st.sampled_from([*LIVE, "failed"]))
    generation = draw(generations(phase, free, size))
    if generation is None and phase in ("forming", "running", "pausing"):
        phase = "queued"
    active = None
    if generation is not None and (generation.state == "active" or generation.holders or draw(st.booleans())):
        active = generation.number if generation.state != "forming" else max(1, generation.number - 1)
    budget: dict[str, BudgetEntry] = {}
    if active is not None and phase != "running" and draw(st.booleans()):
        budget[str(active)] = spend(draw(st.sampled_from(KINDS)), counts=draw(st.booleans()))
    reports = {n: draw(st.sampled_from(REPORTS)) for n in draw(SOME)} if active is not None else {}
    target = draw(st.integers(*size))
    scale = Scale(
        request="r",
        want=target,
        before=draw(st.integers(*size)),
        deadline=draw(st.sampled_from([0, NOW - 1, NOW + 1])),
        grace=draw(st.sampled_from([None, 2.0])),
        leaving=tuple(draw(st.sets(st.sampled_from(NAMES), max_size=2))),
        state=draw(st.sampled_from(["pending", "pending", "met", "rolled_back", "set"])),
    )
    spec = make_spec(
        size=size,
        name=f"j{order}",
        restarts=RestartLimits(max=draw(st.integers(0, 2)), backoff_min=draw(st.sampled_from([0.0, 5.0]))),
        policies=draw(st.sampled_from([(), (Policy(on=("*",), do="FailJob"),)])),
        hold_timeout=draw(st.sampled_from([None, 1.0])),
        priority=draw(st.integers(0, 1)),
    )
    return make_job(
        phase,
        generation,
        uid=uid,
        spec=spec,
        target=target,
        scale=draw(st.sampled_from([None, scale])),
        desired=draw(st.sampled_from(DESIRED)),
        rev=2,
        restart=draw(st.integers(0, 1)),
        delete=draw(st.booleans()),
        active=active,
        budget=budget,
        last_reports=reports,
        restarts=draw(st.integers(0, 1)),
        since=draw(st.sampled_from([0, NOW - 1000])),
        order=order,
        not_before=draw(st.sampled_from([0, NOW + 1000])) if phase == "holding" else 0,
    )


@REPEATABLE
@given(clusters())
def test_every_decision_is_safe_and_says_why(cluster: Cluster) -> None:
    for job in cluster.jobs.values():
        decision = decide(cluster, job, WALL)
        assert decision == decide(cluster, job, WALL)
        assert all(decision.why)
        match decision.step:
            case Propose() as step:
                assert decision.why
                check_proposal(cluster, job, step)
                assert job.phase not in TERMINAL
                assert phase_may_become(job.phase, "forming")
            case End() as step:
                assert decision.why
                assert step.reason
                assert phase_may_become(job.phase, step.phase), f"{job.phase} -> {step.phase}"
                assert set(step.lost) == set(gone_nodes(cluster, job))
                assert (step.phase in TERMINAL) == (step.outcome is not None)
            case Activate(token):
                assert job.generation is not None
                assert job.generation.token == token
                assert not job.generation.holders
                assert not job.generation.missing
                assert all(cluster.live(n, m.life) for n, m in job.generation.members.items())
            case Settle(control):
                check_settled(cluster, job, control)
            case Remove():
                assert job.phase in TERMINAL
                assert job.control.delete


def check_settled(cluster: Cluster, job: JobRecord, control: Control) -> None:
    """It ends once, keeps the target within the sizes, and never takes a node from a gang that has formed."""
    before, after = job.control.scale, control.scale
    assert before is not None
    assert after is not None
    assert (before.state, after.state in ("met", "rolled_back")) == ("pending", True)
    assert after.reason
    assert control == job.control.model_copy(update={"target": control.target, "scale": after})
    size = job.spec.nodes
    assert size.min <= control.target <= size.max
    if after.state == "met":
        assert control.target == job.control.target
    else:
        assert 0 < before.deadline <= cluster.served
        assert control.target >= before.before
        if job.generation is not None and job.generation.state != "ended":
            assert len(job.generation.members) <= control.target


def check_proposal(cluster: Cluster, job: JobRecord, step: Propose) -> None:
    size = job.spec.nodes
    assert size.min <= len(step.members) <= min(size.max, job.control.target)
    growing = job.control.growing
    assert growing is None or len(step.members) >= growing.want or len(step.members) <= growing.before
    assert set(step.lost) == set(gone_nodes(cluster, job))
    for node, member in step.members.items():
        record = cluster.nodes[node]
        assert cluster.live(node, member.life)
        assert record.cordon is None
        assert set(member.devices) <= set(record.facts.devices())
        for other in cluster.jobs.values():
            if other.uid == job.uid or other.generation is None:
                continue
            theirs = other.generation.members.get(node) if other.generation.state != "ended" else None
            holder = other.generation.holders.get(node)
            for has in (theirs, holder):
                if has is not None and not cluster.gone(node, has.life):
                    assert not set(has.devices) & set(member.devices)
    ordered = sorted(step.members.values(), key=lambda m: m.group_rank)
    assert [r for m in ordered for r in range(m.first_rank, m.first_rank + m.workers)] == list(
        range(sum(m.workers for m in ordered))
    )
    last = [m.node for m in job.generation.ordered()] if job.generation is not None else []
    assert [m.node for m in ordered if m.node in last] == [n for n in last if n in step.members]


PHASES = get_args(PodPhase)


@REPEATABLE
@given(clusters(), st.data())
def test_pods_start_only_what_is_active_and_acknowledge_only_when_quiet(cluster: Cluster, data: st.DataObject) -> None:
    for node, record in cluster.nodes.items():
        statuses = {}
        for uid, job in cluster.jobs.items():
            tokens = [None] + ([job.generation.token] if job.generation is not None else [])
            if data.draw(st.booleans()):
                statuses[uid] = PodStatus.model_validate(
                    {
                        "uid": uid,
                        "phase": data.draw(st.sampled_from(PHASES)),
                        "highest": data.draw(st.sampled_from(tokens)),
                        "generation": data.draw(st.sampled_from(tokens)),
                    }
                )
        for action in plan_node(cluster, node, record.incarnation, statuses, 2):
            assert action.why
            status, job = statuses.get(action.uid), cluster.jobs[action.uid]
            assert isinstance(action, SetFailsafeMembers) or status is None or status.phase != "unknown"
            if isinstance(action, Start):
                assert status is not None
                assert job.generation is not None
                assert job.generation.state == "active"
                assert status.highest == action.token == job.generation.token
                assert status.quiet
            if isinstance(action, SendAck):
                assert status is None or status.quiet or (status.phase == "stuck" and action.ack.stuck)


def at_another_time(cluster: Cluster, later: int) -> Cluster:
    """The same records, with nothing kept of what was worked out from them."""
    served = cluster.served + later
    back = dict.fromkeys(cluster.nodes, served)
    return replace(cluster, served=served, next_lapse=later % 7, returned=back, notes=Notes())


@REPEATABLE
@given(clusters(), st.sampled_from([1, 5_000, 61_000, 10**9]))
def test_what_is_steady_no_passing_of_time_changes_before_its_end(cluster: Cluster, later: int) -> None:
    for job in cluster.jobs.values():
        found = decide(cluster, job, WALL)
        if found.steady:
            assert found.step is None
            passes = min(later, found.at - 1 - cluster.served) if found.at else later
            again = decide(at_another_time(cluster, passes), job, WALL + later)
            assert (again, again.steady) == (found, True)


@REPEATABLE
@given(clusters(), st.sampled_from([1, 5_000, 61_000, 10**9]))
def test_what_a_node_does_for_its_pods_does_not_depend_on_the_time(cluster: Cluster, later: int) -> None:
    """So a plan may be kept (``agent/rounds.py``); what is reserved for others may lapse, and is looked at there."""
    then = at_another_time(cluster, later)
    assume(reserved(then) == reserved(cluster))
    for node in cluster.nodes.values():
        statuses = {uid: PodStatus(uid=uid, phase="ready") for uid in cluster.jobs}
        now = plan_node(cluster, node.id, node.incarnation, statuses, 1)
        assert plan_node(then, node.id, node.incarnation, statuses, 1) == now
