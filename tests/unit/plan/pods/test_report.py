"""What a pod has to say of its generation."""

from __future__ import annotations

import random
import signal
import time

import pytest

from nodeagent.model.pod import RankFacts, Stall, WorkerState
from nodeagent.model.world import BRIEF, MOST_ALONE, Member, Place, PodReport, Token, WorkerExit
from nodeagent.plan.failure.blame import blame, is_victim
from nodeagent.plan.failure.faults import find_fault
from nodeagent.plan.pods.report import (
    STALL_TEXT,
    STALL_TEXTS,
    failure_words,
    of_member,
    read_report,
    same_report,
    with_completion,
    with_few_texts,
    without_output,
)
from nodeagent.pods.base import PodStatus
from nodeagent.store.codec import report_arguments
from tests.unit.plan.build import UID, make_cluster, make_exit, make_generation, make_job

ENDED = (WorkerState(rank=0, local_rank=0, pid=7, state="exited", exit=0),)


@pytest.mark.parametrize(
    ("refused", "reason", "error"),
    [
        ("hook pre_start failed with exit code 3: no bucket: s3cret\nbye",
         "hook pre_start failed with exit code 3", "no bucket: s3cret\nbye"),
        ("hook pre_start was not done after 30 s", "hook pre_start was not done after 30 s", ""),
        ("rank 3 could not be started: too many files", "rank 3 could not be started: too many files", ""),
    ],
)  # fmt: skip
def test_what_a_hook_printed_is_apart_from_why_the_pod_could_not_start(refused: str, reason: str, error: str) -> None:
    """The reason is shown to everybody."""
    status = PodStatus.model_validate({"uid": "u", "phase": "exited", "refused": refused})
    assert read_report(status) == PodReport(state="refused", reason=reason, error=error)


@pytest.mark.parametrize(
    ("slept", "reason"),
    [
        (0.0, ""),
        (3600.4, "the machine was suspended for 3600 s"),
        (1e300, "the machine was suspended for 100000000 s"),
        (-5.0, ""),
    ],
)
def test_a_fence_that_a_suspension_set_off_says_so(slept: float, reason: str) -> None:
    """The number is the shim's word, which is its user's."""
    status = PodStatus(uid="u", phase="exited", fenced=True, suspended=slept)
    assert read_report(status) == PodReport(state="fenced", reason=reason)


def test_a_start_that_came_too_late_is_no_fault_of_the_jobs() -> None:
    late = "the order to start came too late"
    status = PodStatus.model_validate({"uid": "u", "phase": "exited", "refused": late, "fenced": True})
    report = read_report(status)
    assert report == PodReport(state="fenced", reason=late)
    assert report is not None
    numbered = report.model_copy(update={"seq": 1})
    job = make_job("running", make_generation(["n1", "n2"], reports={"n2": numbered}))
    fault = find_fault(make_cluster(["n1", "n2"], job), job, 1.0)
    assert fault is not None
    assert (fault.cause.kind, fault.spend.counts, fault.fail) == ("fenced", False, "")
    assert late in fault.cause.text


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("trouble with the fork server: preload a: ValueError: s3cret", "trouble with the fork server"),
        ("working_dir /w is missing; trouble with the fork server: preload a: KeyError: s3cret; large pages: s3cret",
         "working_dir /w is missing; trouble with the fork server"),
        ("ready db.0 was not done after 10 s; trouble with the fork server: preload a: s3cret",
         "ready db.0 was not done after 10 s; trouble with the fork server"),
        ("ready db.0 failed with exit code 1: s3cret; ready db.1 failed with exit code 1: s3cret",
         "ready db.0 failed with exit code 1"),
        ("no store process: RuntimeError: s3cret", "no store process"),
        ("modules: foo/1 cannot be loaded on this node: s3cret: x", "modules: foo/1 cannot be loaded on this node"),
        ("env_file /w/env: Permission denied (as user a); it is ready soon", None),
    ],
)  # fmt: skip
def test_what_a_job_wrote_itself_is_cut_off_a_reason_wherever_it_begins(reason: str, shown: str | None) -> None:
    why, output = without_output(reason)
    assert why == (reason if shown is None else shown)
    assert ("s3cret" in output) == (shown is not None)


def test_a_reason_that_only_begins_again_and_again_takes_no_time() -> None:
    """20,000 characters took 3 s, at each look: every beginning was tried with all that is behind it."""
    began = time.process_time()
    reason = "; hook " * 20_000
    assert without_output(reason) == (reason, "")
    assert time.process_time() - began < 5


def test_read_report() -> None:
    two = (*ENDED, WorkerState(rank=1, local_rank=1, pid=8, state="running"))
    done, crash, killed = make_exit(code=0), make_exit(1, code=7), make_exit(0, signal=15, stopped=True)

    def reason(exits: tuple[WorkerExit, ...], workers: tuple[WorkerState, ...] = two, **more: object) -> str | None:
        fields = {"uid": UID, "phase": "running", "generation": Token(number=2, id="g2"), "workers": workers}
        report = read_report(PodStatus.model_validate({**fields, "exits": exits, **more}))
        return report.state if report is not None else None

    assert reason(()) is None
    assert reason((done,)) is None
    assert reason((done,), ENDED) == "succeeded"
    status = PodStatus(uid=UID, phase="running", generation=Token(number=2, id="g2"), workers=ENDED, exits=(done,))
    assert read_report(status) == PodReport(state="succeeded"), "the same text from every member"
    assert reason((done, make_exit(1, code=0))) == "succeeded"
    assert reason((done, crash)) == "failed"
    assert reason((killed,), ENDED) is None, "we stopped it: neither success nor failure"
    assert reason((killed, crash)) == "failed"
    assert reason((killed,), ENDED, fenced=True) == "fenced"
    noted = {"uid": UID, "phase": "exited", "generation": None, "fenced": True, "reason": "the preload failed"}
    assert read_report(PodStatus.model_validate(noted)) == PodReport(state="fenced"), "what its shim notes is no cause"
    assert reason((), refused="hook failed") == "refused"


def test_a_port_that_somebody_took_is_reported_by_a_pod_whose_workers_were_only_stopped() -> None:
    stopped = (make_exit(signal=9).model_copy(update={"stopped": True}),)
    status = PodStatus(uid=UID, phase="exited", workers=ENDED, exits=stopped, taken="uid 7 listens on port 9")
    report = read_report(status)
    assert report is not None and (report.state, report.taken) == ("failed", "uid 7 listens on port 9")
    assert not same_report(report.model_copy(update={"taken": ""}), report), "it is sent again for that"
    well = PodStatus(
        uid=UID, phase="exited", workers=ENDED, exits=(make_exit(code=0),), taken="uid 7 listens on port 9"
    )
    assert read_report(well) == PodReport(state="succeeded")


def test_failure_words_are_about_the_worker_that_counts() -> None:
    stopped, first, killed = make_exit(0, signal=15, stopped=True), make_exit(1, code=7), make_exit(2, signal=9)
    assert failure_words((stopped, make_exit(3, code=0))) == ""
    assert failure_words((stopped, first)) == "rank 1 failed: exit code 7"
    assert failure_words((stopped, first, killed)) == "rank 2 failed: SIGKILL (9) (and 1 more here)"


PLAIN = "Traceback (most recent call last):\n" + 60 * "  File train.py, line 7, in step\n" + "ValueError: no"
VICTIM = 100 * "gloo says:\n" + "RuntimeError: [gloo/pair.cc:42] Connection closed by peer [10.0.0.2]:4711"
EARLY_VICTIM = "ncclRemoteError: a peer is gone\n" + 60 * "  File train.py, line 7, in step\n"
LONG_VICTIM = "RuntimeError: " + 5000 * "x" + " Connection reset by peer"
KILLED = PLAIN + "\nnodeagent: out of memory: the kernel killed it"
WROTE = (PLAIN, VICTIM, EARLY_VICTIM, LONG_VICTIM, KILLED, "")


def ended(rank: int, error: str, code: int | None = 1, order: int | None = None, **more: object) -> WorkerExit:
    fields = {
        "rank": rank,
        "local_rank": rank,
        "pid": 100 + rank,
        "code": code,
        "order": rank if order is None else order,
    }
    return WorkerExit.model_validate({**fields, "error": error, **more})


def texts(*exits: WorkerExit) -> list[str]:
    return [e.error for e in with_few_texts(exits)]


def test_only_the_one_that_counts_keeps_all_that_it_wrote() -> None:
    assert texts(ended(0, PLAIN), ended(1, PLAIN)) == [PLAIN, ""]
    assert texts(ended(0, PLAIN, order=1), ended(1, PLAIN, order=0)) == ["", PLAIN]
    killed = ended(1, KILLED, None, signal=int(signal.SIGKILL))
    assert texts(ended(0, PLAIN), killed) == ["", KILLED]
    assert texts(ended(0, PLAIN, stopped=True), ended(1, "", 0), ended(2, PLAIN)) == ["", "", PLAIN]


@pytest.mark.parametrize("wrote", [VICTIM, EARLY_VICTIM, LONG_VICTIM])
def test_victims_keep_what_makes_them_ones(wrote: str) -> None:
    first, second, third = texts(ended(0, wrote), ended(1, PLAIN), ended(2, wrote))
    assert second == PLAIN
    assert first == third
    assert is_victim(ended(0, first))
    assert len(first) < BRIEF
    (alone,) = texts(ended(0, wrote))
    assert is_victim(ended(0, alone))
    assert len(first) <= len(alone) <= BRIEF


def test_a_node_full_of_victims_writes_little() -> None:
    """Of 2,000 such nodes one record has the reports."""
    report = PodReport(state="failed", exits=with_few_texts(ended(rank, VICTIM) for rank in range(8)))
    assert len(report_arguments(report)["body"]) < BRIEF + 8 * 150


def as_brief(report: PodReport) -> PodReport:
    """As the store keeps it where many have failed."""
    reported = report_arguments(report)
    return PodReport.from_json(reported.get("brief", reported["body"])).model_copy(update={"seq": report.seq})


def test_who_is_blamed_is_so_by_the_short_texts_too() -> None:
    rng = random.Random(7)
    for _ in range(300):
        reports = {}
        for seq, node in enumerate(rng.sample(["n1", "n2", "n3", "n4"], 4), 1):
            exits = [
                ended(
                    rank, rng.choice(WROTE), None if killed else 1, order,
                    signal=rng.choice((9, 6, 11)) if killed else None, stopped=rng.random() < 0.2,
                )
                for order, rank in enumerate(rng.sample(range(4), rng.randrange(5)))
                for killed in (rng.random() < 0.3,)
            ]  # fmt: skip
            reports[node] = PodReport(state="failed", exits=tuple(exits), seq=seq)
        few = {n: r.model_copy(update={"exits": with_few_texts(r.exits)}) for n, r in reports.items()}
        whole = blame(reports)
        for reported in (few, {n: as_brief(r) for n, r in few.items()}):
            found = blame(reported)
            assert (found is None) == (whole is None)
            if whole is not None and found is not None:
                assert (found.text, found.victim, found.node, found.code) == (
                    whole.text, whole.victim, whole.node, whole.code,
                )  # fmt: skip


def test_the_brief_form_of_a_report_is_sent_where_it_is_shorter() -> None:
    assert "brief" not in report_arguments(PodReport(state="failed", exits=(ended(0, "ValueError: no"),)))
    reported = report_arguments(PodReport(state="failed", exits=(ended(0, PLAIN),)))
    assert len(reported["brief"]) < len(reported["body"]) - len(PLAIN) + BRIEF + 100


def test_the_role_that_completes_the_job_has_ended_well() -> None:
    places = tuple(
        Place(role=role, index=0, workers=workers, devices=("cpu0",))
        for role, workers in (("pserver", 1), ("trainer", 2))
    )
    member = Member(node="n1", life="l", group_rank=0, first_rank=4, workers=3, devices=("cpu0",), places=places)

    def reason(
        *exits: WorkerExit, report: PodReport | None = None, role: str = "trainer", asked: tuple[str, ...] = ()
    ) -> PodReport | None:
        status = PodStatus(uid=UID, phase="running", exits=exits)
        return with_completion(report, status, member, role, asked)

    first, second = make_exit(5, code=0), make_exit(6, code=0)
    assert reason(first) is None
    assert reason(first, make_exit(6, signal=15, stopped=True)) is None
    assert reason(first, make_exit(6, code=1)) is None
    assert reason(first, second) == PodReport(state="running", completed=True)
    assert reason(first, second, role="evaluator") is None, "it has no place here"
    both = ("pserver", "trainer")
    assert reason(first, second, role="", asked=both) == PodReport(state="running", tasks=("trainer",))
    assert reason(make_exit(4, code=0), first, second, role="", asked=both) == PodReport(state="running", tasks=both)
    failed = PodReport(state="failed")
    assert reason(first, second, report=failed) == PodReport(state="failed", completed=True)


def placed(workers: int = 2) -> Member:
    places = (
        Place(role="ps", index=3, workers=1, devices=("cpu0",)),
        Place(role="trainer", index=0, workers=workers - 1, devices=("cpu1",)),
    )
    return Member(
        node="n1", life="l", group_rank=1, first_rank=4, workers=workers, devices=("cpu0", "cpu1"), places=places
    )


def stalled(*ranks: int, text: str = "") -> Stall:
    facts = (RankFacts(rank=rank, state="busy", phase=text, site=text, stacks=text) for rank in ranks)
    return Stall(limit=5.0, suspects=True, ranks=tuple(facts))


def test_a_pod_reports_of_its_own_workers_places_and_roles() -> None:
    """4096 ranks with long texts were 1.7 MB in the job's record, from each node: every agent reads it."""
    own = PodStatus(
        uid=UID, phase="running", exits=(make_exit(4), make_exit(5)), restarted=(make_exit(4, order=1), make_exit(4)),
        waiting=("trainer",), ready=("ps.3",), rounds={"trainer": 2}, down=("trainer",), stall=stalled(4, 5, text="x"),
    )  # fmt: skip
    assert of_member(own, placed()) is own
    more = own.model_copy(
        update={
            "exits": (*own.exits, make_exit(3), make_exit(6), make_exit(5)),
            "restarted": (make_exit(6), *[make_exit(4)] * MOST_ALONE, *own.restarted),
            "waiting": ("x", "trainer", "trainer"), "ready": ("ps.3", "ps.0", "ps.3", ""),
            "rounds": {"trainer": 2, "x": 1}, "down": ("x", "trainer", "trainer"),
            "stall": stalled(*range(4096), 4, text="x"),
        }
    )  # fmt: skip
    found = of_member(more, placed())
    assert len(found.restarted) == MOST_ALONE
    assert found.model_copy(update={"restarted": own.restarted}) == own


def test_the_texts_of_a_stall_are_cut() -> None:
    status = PodStatus(uid=UID, phase="running", stall=stalled(*range(4, 1028), text="x" * 1000))
    report = read_report(of_member(status, placed(1024)))
    assert report is not None and report.stall is not None
    ranks = report.stall.ranks
    assert len(ranks) == 1024
    assert len(ranks[0].site) == len(ranks[0].phase) == STALL_TEXT
    assert sum(len(facts.phase + facts.site + facts.stacks) for facts in ranks) <= STALL_TEXTS
