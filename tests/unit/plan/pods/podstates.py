"""A pod on one node, its job in some state, and what the node does then: for the tests of ``plan/pods``."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Generation, PodReport, Token
from nodeagent.plan.pods.actions import PodAction, Stop
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import UID, life, make_cluster, make_generation, make_job, make_node
from tests.unit.plan.planning import plan_node

OLD, NEW = Token(number=1, id="g1"), Token(number=2, id="g2")
RUNNING = (WorkerState(rank=0, local_rank=0, pid=7, state="running"),)
ENDED = (WorkerState(rank=0, local_rank=0, pid=7, state="exited", exit=0),)


def status(phase: str, **more: object) -> PodStatus:
    return PodStatus.model_validate({"uid": UID, "phase": phase} | more)


def act(
    job: JobRecord | None, now: PodStatus | None, *, node: str = "n1", nodes: tuple[str, ...] = ("n1", "n2")
) -> PodAction | None:
    """The first action for the only pod; only a stop has another one beside it."""
    actions = acts(job, now, node=node, nodes=nodes)
    assert len(actions) <= (2 if actions and isinstance(actions[0], Stop) else 1)
    return actions[0] if actions else None


def acts(
    job: JobRecord | None, now: PodStatus | None, *, node: str = "n1", nodes: tuple[str, ...] = ("n1", "n2")
) -> tuple[PodAction, ...]:
    cluster = make_cluster([make_node(n) for n in nodes], *([job] if job is not None else []))
    statuses = {UID: now} if now is not None else {}
    return plan_node(cluster, node, Incarnation(life=life(node), start=3), statuses, 2)


def forming(
    holders: tuple[str, ...] = ("n1", "n2"),
    *,
    planned: bool = False,
    acks: tuple[str, ...] = (),
    members: tuple[str, ...] = ("n1", "n2"),
) -> JobRecord:
    generation = make_generation(
        members, state="forming", number=2, cause="restart", holders=holders, planned=planned, acks=acks
    )
    return make_job("forming", generation, active=1)


def active(
    reports: dict[str, PodReport] | None = None, members: tuple[str, ...] = ("n1", "n2"), workers: int = 1
) -> JobRecord:
    return make_job("running", make_generation(members, number=2, reports=reports, workers=workers), target=2)


def ended_generation(*holders: str) -> Generation:
    return make_generation(["n1", "n2"], state="ended", holders=holders, planned=True)
