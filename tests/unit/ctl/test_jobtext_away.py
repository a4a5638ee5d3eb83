"""What people read while the store is away, and while a job waits for silent failsafe members."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodeagent.ctl import get
from nodeagent.ctl.describe import node_lines
from nodeagent.ctl.jobtext import job_lines
from nodeagent.ctl.output import show
from nodeagent.ctl.session import status_line
from nodeagent.model.jobspec import Hang
from tests.unit.ctl import samples

SINCE = 1_700_000_000.0


def away(state: str, why: str = "", **more: Any) -> dict[str, Any]:
    lent = {"state": state, "node": "n1", "left": 1.5, "why": why}
    return samples.detail(samples.job(**more)) | {"lent": lent, "store_away_since": SINCE}


SAYS = [
    (away("lent"), "failsafe time from n1, n2, n3"),
    (away("lease"), "the lease of n1, then on failsafe time from n1, n2, n3"),
    (away("lease", failsafe_members={}), "the lease of n1, then without any"),
    (
        away("refused", "n2 is leaving"),
        "what is left of its time on n1: no failsafe member gives it failsafe time: n2 is leaving",
    ),
    (
        away("stopped", "n2 is leaving"),
        "nothing on n1 any more: no failsafe member gave it failsafe time: n2 is leaving",
    ),
    (away("stopped"), "nothing on n1 any more"),
    (away("elsewhere"), "it is not known on n1, where none of its workers are: ask an agent of n1, n2"),
]


@pytest.mark.parametrize(("job", "text"), SAYS)
def test_describe_says_on_whose_time_it_runs(job: dict[str, Any], text: str) -> None:
    lines = job_lines(job)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(SINCE))
    assert f"Runs on:     {text} (the store has not answered the agent of n1 since {when})" in lines
    assert not [line for line in lines if line.startswith("Failsafe:")]
    assert "get the store to answer the agent that was asked" in lines[-1]


@pytest.mark.parametrize("state", ["mute", "silent", "lost", "left"])
def test_an_agent_that_is_not_answered_calls_no_node_down(state: str) -> None:
    """What it shows is from before: by now the node may be up."""
    node = samples.shown_node("n4") | {"state": state}
    assert "get the store to answer" not in node_lines(node | {"store_away_since": None})[-1]
    assert "get the store to answer" in (last := node_lines(node | {"store_away_since": SINCE})[-1])
    assert node_lines(samples.shown_node("n2") | {"store_away_since": SINCE})[-1] == last, "it was well before"
    deleting = samples.detail(samples.SILENT) | {"deleting": True}
    assert "nodeagentctl forget" in job_lines(deleting)[-1]
    assert (
        "nodeagentctl forget"
        not in last + job_lines(deleting | {"lent": away("lent")["lent"], "store_away_since": SINCE})[-1]
    )


def test_describe_names_the_failsafe_members_while_the_store_answers() -> None:
    assert "Failsafe:    n1, n2, n3 may give it failsafe time while the store is away" in job_lines(
        samples.detail(samples.job())
    )
    nobody = job_lines(samples.detail(samples.job(failsafe_members={})))
    assert "Failsafe:    none: its workers stop when the store is away for longer than a lease" in nobody
    assert not [line for line in job_lines(samples.detail(samples.HOLDING)) if line.startswith(("Failsafe", "Runs on"))]


def test_describe_says_what_to_do_while_a_store_that_lost_writes_waits() -> None:
    waits = samples.detail(samples.job(phase="holding")) | {
        "store_waits": "the store waits for n4",
        "no_progress": "n1",
    }
    assert job_lines(waits)[-1].startswith("Next:        nothing: what runs goes on; all else waits for those nodes")


def test_describe_says_that_a_hang_is_watched() -> None:
    watched = samples.detail(samples.job(), ("no progress seen on n1, n2 gets on",)) | {"no_progress": "n1"}
    assert "nothing yet: if it hangs, it is restarted by itself" in job_lines(watched)[-1]


def test_describe_says_when_a_gang_hangs() -> None:
    def line(hang: object) -> list[str]:
        spec = samples.job().spec.model_copy(update={"hang": hang})
        lines = job_lines(samples.detail(samples.job(spec=spec)))
        return [one for one in lines if one.startswith("Hangs:")]

    assert line(None) == line("off") == []
    assert line(Hang(progress=600)) == ["Hangs:       if no worker makes progress for 10m: then it is restarted"]
    assert "as long as its own steps tell (auto)" in line(Hang())[0]


def test_status_lines_of_run_do_not_change_while_nothing_does() -> None:
    assert status_line(away("lent")) == "the store does not answer; digits runs on failsafe time from n1, n2, n3"
    assert status_line(away("lease")).startswith("generation 2 active"), "it may be back in a moment"
    assert status_line(away("lent")) == status_line(away("lent") | {"age": 99.0})


@pytest.mark.parametrize("fmt", ["table", "wide", "name"])
def test_the_notice_is_on_stderr(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the agent's time, whatever our clock says."""
    rows = [samples.listed(samples.job())]
    answer = {"items": rows, "store_away_since": SINCE}
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(SINCE))
    show(answer, fmt, "job", get.COLUMNS)
    reported = capsys.readouterr()
    began = f"nodeagentctl: the store has not answered the agent that was asked since {when}: "
    assert reported.err.startswith(began + "what is shown is from then;")
    assert "on the lease of each node or on failsafe time" in reported.err, (
        "other agents, and its own lease, may have it"
    )
    assert reported.err.count("\n") == 1
    show(answer | {"store_away_since": None}, fmt, "job", get.COLUMNS)
    without = capsys.readouterr()
    assert (without.out, without.err) == (reported.out, "")


def test_json_has_it_within(capsys: pytest.CaptureFixture[str]) -> None:
    show({"items": [], "store_away_since": 5.0}, "json", "job", get.COLUMNS)
    reported = capsys.readouterr()
    assert '"store_away_since": 5.0' in reported.out
    assert reported.err == ""


GONE = samples.detail(samples.SILENT)


@pytest.mark.parametrize(
    ("job", "step"),
    [
        (GONE, "bring one of n4 back, or, if it is permanently down: nodeagentctl forget NODE"),
        (GONE | {"phase": "paused"}, "bring one of n4 back, or, if it is permanently down: nodeagentctl forget NODE"),
        (GONE | {"phase": "paused", "desired": "pause"}, "run it again: nodeagentctl resume digits"),
        (
            GONE | {"phase": "stopped", "deleting": True},
            "its record goes when one of n4 says that nothing runs there: bring it back, or, if it is permanently "
            "down: nodeagentctl forget NODE",
        ),
    ],
)
def test_the_next_step_of_a_job_whose_failsafe_members_are_all_gone(job: dict[str, Any], step: str) -> None:
    """Found by a stranger: of a job that had been resumed it was to resume it, and of a deleted one to do nothing."""
    assert job_lines(job)[-1] == f"Next:        {step}"
