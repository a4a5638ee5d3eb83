"""Roles of a gang stop in the reverse of the order in which they start, across nodes."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Member, Place, Token
from nodeagent.plan.pods.actions import SendAck, Stop
from nodeagent.plan.pods.stopping import newly_down, stops_later
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import UID, life, make_cluster, make_generation, make_job, make_spec
from tests.unit.plan.planning import plan_node

G1 = Token(number=1, id="g1")
SPEC = make_spec()


def role(name: str, *after: str) -> Role:
    return SPEC.role.model_copy(update={"name": name, "after": after})


CHAIN = (role("server"), role("trainer", "server"), role("judge", "trainer"))


def holder(node: str, roles: tuple[str, ...], down: tuple[str, ...] = ()) -> Member:
    """With one place of each of these roles, whose ranks are 0, 1, ... on each node."""
    places = tuple(Place(role=name, index=0, workers=1, devices=("cpu0",)) for name in roles)
    return Member(
        node=node, life=life(node), group_rank=0, first_rank=0, workers=len(roles), devices=("cpu0",), places=places,
        down=down,
    )  # fmt: skip


def stopping(*holders: Member, roles: tuple[Role, ...] = CHAIN, planned: bool = True) -> JobRecord:
    """A job whose generation 1 stops on these nodes."""
    ended = make_generation([], state="ended", number=1, planned=planned)
    ended = ended.model_copy(update={"holders": {one.node: one for one in holders}})
    spec = SPEC.model_copy(update={"roles": roles})
    return make_job("pausing", ended, spec=spec, last_number=1, desired="pause")


def status(*exited: int, of: int = 2, phase: str = "stopping") -> PodStatus:
    workers = tuple(
        WorkerState(rank=rank, local_rank=rank, pid=7 + rank, state="exited" if rank in exited else "running")
        for rank in range(of)
    )
    return PodStatus.model_validate({"uid": UID, "phase": phase, "generation": G1, "highest": G1, "workers": workers})


def later(job: JobRecord, node: str, lapsed: tuple[str, ...] = ()) -> tuple[str, ...]:
    assert job.generation is not None
    return stops_later(make_cluster(["n1", "n2"], job, lapsed=lapsed), job, job.generation, node)


def down(job: JobRecord, now: PodStatus) -> tuple[str, ...]:
    assert job.generation is not None
    return newly_down(job, job.generation, "n1", now)


@pytest.mark.parametrize(
    ("here", "there", "there_down", "waits"),
    [
        (("server",), ("trainer",), (), ("server",)),
        (("server",), ("judge",), (), ("server",)),
        (("server", "trainer"), ("server", "trainer"), (), ("server",)),
        (("server", "trainer"), ("judge",), (), ("server", "trainer")),
        (("server", "trainer"), ("server", "trainer"), ("trainer",), ()),
        (("trainer",), ("server",), (), ()),
        (("trainer",), ("trainer",), (), ()),
    ],
)
def test_roles_wait_for_workers_on_other_nodes(
    here: tuple[str, ...], there: tuple[str, ...], there_down: tuple[str, ...], waits: tuple[str, ...]
) -> None:
    assert later(stopping(holder("n1", here), holder("n2", there, there_down)), "n1") == waits


def test_nobody_waits_for_a_node_that_is_silent_or_lets_go() -> None:
    job = stopping(holder("n1", ("server",)), holder("n2", ("trainer",)))
    assert later(job, "n1", lapsed=("n2",)) == ()
    assert later(stopping(holder("n1", ("server",))), "n1") == ()
    plain = tuple(role(one.name) for one in CHAIN)
    assert later(stopping(holder("n1", ("server",)), holder("n2", ("trainer",)), roles=plain), "n1") == ()


@pytest.mark.parametrize(
    ("there", "known", "exited", "of_phase", "announced"),
    [
        (("server",), (), (1,), "stopping", ("trainer",)),
        (("server",), (), (), "stopping", ()),
        (("server",), (), (0,), "stopping", ()),  # who waits for servers?
        (("server",), ("trainer",), (1,), "stopping", ()),  # the store knows it
        (("trainer",), (), (1,), "stopping", ()),  # nobody waits for it
        (("server",), (), (1,), "running", ()),  # nobody has asked them to stop
    ],
)
def test_what_has_ended_is_announced_where_others_wait_for_it(
    there: tuple[str, ...], known: tuple[str, ...], exited: tuple[int, ...], of_phase: str, announced: tuple[str, ...]
) -> None:
    job = stopping(holder("n1", ("server", "trainer"), known), holder("n2", there))
    assert down(job, status(*exited, phase=of_phase)) == announced


def test_a_worker_that_never_started_has_ended() -> None:
    job = stopping(holder("n1", ("server", "trainer")), holder("n2", ("server",)))
    assert down(job, status(of=1)) == ("trainer",)


def test_two_nodes_with_servers_and_trainers_stop_in_order() -> None:
    """Neither waits for the other for ever: each tells when its trainers have ended."""
    both = ("server", "trainer")
    job = stopping(holder("n1", both), holder("n2", both))
    first = act(job, status())
    assert isinstance(first, Stop)
    assert (first.grace, first.later) == (30.0, ("server",))
    announced = act(job, status(1))
    assert isinstance(announced, SendAck)
    assert (announced.ack.down, announced.ack.ended, announced.last) == (("trainer",), True, None)
    known = stopping(holder("n1", both, ("trainer",)), holder("n2", both))
    assert act(known, status(1)) == first
    last = act(stopping(holder("n1", both, ("trainer",)), holder("n2", both, ("trainer",))), status(1))
    assert isinstance(last, Stop)
    assert last.later == ()


def test_a_kill_has_no_order() -> None:
    job = stopping(holder("n1", ("server", "trainer")), holder("n2", ("trainer",)), planned=False)
    stop = act(job, status(1))
    assert isinstance(stop, Stop)
    assert (stop.grace, stop.later) == (None, ())


def act(job: JobRecord, now: PodStatus) -> object:
    """What n1 does first."""
    return plan_node(make_cluster(["n1", "n2"], job), "n1", Incarnation(life=life("n1"), start=3), {UID: now}, 2)[0]
