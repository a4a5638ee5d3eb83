"""Whether a gang hangs, who of it, and how often in a row it may: from what pods tell of their workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.jobspec import Hang, Policy, RestartLimits
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import RankFacts, Stall, WorkerState
from nodeagent.model.world import Generation, Place, PodReport, WorkerExit
from nodeagent.plan.failure.hang import Hung, find_hang, watching
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.actions import LookAtWorkers, PodAction, ReportPod
from nodeagent.plan.steps import Decision, End, Propose
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    NOW,
    SUCCEEDED,
    UID,
    WALL,
    failed,
    life,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_spec,
)
from tests.unit.plan.planning import plan_node

LIMIT = 600.0
REPORTED: dict[str, object] = {"step": 41, "age": 601.0, "overdue": "long"}
"""A worker that tells its progress and is past its limit."""
WAITS = REPORTED | {"state": "idle", "waits": True, "site": "step (train.py:9)"}
BARE: dict[str, object] = {"state": "idle", "silent": True, "quiet": True}
"""A worker of a job that tells nothing."""


def rank(number: int, *kinds: Mapping[str, object], **more: object) -> RankFacts:
    merged: dict[str, object] = {"rank": number, "state": "idle"}
    for kind in kinds:
        merged |= kind
    return RankFacts.model_validate(merged | more)


def report(*ranks: RankFacts, suspects: bool = True) -> PodReport:
    return PodReport(state="running", stall=Stall(limit=LIMIT, suspects=suspects, ranks=ranks))


def four(ranks: Sequence[RankFacts], number: int = 5) -> Generation:
    """Two nodes of two workers."""
    reports = {"n1": report(*ranks[:2]), "n2": report(*ranks[2:])}
    return make_generation(["n1", "n2"], workers=2, reports=reports, number=number)


def found(*ranks: RankFacts) -> Hung:
    hung = find_hang(four(ranks))
    assert hung is not None
    return hung


# --- does it hang -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        rank(3, REPORTED, overdue="no", age=3.0),
        rank(3, REPORTED, overdue="no", phase="evaluate", state="busy"),
    ],
    ids=["gets on", "evaluates"],
)
def test_nobody_hangs_while_one_worker_gets_on_or_is_in_a_phase_it_reported(other: RankFacts) -> None:
    assert find_hang(four([rank(0, WAITS), rank(1, WAITS), rank(2, WAITS), other])) is None


def test_a_worker_that_reports_nothing_has_no_say_where_others_report() -> None:
    busy = {"state": "busy"}
    assert find_hang(four([rank(0, REPORTED, busy), rank(1, busy), rank(2, busy), rank(3, busy)])) is not None


@pytest.mark.parametrize(
    ("last", "hangs"),
    [
        (BARE, True),
        (BARE | {"quiet": False, "state": "busy"}, False),
        (BARE | {"silent": False}, False),
        (BARE | {"silent": False, "quiet": False}, False),
    ],
    ids=["nothing moves", "one computes", "one wrote", "one works and writes"],
)
def test_without_any_help_only_a_gang_in_which_nothing_moves(last: Mapping[str, object], hangs: bool) -> None:
    assert (find_hang(four([*(rank(i, BARE) for i in range(3)), rank(3, last)])) is not None) is hangs


def test_without_any_help_one_that_the_kernel_holds_is_enough_while_others_spin() -> None:
    spins = BARE | {"state": "busy", "quiet": False, "waits": True}
    held = BARE | {"state": "stopped", "frozen": True}
    hung = found(rank(0, spins), rank(1, held), rank(2, spins), rank(3, spins))
    assert (hung.rank, hung.node) == (1, "n1")
    brief = held | {"frozen": False, "quiet": False}
    assert find_hang(four([rank(0, spins), rank(1, brief), rank(2, spins), rank(3, spins)])) is None


def test_auto_waits_longer_while_someone_computes() -> None:
    soon = REPORTED | {"overdue": "yes", "quiet": True}
    assert find_hang(four([rank(i, soon) for i in range(4)])) is not None
    computes = soon | {"state": "busy", "quiet": False}
    assert find_hang(four([rank(0, computes), *(rank(i, soon) for i in (1, 2, 3))])) is None
    late = computes | {"overdue": "long"}
    assert find_hang(four([rank(i, late) for i in range(4)])) is not None


def test_every_pod_must_have_reported_but_one_whose_workers_ended_well() -> None:
    reports = {"n1": report(rank(0, WAITS))}
    generation = make_generation(["n1", "n2"], reports=reports)
    assert find_hang(generation) is None
    assert watching(generation) == "no progress seen on n1; waits for what n2 sees"
    ended = make_generation(["n1", "n2"], reports=reports | {"n2": SUCCEEDED})
    hung = find_hang(ended)
    assert hung is not None
    assert (hung.rank, hung.node) == (0, "n1"), "the only worker there is"


def test_answers_alone_are_no_suspicion() -> None:
    reports = {n: report(rank(i, BARE), suspects=False) for i, n in enumerate(("n1", "n2"))}
    generation = make_generation(["n1", "n2"], reports=reports)
    assert find_hang(generation) is None
    assert watching(generation) == ""


# --- who hangs --------------------------------------------------------------------------------------

USER = {"waits": False, "site": "hang (train.py:5)"}


@pytest.mark.parametrize(
    ("odd", "others"),
    [
        (REPORTED | {"state": "stopped", "waits": None}, WAITS),
        (REPORTED | {"state": "blocked"}, WAITS),
        (REPORTED | {"state": "zombie"}, WAITS),
        (REPORTED | USER | {"state": "busy"}, WAITS),
        (REPORTED | USER, WAITS),
        (REPORTED | {"waits": None}, WAITS),
        (REPORTED | {"step": 40}, REPORTED),
        (REPORTED | USER | {"step": 40}, WAITS),
        ({"state": "busy"}, REPORTED),
        (REPORTED | {"state": "busy"}, REPORTED),
        (REPORTED | {"state": "idle"}, REPORTED | {"state": "busy"}),
        (REPORTED | {"site": "hang (train.py:5)"}, REPORTED | {"site": "step (train.py:9)"}),
    ],
    ids=[
        "stopped", "D state", "zombie", "computes outside", "waits outside", "no stack", "behind",
        "behind and outside", "told nothing", "busy, others idle", "idle, others spin", "elsewhere",
    ],
)  # fmt: skip
@pytest.mark.parametrize("which", range(4))
def test_the_one_that_did_not_arrive_is_named(
    which: int, odd: Mapping[str, object], others: Mapping[str, object]
) -> None:
    hung = found(*(rank(i, odd if i == which else others) for i in range(4)))
    assert (hung.rank, hung.node) == (which, "n1" if which < 2 else "n2")
    assert hung.text.startswith(f"rank {which} on ")
    assert "the other 3 wait; no progress for 600 s" in hung.text
    assert hung.table.startswith(f"hangs: rank {which} on ")


def test_a_collective_that_some_have_left_already() -> None:
    """Rank 2 was stopped by nobody, but hangs inside of step 41; rank 3 waits for it there, 0 and 1 went on to 42."""
    ahead = WAITS | {"step": 42}
    hung = found(rank(0, ahead), rank(1, ahead), rank(2, REPORTED, USER), rank(3, WAITS))
    assert hung.rank == 2


def test_several_are_named_together() -> None:
    hung = found(rank(0, WAITS), rank(1, REPORTED, USER), rank(2, WAITS), rank(3, REPORTED, USER))
    assert (hung.rank, hung.node) == (1, "n1")
    assert "(so do ranks 3); the other 2 wait" in hung.text


def test_nobody_is_blamed_when_nothing_tells_them_apart() -> None:
    hung = found(*(rank(i, WAITS) for i in range(4)))
    assert (hung.rank, hung.node) == (None, "")
    assert hung.text == "no worker has made progress for 600 s, and who hangs is not known: they all do alike"
    assert hung.table.count("\n") == 3


def test_of_a_large_gang_a_few_lines_are_reported() -> None:
    reports = {f"n{n}": report(*(rank(n * 64 + i, WAITS) for i in range(64))) for n in range(4)}
    reports["n3"] = report(*(rank(192 + i, REPORTED | USER if i == 63 else WAITS) for i in range(64)))
    hung = find_hang(make_generation(list(reports), workers=64, reports=reports))
    assert hung is not None
    assert (hung.rank, hung.node) == (255, "n3")
    assert hung.table.splitlines()[-1] == "and 241 more"
    assert len(hung.table) < 4000


# --- what follows -----------------------------------------------------------------------------------


def hanging(*, step: int | None = 41, since: int = 0, number: int = 5, **more: object) -> JobRecord:
    kind = WAITS | {"step": step} if step is not None else BARE | {"waits": True}
    guilty = kind | {"state": "stopped", "frozen": True}
    generation = four([rank(0, kind), rank(1, kind), rank(2, guilty), rank(3, kind)], number)
    generation = generation.model_copy(update={"since": since})
    settings: dict[str, object] = {"spec": make_spec(size=(1, 2), workers=2)}
    return make_job("running", generation, **(settings | more))  # type: ignore[arg-type]


def take(job: JobRecord) -> Decision:
    return decide(make_cluster(["n1", "n2"], job), job, WALL)


def entry(step: int | None = 41, *, progressed: bool = False, kind: str = "hang", counts: bool = True) -> BudgetEntry:
    return BudgetEntry(at=NOW, wall=0.0, kind=kind, counts=counts, step=step, progressed=progressed)


def test_the_gang_is_restarted_and_the_node_blamed() -> None:
    step = take(hanging()).step
    assert isinstance(step, Propose)
    assert (step.cause.kind, step.cause.rank, step.cause.node, step.planned) == ("hang", 2, "n2", False)
    assert step.spend is not None
    assert (step.spend.counts, step.spend.step, step.spend.progressed) == (True, 41, True)
    assert step.spend.error.startswith("hangs: rank 2 on n2: stopped, step 41")


def test_a_workers_own_failure_comes_first() -> None:
    job = hanging()
    assert job.generation is not None
    reports = dict(job.generation.reports) | {"n1": failed(make_exit(code=7))}
    job = job.model_copy(update={"generation": job.generation.model_copy(update={"reports": reports})})
    step = take(job).step
    assert isinstance(step, Propose)
    assert step.cause.kind == "worker_failed"


def test_a_policy_may_end_the_job() -> None:
    spec = make_spec(size=(1, 2), workers=2, policies=(Policy(on=("WorkerHung",), do="FailJob"),))
    step = take(hanging(spec=spec)).step
    assert isinstance(step, End)
    assert step.reason.startswith("a policy of the job says FailJob for WorkerHung: rank 2 on n2 hangs at step 41")


def test_the_budget_may_end_the_job() -> None:
    spec = make_spec(size=(1, 2), workers=2, restarts=RestartLimits(max=0))
    step = take(hanging(spec=spec)).step
    assert isinstance(step, End)
    assert step.phase == "holding"
    assert step.reason.endswith("; judged when n1, n2 have answered, or proved to be lost")
    assert step.spend is not None
    assert step.spend.fails.startswith("restart budget spent: it allows no restart; last: rank 2 on n2 hangs")


def test_what_ends_the_job_does_so_once_everybody_has_answered() -> None:
    spend = entry().model_copy(update={"fails": "hung too often", "text": "rank 2 hangs"})
    generation = make_generation(["n1", "n2"], state="ended", number=5)
    job = make_job("holding", generation, active=5, budget={"5": spend}, spec=make_spec(size=(1, 2)))
    step = take(job).step
    assert isinstance(step, End)
    assert (step.phase, step.reason, step.outcome and step.outcome.code) == ("failed", "hung too often", 1)


@pytest.mark.parametrize(
    ("before", "fails"),
    [
        ({"2": entry(progressed=True), "3": entry(), "4": entry()}, True),
        ({"3": entry(progressed=True), "4": entry()}, False),
        ({"1": entry(progressed=True), "2": entry(), "3": entry(progressed=True), "4": entry()}, False),
        ({"1": entry(progressed=True), "2": entry(), "3": entry(kind="join", counts=False), "4": entry()}, True),
        ({"1": entry(progressed=True), "2": entry(), "3": entry(kind="worker_failed"), "4": entry()}, False),
        ({"2": entry(40, progressed=True), "3": entry(40), "4": entry(40)}, False),
        ({"2": entry(41, progressed=True), "3": entry(41), "4": entry(42)}, True),
    ],
    ids=["four in a row", "three", "progress between", "a join between", "a failure between", "got further", "back"],
)
def test_three_restarts_in_a_row_without_progress(before: Mapping[str, BudgetEntry], fails: bool) -> None:
    step = take(hanging(budget=before)).step
    final = isinstance(step, End) and step.spend is not None and bool(step.spend.fails)
    assert final is fails
    if fails:
        assert isinstance(step, End)
        assert step.reason.startswith("hung 4 times in a row without progress, so it is not started again: rank 2")


@pytest.mark.parametrize(("ran", "fails"), [(LIMIT * 10, False), (LIMIT * 10 - 1, True)])
def test_where_no_steps_are_reported_a_long_run_is_progress(ran: float, fails: bool) -> None:
    before = {"2": entry(None, progressed=True), "3": entry(None), "4": entry(None)}
    step = take(hanging(step=None, budget=before, since=NOW - int(ran * 1000))).step
    assert (isinstance(step, End) and step.spend is not None and bool(step.spend.fails)) is fails


def test_what_is_watched_is_reported_while_nothing_follows() -> None:
    generation = make_generation(["n1", "n2"], reports={"n1": report(rank(0, WAITS))})
    job = make_job("running", generation, spec=make_spec(size=(1, 2)))
    decision = take(job)
    assert decision.step is None
    assert decision.why[0] == "no progress seen on n1; waits for what n2 sees"


# --- what a node does for it --------------------------------------------------------------------------

ALIVE = (WorkerState(rank=0, local_rank=0, pid=7, state="running"),)
STALL = Stall(limit=LIMIT, suspects=True, ranks=(rank(0, WAITS),))


def act(reports: Mapping[str, PodReport], stall: Stall | None, node: str = "n1") -> PodAction | None:
    generation = make_generation(["n1", "n2"], reports=reports)
    job = make_job("running", generation, spec=make_spec(size=(1, 2)))
    now = PodStatus(
        uid=UID, phase="running", generation=generation.token, highest=generation.token, workers=ALIVE, stall=stall
    )
    actions = plan_node(make_cluster(["n1", "n2"], job), node, Incarnation(life=life(node), start=1), {UID: now}, 2)
    return actions[0] if actions else None


def test_a_stall_is_reported_once_and_taken_back() -> None:
    action = act({}, STALL)
    assert isinstance(action, ReportPod)
    assert (action.report.state, action.report.stall) == ("running", STALL)
    assert act({"n1": action.report}, STALL) is None
    back = act({"n1": action.report}, None)
    assert isinstance(back, ReportPod)
    assert back.report == PodReport(state="running")
    assert act({"n1": back.report}, None) is None


WELL = make_exit(0, code=0)


@pytest.mark.parametrize("watched", [False, True, None], ids=["not yet", "watched", "an older shim"])
def test_who_outlives_others_that_ended_well_is_watched_from_then_on(watched: bool | None) -> None:
    """Within the job's limit, and once: ``hang`` has a watch of its own, and without a limit nobody is watched."""

    def looks(*, exits: tuple[WorkerExit, ...] = (), done: bool = False, **more: object) -> float | None:
        reports = {"n2": SUCCEEDED} if done else {}
        generation = make_generation(["n1", "n2"], workers=2, reports=reports)
        job = make_job("running", generation, spec=make_spec(size=(1, 2)).model_copy(update=more))
        two = tuple(WorkerState(rank=i, local_rank=i, pid=7 + i, state="running") for i in range(2))
        now = PodStatus(
            uid=UID,
            phase="running",
            generation=generation.token,
            highest=generation.token,
            workers=two,
            exits=exits,
            watched=watched,
        )
        me = Incarnation(life=life("n1"), start=1)
        actions = plan_node(make_cluster(["n1", "n2"], job), "n1", me, {UID: now}, 2)
        return actions[0].limit if actions and isinstance(actions[0], LookAtWorkers) else None

    wanted = 300.0 if watched is False else None
    assert looks() is None, "nobody has ended"
    assert looks(done=True) == wanted
    assert looks(exits=(WELL,)) == wanted
    assert looks(exits=(WELL.model_copy(update={"stopped": True}),)) is None
    assert looks(done=True, finish=60.0) == (60.0 if watched is False else None)
    assert looks(done=True, finish=None) is None
    assert looks(done=True, hang=Hang()) is None
    assert looks(done=True, hang="off") == wanted


def test_a_rank_that_outlives_the_success_of_all_others_is_named() -> None:
    generation = make_generation(
        ["n1", "n2"], workers=2, reports={"n1": SUCCEEDED, "n2": report(rank(3, BARE, site="join (t.py:9)"))}
    )
    hung = find_hang(generation)
    assert hung is not None
    assert (hung.node, hung.rank) == ("n2", 3)
    assert hung.text == (
        "rank 3 on n2 hangs: waiting, in join (t.py:9); no progress for 600 s; all others (3) have exited 0"
    )


@pytest.mark.parametrize(
    ("done", "words"),
    [(False, "; all others (2) have exited 0, or wait for their start"), (True, "; all others (2) have exited 0")],
)
def test_a_rank_that_has_not_been_started_is_not_called_one_that_ended_well(done: bool, words: str) -> None:
    """A pod of several roles has workers that wait until another role is ready."""
    servers = rank(0, BARE), rank(2, BARE)
    reports = {"n1": report(servers[0]), "n2": report(servers[1])}
    if done:
        reports = {"n1": report(servers[0], rank(1, BARE)), "n2": SUCCEEDED}
    generation = make_generation(["n1", "n2"], workers=2, reports=reports)
    members = {
        node: member.model_copy(
            update={
                "places": tuple(
                    Place(role=role, index=i, workers=1, devices=("cpu0",)) for role in ("server", "trainer")
                )
            }
        )
        for i, (node, member) in enumerate(generation.members.items())
    }
    hung = find_hang(generation.model_copy(update={"members": members}))
    assert hung is not None
    assert hung.text.endswith(words)


def test_the_others_look_when_one_suspects() -> None:
    theirs = PodReport(state="running", stall=STALL)
    assert isinstance(act({"n2": theirs}, None), LookAtWorkers)
    answer = STALL.model_copy(update={"suspects": False})
    assert isinstance(act({"n2": theirs}, answer), ReportPod)
    assert act({"n2": theirs, "n1": PodReport(state="running", stall=answer)}, answer) is None
    assert act({"n2": PodReport(state="running", stall=answer)}, None) is None, "an answer asks nobody"


def test_a_gang_of_thousands_that_hangs_takes_no_time_to_describe() -> None:
    """Each rank was compared with each other one."""
    began = time.process_time()
    hung = found(*(rank(number, REPORTED) for number in range(4096)))
    assert "and 4081 more" in hung.table
    assert time.process_time() - began < 5
