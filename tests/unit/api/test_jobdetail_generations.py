"""A job's generations, told from its record and the audit log."""

from __future__ import annotations

from nodeagent.api.jobdetail import generations
from nodeagent.model.job import BudgetEntry, JobEvent
from nodeagent.model.world import Cause, Generation, Member, Token
from tests.unit.api.test_intents import job


def event(ms: int, kind: str, generation: int, text: str = "") -> JobEvent:
    return JobEvent(id=f"{ms}-0", kind=kind, uid="u1", job="digits", generation=generation, text=text)


GENERATION = Generation(
    number=2, id="g2", state="active", since=0, cause=Cause(kind="worker_failed", text="rank 1 on n1 failed first"),
    members={"n1": Member(node="n1", life="l", group_rank=0, first_rank=0, workers=1, devices=("cpu0",))},
)  # fmt: skip
SPEND = BudgetEntry(at=5, wall=1.0, kind="worker_failed", counts=True, node="n1", rank=1, exit=7, text="rank 1 failed")
RECORD = job().model_copy(update={"generation": GENERATION, "budget": {"1": SPEND}, "active": Token(number=2, id="g2")})


def test_what_each_fault_cost() -> None:
    events = [
        event(1000, "GenerationForming", 1, "first start"),
        event(1500, "GenerationActive", 1),
        event(9000, "WorkerFailed", 1),
        event(9001, "WorkerFailed", 1),
        event(9010, "GenerationForming", 2, "rank 1 on n1 failed first"),
        event(9250, "GenerationActive", 2),
        event(9260, "GenerationStarted", 2, "workers run again after 0.253 s: ..."),
        event(9300, "GenerationActive", 2).model_copy(update={"uid": "another"}),
    ]
    first, second = generations(RECORD, events)
    assert (first["number"], first["cause"], first["state"], first["downtime"]) == (1, "first start", "ended", None)
    assert first["ended_by"]["exit"] == 7
    assert (second["state"], second["downtime"], second["ended_by"]) == ("active", 0.25, None)
    assert (first["recovery"], second["recovery"]) == (None, "workers run again after 0.253 s: ...")
    assert second["cause"] == "rank 1 on n1 failed first"


def test_a_pause_and_an_end_say_why_a_generation_ended() -> None:
    paused = "paused by ann; go on with: nodeagentctl resume digits"
    events = [
        event(1500, "GenerationActive", 1),
        event(2000, "JobPausing", 1, paused),
        event(2001, "JobPaused", 1, paused),
        event(3000, "GenerationActive", 2),
        event(4000, "JobStopped", 2, "stopped by bob"),
    ]
    stopped = RECORD.model_copy(
        update={
            "budget": {}, "phase": "stopped", "reason": "stopped by bob",
            "generation": GENERATION.model_copy(update={"state": "ended"}),
        }
    )  # fmt: skip
    first, second = generations(stopped, events)
    assert [(g["ended_by"], g["ended_because"]) for g in (first, second)] == [
        (None, "paused by ann"),
        (None, "stopped by bob"),
    ]
    only = stopped.model_copy(update={"phase": "paused", "reason": paused})
    assert generations(only, [])[-1]["ended_because"] == "paused by ann", "without the audit log"
    assert [g["ended_because"] for g in generations(RECORD, events[:3])] == ["", ""], "a fault ended it"


def test_without_the_audit_log_the_record_is_reported() -> None:
    first, second = generations(RECORD, [])
    assert (first["number"], first["state"], first["downtime"]) == (1, "ended", None)
    assert first["ended_by"]["text"] == "rank 1 failed"
    assert (second["number"], second["state"], second["downtime"]) == (2, "active", None)
    assert (second["cause"], second["ended_by"]) == ("rank 1 on n1 failed first", None)


def test_a_generation_that_never_formed_counts_for_nothing() -> None:
    events = [
        event(1000, "GenerationForming", 1),
        event(1500, "GenerationActive", 1),
        event(9000, "NodeLost", 1),
        event(9010, "GenerationForming", 2),
    ]
    record = RECORD.model_copy(update={"generation": GENERATION.model_copy(update={"number": 3})})
    events += [event(9500, "GenerationForming", 3), event(10000, "GenerationActive", 3)]
    rows = generations(record.model_copy(update={"active": Token(number=3, id="g3")}), events)
    assert [(r["number"], r["state"]) for r in rows] == [(1, "ended"), (2, "not formed"), (3, "active")]
    assert rows[2]["downtime"] == 1.0


def test_a_fault_that_is_not_judged_yet_says_for_whom_it_waits() -> None:
    waiting = RECORD.model_copy(update={"last_number": 1, "silent": {"n3": "l"}})
    first, _ = generations(waiting, [])
    assert first["ended_by"]["judged_when"] == "judged when n3 has answered, or proved to be lost"
    for judged in (
        RECORD,
        waiting.model_copy(update={"last_number": 2}),
        waiting.model_copy(update={"phase": "failed"}),
    ):
        assert generations(judged, [])[0]["ended_by"]["judged_when"] == ""
