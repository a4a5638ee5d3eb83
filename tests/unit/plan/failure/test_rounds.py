"""Roles that are started again as a whole: who stops for which round, and when it starts."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Nodes, Policy, RestartLimits, Role
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import AloneRestart, Generation, Member, Place, PodReport
from nodeagent.plan.failure.budget import restarts_spent
from nodeagent.plan.failure.faults import find_fault
from nodeagent.plan.failure.rounds import Round, next_round, round_wait, unable
from nodeagent.plan.pods.actions import PodAction, Release, ReportPod, StartRole, Stop, StopRole
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import NOW, UID, make_cluster, make_exit, make_generation, make_job, make_spec
from tests.unit.plan.planning import plan_node

NODES = ("n1", "n2", "n3")
"""Each has a server, and each but the last a trainer."""


def member(index: int) -> Member:
    node = NODES[index]
    places = [Place(role="server", index=index, workers=1, devices=("cpu0",))]
    if index < 2:
        places.append(Place(role="trainer", index=index, workers=1, devices=("cpu1",)))
    devices = tuple(place.devices[0] for place in places)
    return Member(
        node=node, life=f"life-{node}", group_rank=index, first_rank=2 * index, workers=len(places), devices=devices,
        places=tuple(places),
    )  # fmt: skip


def generation(**reports: PodReport) -> Generation:
    members = {NODES[index]: member(index) for index in range(3)}
    return make_generation(NODES, reports=reports).model_copy(update={"members": members})


def promised(number: int, *failed: int, state: str = "running", at: int = NOW) -> PodReport:
    """A report of n1's. ``failed``: the rounds that its trainer was started again for."""
    alone = tuple(
        AloneRestart(rank=1, order=i, at=at + i, exit=7, text="trainer.0, rank 1, failed: exit code 7", round=number)
        for i, number in enumerate(failed)
    )
    return PodReport.model_validate({"state": state, "rounds": {"trainer": number}, "alone": alone})


def on_n2(report: PodReport) -> PodReport:
    """The same of n2's trainer."""
    return report.model_copy(update={"alone": tuple(one.model_copy(update={"rank": 3}) for one in report.alone)})


def job(now: Generation, limits: RestartLimits | None = None) -> JobRecord:
    one = Nodes(min=1, max=3, target=2)
    again = (Policy(on=("WorkerFailed",), do="RestartTask"),)
    roles = (
        Role(name="server", command=("s",), nodes=one),
        Role(name="trainer", command=("t",), nodes=one, policies=again, after=("server",)),
    )
    spec = make_spec(restarts=limits).model_copy(update={"roles": roles, "completes": "trainer"})
    return make_job(spec=spec, phase="running", generation=now)


@pytest.mark.parametrize(
    ("reports", "reached", "down", "expected"),
    [
        ({}, 0, False, None),
        ({"n1": 1}, 0, False, Round("trainer", 1, starts=False)),
        ({"n1": 3}, 1, True, Round("trainer", 3, starts=False)),  # it had not even started the round before
        ({"n1": 1}, 1, True, None),  # of the other nothing is known
        ({"n1": 1, "n2": 0}, 1, True, None),
        ({"n1": 1, "n2": 1}, 1, False, None),  # it has been started
        ({"n1": 1, "n2": 1}, 1, True, Round("trainer", 1, starts=True)),
        ({"n1": 2, "n2": 1}, 1, True, Round("trainer", 2, starts=False)),
        ({"n1": 1, "n2": 2}, 2, True, None),
    ],
)
def test_what_is_next(reports: dict[str, int], reached: int, down: bool, expected: Round | None) -> None:
    now = generation(**{node: promised(number) for node, number in reports.items()})
    assert next_round(now, member(1), {"trainer": reached} if reached else {}, ["trainer"] if down else []) == expected
    assert next_round(now, member(2), {}, []) is None, "it has no trainers"


def test_whose_pod_is_over_cannot_start_again() -> None:
    well = PodReport(state="succeeded")
    assert unable(generation(n1=promised(1, 1))) is None
    assert unable(generation(n1=promised(1, 1), n2=well)) == ("trainer", "n2")
    assert unable(generation(n1=promised(1, 1), n3=well)) is None, "n3 has none"
    assert unable(generation(n1=promised(1, 1), n2=promised(1, state="succeeded"))) is None, (
        "it had started again before"
    )
    now = generation(n1=promised(1, 1), n2=well)
    fault = find_fault(make_cluster(NODES, job(now)), job(now), 0.0)
    assert fault is not None and fault.fail == ""
    assert fault.cause.text == (
        "trainer.0, rank 1, failed: exit code 7 on n1, and trainer cannot be started again alone: n2 has ended well"
    )


@pytest.mark.parametrize(("others", "spent"), [(0, 1), (1, 2)])
def test_a_round_that_a_stranger_s_port_led_to_costs_nothing(others: int, spent: int) -> None:
    """n1's trainer failed since n2's port is somebody else's, and no round began since. An earlier one did, and so has
    this one if n2 has promised it too."""
    robbed = {"state": "failed", "taken": "uid 7 listens on port 9", "seq": 1, "rounds": {"trainer": others + 1}}
    now = generation(n1=promised(2, 1, 2), n2=PodReport.model_validate(robbed))
    fault = find_fault(make_cluster(NODES, job(now)), job(now), 0.0)
    assert fault is not None and (fault.cause.kind, fault.spend.counts) == ("port_taken", False)
    after = make_job("running", spec=job(now).spec, budget={"1": fault.spend})
    assert restarts_spent(after, NOW) == spent


def test_which_failure_is_behind_a_restart_is_known_though_another_role_was_started_again_since() -> None:
    first = promised(1, 1)
    since = AloneRestart(rank=0, order=1, at=NOW + 5, exit=9, text="server.0, rank 0, failed: exit code 9")
    now = generation(n1=first.model_copy(update={"alone": (*first.alone, since)}), n2=PodReport(state="succeeded"))
    fault = find_fault(make_cluster(NODES, job(now)), job(now), 0.0)
    assert fault is not None and (fault.cause.rank, fault.spend.exit) == (1, 7)
    assert fault.cause.text.startswith("trainer.0, rank 1, failed: exit code 7 on n1, and trainer cannot be started")


def test_all_that_fail_in_one_round_cost_one_restart() -> None:
    now = generation(n1=promised(2, 1, 2), n2=on_n2(promised(2, 2, at=NOW - 5)))
    assert restarts_spent(job(now), NOW) == 2
    limits = RestartLimits(max=2, window=60)
    assert find_fault(make_cluster(NODES, job(now, limits)), job(now, limits), 0.0) is None
    now = generation(n1=promised(3, 1, 2, 3), n2=on_n2(promised(3, 2)))
    fault = find_fault(make_cluster(NODES, job(now, limits)), job(now, limits), 0.0)
    assert fault is not None and fault.fail.startswith("restart budget spent: 2 restarts within 60 s; last: trainer.0")


def test_it_waits_the_longer_the_more_often_it_failed() -> None:
    limits = RestartLimits(window=60, backoff_min=0.25, backoff_max=3)
    waits = []
    for times in (1, 2, 3, 5, 9):
        now = generation(n1=promised(times, *range(1, times + 1)), n2=on_n2(promised(times, 1)))
        waits.append(round_wait(job(now, limits), now, "trainer", NOW))
        assert round_wait(job(now, limits), now, "trainer", NOW + 61_000) == 0.25, "that is long ago"
    assert waits == [0.25, 0.25, 0.5, 2, 3]


def action(now: Generation, status: dict[str, object]) -> PodAction | None:
    """Of n2, whose server and trainer run."""
    workers = tuple(WorkerState(rank=r, local_rank=r - 2, pid=7, state="running") for r in (2, 3))
    plain = {"uid": UID, "phase": "running", "generation": now.token, "highest": now.token, "workers": workers}
    statuses = {UID: PodStatus.model_validate(plain | status)}
    found = plan_node(make_cluster(NODES, job(now)), "n2", Incarnation(life="life-n2", start=1), statuses, 1)
    return found[0] if found else None


def test_what_a_node_does() -> None:
    down: dict[str, object] = {"rounds": {"trainer": 1}, "down": ("trainer",)}
    now = generation(n1=promised(1, 1))
    stop = action(now, {})
    assert isinstance(stop, StopRole) and (stop.role, stop.number) == ("trainer", 1)
    assert stop.why == "a worker of trainer failed: the role is started again on n1, n2"
    report = action(now, down)
    assert isinstance(report, ReportPod) and report.report.rounds == {"trainer": 1}
    assert report.why == "down, to be started again with all of their role: the workers of trainer"
    start = action(generation(n1=promised(1, 1), n2=promised(1)), down)
    assert isinstance(start, StartRole) and (start.role, start.number, start.wait) == ("trainer", 1, 0)
    assert action(generation(n1=promised(1, 1), n2=promised(1)), {"rounds": {"trainer": 1}}) is None, "it has started"
    assert action(generation(n1=promised(0), n2=promised(1)), down) is None, "n1's still run"


def test_what_waits_for_others_is_not_released_while_its_role_is_down() -> None:
    def at(node: int, report: PodReport) -> PodReport:
        return report.model_copy(update={"ready": (f"server.{node - 1}",)})

    plain = PodReport(state="running")
    waits: dict[str, object] = {"waiting": ("trainer",), "ready": ("server.1",)}
    assert isinstance(action(generation(n1=at(1, plain), n2=at(2, plain), n3=at(3, plain)), waits), Release)
    now = generation(n1=at(1, promised(1, 1)), n2=at(2, promised(1)), n3=at(3, plain))
    assert isinstance(action(now, waits | {"rounds": {"trainer": 1}, "down": ("trainer",)}), StartRole)
    late = generation(n1=at(1, plain), n2=at(2, promised(1)), n3=at(3, plain))
    assert action(late, waits | {"rounds": {"trainer": 1}, "down": ("trainer",)}) is None


def test_a_failure_that_ends_the_generation_comes_first() -> None:
    crash = PodReport(state="failed", exits=(make_exit(rank=0, code=7),), seq=1)
    stop = action(generation(n1=crash, n3=promised(0)), {"rounds": {"trainer": 1}, "down": ("trainer",)})
    assert isinstance(stop, Stop)


def test_whose_pod_is_over_is_asked_nothing() -> None:
    done = PodReport(state="succeeded", completed=True)
    exits = tuple(make_exit(rank=r, code=0, order=r) for r in (2, 3))
    assert action(generation(n1=promised(1, 1), n2=done), {"phase": "exited", "exits": exits}) is None
