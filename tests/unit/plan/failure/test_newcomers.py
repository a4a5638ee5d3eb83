"""A node that has just joined and fails at once: whose fault that is, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nodeagent.model.job import JobRecord, Setback
from nodeagent.model.jobspec import Policy, RestartLimits
from nodeagent.model.timing import Timing
from nodeagent.model.world import PodReport
from nodeagent.plan.failure.newcomers import FREE
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.setbacks import NEW, in_words
from nodeagent.plan.steps import Decision, End, Propose
from tests.unit.plan.build import (
    NOW,
    VICTIM,
    WALL,
    failed,
    life,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_spec,
    spend,
)

EARLY = int(Timing().early * 1000)
BROKEN = {"n3": failed(make_exit(2, code=1, error="No such file"))}
NONE = RestartLimits(max=0)


def grown(
    reports: Mapping[str, PodReport],
    *,
    new: Mapping[str, int] | None = None,
    since: int = NOW - 5000,
    size: tuple[int, int] = (1, 3),
    limits: RestartLimits | None = NONE,
    policies: tuple[Policy, ...] = (),
    setbacks: tuple[Setback, ...] = (),
    **more: object,
) -> JobRecord:
    """Generation 5, of n1, n2, and n3 that has just joined. It allows no restart. ``new``: when who joined."""
    generation = make_generation(["n1", "n2", "n3"], reports=reports, number=5, since=since)
    joined = {"n3": NOW - 8000} if new is None else new
    members = {n: m.model_copy(update={"joined": joined.get(n, 0)}) for n, m in generation.members.items()}
    spec = make_spec(size=size, restarts=limits, policies=policies)
    job = make_job("running", generation.model_copy(update={"members": members}), spec=spec, **more)  # type: ignore[arg-type]
    return job.model_copy(update={"setbacks": setbacks})


def take(job: JobRecord, nodes: tuple[str, ...] = ("n1", "n2", "n3")) -> Decision:
    return decide(make_cluster(nodes, job), job, WALL)


def free(job: JobRecord, nodes: tuple[str, ...] = ("n1", "n2", "n3")) -> Propose | None:
    """The step, if the gang goes on without n3, which costs nothing."""
    step = take(job, nodes).step
    if not isinstance(step, Propose) or step.cause.kind != "join_failed":
        return None
    assert step.spend is not None and not step.spend.counts and step.spend.kind == "join_failed"
    assert "n3" not in step.members and not step.planned
    return step


def test_a_newcomer_that_failed_for_a_lost_node_is_acquitted() -> None:
    """Its report came first, before the lease of the node that had lost its power was over."""
    generation = make_generation(["n1", "n2"], state="forming", number=6, holders=["n2"], acks=["n1"])
    cause = generation.cause.model_copy(update={"kind": "join_failed", "node": "n3"})
    entry = spend("join_failed", at=NOW - 3000, counts=False).model_copy(update={"node": "n3"})
    job = make_job(
        "forming", generation.model_copy(update={"cause": cause}), spec=make_spec(size=(1, 3), restarts=NONE), active=5
    )
    accused = Setback(node="n3", kind="failed", times=1, at=NOW - 3000)
    update = {"budget": {"5": entry}, "last_number": 5, "silent": {"n2": life("n2")}, "setbacks": (accused,)}
    job = job.model_copy(update=update)
    assert not isinstance(take(job).step, Propose), "n2 may answer yet"
    step = decide(make_cluster(["n1", "n2", "n3"], job, lapsed=["n2"]), job, WALL).step
    assert isinstance(step, Propose)
    assert (step.cause.kind, step.cause.node) == ("node_lost", "n2")
    assert step.spend is not None and not step.spend.counts
    assert step.setbacks is not None and all(one.node != "n3" for one in step.setbacks)


def test_the_gang_goes_on_without_it_and_nothing_is_spent() -> None:
    step = free(grown(BROKEN))
    assert step is not None
    assert sorted(step.members) == ["n1", "n2"]
    assert (step.cause.node, step.cause.rank) == ("n3", 2)
    assert step.cause.text == (
        "rank 2 on n3 failed first: exit code 1; n3 joined within the last 10 min: it goes on without it"
    )
    assert step.setbacks == (Setback(node="n3", kind="failed", times=1, at=NOW),)
    again = free(grown(BROKEN, setbacks=step.setbacks))
    assert again is not None and again.setbacks == (Setback(node="n3", kind="failed", times=2, at=NOW),)


@pytest.mark.parametrize("state", ["lost", "refused"])
def test_so_it_does_where_its_pod_dies_or_cannot_start(state: str) -> None:
    assert free(grown({"n3": PodReport(state=state, seq=1, reason="no")})) is not None


def test_another_node_takes_its_place() -> None:
    step = free(grown(BROKEN, size=(3, 3)), ("n1", "n2", "n3", "n4"))
    assert step is not None and sorted(step.members) == ["n1", "n2", "n4"]
    assert (step.members["n4"].joined, step.members["n1"].joined) == (NOW, 0)


def test_a_job_that_cannot_go_on_without_it_pays() -> None:
    step = take(grown(BROKEN, size=(3, 3))).step
    assert isinstance(step, End) and step.spend is not None and step.spend.counts
    assert step.setbacks is None


def test_who_has_been_there_for_long_or_fails_late_pays() -> None:
    assert free(grown(BROKEN, since=NOW - EARLY, new={"n3": NOW - int(NEW * 1000)})) is not None
    assert free(grown(BROKEN, since=NOW - EARLY - 1)) is None
    assert free(grown(BROKEN, new={"n3": NOW - int(NEW * 1000) - 1})) is None
    assert free(grown(BROKEN, new={})) is None


def test_who_trained_before_is_not_called_one_that_has_just_joined() -> None:
    """Its third generation, eight minutes after it joined: it had "just joined", and had "failed at once" then."""
    step = free(
        grown(BROKEN, new={"n3": NOW - 480_000}, setbacks=(Setback(node="n3", kind="failed", times=1, at=NOW),))
    )
    assert step is not None and step.setbacks is not None
    assert "n3 joined within the last 10 min" in step.cause.text and "just joined" not in step.cause.text
    assert in_words(make_job("running"), step.setbacks[0]) == (
        "failed within 10 min of joining, right after a start twice in a row"
    )


def test_where_all_have_joined_together_nobody_is_a_newcomer() -> None:
    """A job that was started again elsewhere: it may be the program."""
    assert free(grown(BROKEN, new=dict.fromkeys(["n1", "n2", "n3"], NOW - 8000))) is None
    assert free(grown(BROKEN, new={"n1": NOW - 20_000, "n2": NOW - 8000, "n3": NOW - 8000})) is not None


@pytest.mark.parametrize(
    "reports",
    [
        {"n1": failed(make_exit(0, code=1))},
        {"n1": failed(make_exit(0, code=1)), "n3": failed(make_exit(2, code=1), seq=2)},
        {"n1": failed(make_exit(0, signal=9), seq=2), "n3": failed(make_exit(2, code=1))},
        {"n1": failed(make_exit(0, code=1), seq=2), "n3": failed(make_exit(2, error=VICTIM))},
        {"n1": failed(make_exit(0, error=VICTIM)), "n3": failed(make_exit(2, code=1), seq=2)},
    ],
    ids=["another", "another first", "another was killed", "by words another", "first by words alone"],
)
def test_nothing_is_free_that_may_be_anothers_fault(reports: dict[str, PodReport]) -> None:
    step = take(grown(reports)).step
    assert isinstance(step, End) and step.spend is not None and step.spend.counts


def test_a_policy_of_the_job_has_the_last_word() -> None:
    step = take(grown(BROKEN, policies=(Policy(on=("WorkerFailed",), exit_code=1, do="FailJob"),))).step
    assert isinstance(step, End)
    again = Policy(on=("WorkerFailed",), do="RestartJob")
    assert free(grown(BROKEN, policies=(again,))) is not None


def row(count: int, at: int = NOW - 60_000) -> tuple[Setback, ...]:
    return tuple(Setback(node=f"x{i}", kind="failed", times=4, at=at + i) for i in range(count))


def test_after_a_few_different_ones_in_a_row_it_is_the_program() -> None:
    three = RestartLimits(max=3)
    assert free(grown(BROKEN, limits=three, setbacks=row(FREE - 1))) is not None
    step = take(grown(BROKEN, limits=three, setbacks=row(FREE))).step
    assert isinstance(step, Propose) and step.spend is not None
    assert (step.cause.kind, step.spend.counts, sorted(step.members)) == ("worker_failed", True, ["n1", "n2"])
    assert step.setbacks is not None and step.setbacks[-1].node == "n3", "it is left out all the same"
    spent = {str(i): spend("worker_failed", at=NOW - i) for i in (1, 2, 3)}
    assert isinstance(take(grown(BROKEN, limits=three, setbacks=row(FREE), budget=spent)).step, End)
    assert free(grown(BROKEN, limits=three, setbacks=row(FREE - 1), budget=spent)) is not None


def test_a_row_ends_where_one_stayed_or_it_is_long_ago() -> None:
    long_ago = row(FREE, NOW - 3_700_000)
    assert free(grown(BROKEN, setbacks=long_ago)) is not None
    stayed = {"n2": NOW - 50_000, "n3": NOW - 8000}
    assert free(grown(BROKEN, setbacks=row(FREE), new=stayed)) is not None
    lost = tuple(one.model_copy(update={"kind": "lost"}) for one in row(FREE))
    assert free(grown(BROKEN, setbacks=lost)) is not None
