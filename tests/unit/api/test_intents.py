"""What operators may want of a job, and what is refused, as pure steps."""

from __future__ import annotations

import pytest

from nodeagent.api import intents
from nodeagent.api.errors import ApiError
from nodeagent.model.job import TERMINAL, Control, JobRecord, Phase
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Refusal
from tests.unit.api.fakes import spec


def job(phase: Phase = "running", *, ran: bool = True, **control: object) -> JobRecord:
    request = Control.model_validate({"rev": 3, "target": 2, "by": "alice"} | control)
    return JobRecord(
        uid="u1", name="digits", owner=1000, spec=spec(), control=request, phase=phase, reason="because", submitted=1.0,
        active=Token(number=1, id="g") if ran else None,
    )  # fmt: skip


SIMPLE = {
    "pause": intents.pause,
    "resume": intents.resume,
    "restart": intents.restart,
    "stop": intents.stop,
}

GRANTED = [
    ("pause", job(), {"desired": "pause"}),
    ("pause", job(desired="pause"), None),
    ("resume", job("paused", desired="pause"), {"desired": "run"}),
    ("resume", job(), None),
    ("restart", job(restart=4), {"restart": 5}),
    ("stop", job(), {"desired": "stop"}),
    ("stop", job("paused", desired="pause"), {"desired": "stop"}),
    ("stop", job(desired="stop"), None),
]


@pytest.mark.parametrize(("verb", "record", "change"), GRANTED)
def test_granted(verb: str, record: JobRecord, change: dict[str, object] | None) -> None:
    request = SIMPLE[verb](record)
    assert (request.change if request else None) == change


@pytest.mark.parametrize("verb", SIMPLE)
@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_an_ended_job_is_not_changed(verb: str, phase: Phase) -> None:
    with pytest.raises(ApiError, match="has ended") as raised:
        SIMPLE[verb](job(phase))
    assert raised.value.status == 409
    assert raised.value.next_step


@pytest.mark.parametrize("verb", [v for v in SIMPLE if v != "stop"])
def test_a_job_being_stopped_is_not_changed(verb: str) -> None:
    with pytest.raises(ApiError, match="is being stopped"):
        SIMPLE[verb](job(desired="stop"))


def test_restart_needs_something_that_runs() -> None:
    with pytest.raises(ApiError, match="is paused") as paused:
        intents.restart(job("paused", desired="pause"))
    assert paused.value.next_step == f"run it again: nodeagentctl resume {job().name}"
    with pytest.raises(ApiError, match="has not started yet"):
        intents.restart(job("queued", ran=False))


def test_delete() -> None:
    live, ended = intents.delete(job()), intents.delete(job("failed"))
    assert live is not None
    assert ended is not None
    assert live.change == {"desired": "stop", "delete": True}
    assert ended.change == {"delete": True}
    assert intents.delete(job("failed", delete=True)) is None


# --- a record that is not what was signed

FORGED = Refusal("changed", "it was changed", controlled=False, rev=0)
PUT_BACK = Refusal("control", "an older wish", controlled=False, rev=7)


def test_a_request_builds_on_what_was_signed() -> None:
    record = job()
    assert intents.foundation(record, None, ends=False) is record
    stopping = Refusal("unsigned", "no signature", controlled=True)
    assert intents.foundation(record, stopping, ends=True) is record


@pytest.mark.parametrize("controlled", [False, True])
def test_of_a_forged_job_nothing_can_be_wanted_but_its_end(controlled: bool) -> None:
    refusal = Refusal("changed", "it was changed", controlled)
    with pytest.raises(ApiError, match="is not run: it was changed") as raised:
        intents.foundation(job(), refusal, ends=False)
    assert raised.value.status == 409


def test_of_a_control_that_nobody_signed_nothing_is_kept_but_its_revision() -> None:
    evil = job(target=1, desired="pause", restart=5, by="eve")
    for refusal, ends, rev in ((FORGED, True, 3), (PUT_BACK, False, 7)):
        base = intents.foundation(evil, refusal, ends=ends)
        assert base.control == Control(rev=rev, target=evil.spec.nodes.target)
