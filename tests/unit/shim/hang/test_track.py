"""One worker's signs of life, and the limit that is learned from its steps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nodeagent.shim.hang.track import LEAST_GAPS, StepPace, Track, WorkerLook, WorkerProgress, look
from tests.descriptors import seen_with

HZ = os.sysconf("SC_CLK_TCK")
LIMIT = 10.0


def progress(step: int | None, at: float, phase: str = "train", bound: float | None = None) -> WorkerProgress:
    return WorkerProgress(step, at, phase, bound)


def seen(
    at: float,
    *,
    progress: WorkerProgress | None = None,
    written: int = 0,
    cpu: float = 0.0,
    own: float = 0.0,
    letter: str = "S",
) -> WorkerLook:
    """``cpu`` and ``own`` are seconds so far."""
    return WorkerLook(at, progress, written, int(cpu * HZ), int(own * HZ), letter)


def track(limit: float | None = LIMIT) -> Track:
    return Track(3, limit, 7200.0, 0.0)


def test_a_worker_that_tells_nothing_and_does_nothing() -> None:
    one = track()
    for at in range(10):
        one.see(seen(at))
    assert {k: one.facts()[k] for k in ("silent", "quiet", "overdue")} == {
        "silent": False, "quiet": False, "overdue": None,
    }  # fmt: skip
    one.see(seen(10))
    assert one.facts() == {
        "rank": 3, "state": "idle", "step": None, "phase": "", "age": 10.0, "overdue": None, "silent": True,
        "quiet": True, "frozen": False,
    }  # fmt: skip


def test_what_will_be_a_standstill_shows_before_the_limit() -> None:
    one = track()
    for at in range(20):
        got = min(at, 8)
        one.see(seen(at, progress=progress(got, got), written=got, cpu=got, letter="T" if at > 8 else "S"))
        now, soon = one.facts(), one.facts(lead=4.0)
        assert (soon["overdue"] == "long", soon["silent"]) == (at >= 14, at >= 14)
        assert (now["overdue"] == "long", now["silent"]) == (at >= 18, at >= 18)
        assert (soon["quiet"], soon["frozen"]) == (at >= 14, at >= 15)
        assert one.left == 10 - (at - got)
    one.see(seen(20, progress=progress(5, 20, "evaluate")))
    assert one.left < 0, "a phase has a bound of its own"


def test_output_and_cpu_time_are_life() -> None:
    one = track()
    for at in range(20):
        one.see(seen(at, written=5 if at >= 15 else 0, cpu=0.5 * at))
    facts = one.facts()
    assert (facts["state"], facts["silent"], facts["quiet"], facts["age"]) == ("busy", False, False, 4.0)


def test_threads_that_only_look_around_are_quiet() -> None:
    one = track()
    for at in range(20):
        one.see(seen(at, cpu=0.01 * at))
    assert (one.facts()["state"], one.facts()["quiet"]) == ("idle", True)


@pytest.mark.parametrize(("letter", "state"), [("T", "stopped"), ("D", "blocked"), ("Z", "zombie")])
def test_the_kernels_word_counts_when_it_stays(letter: str, state: str) -> None:
    one = track()
    one.see(seen(0))
    for at in (1, 2):
        one.see(seen(at, letter=letter))
    assert one.facts()["state"] == "idle", "a process is in D state for a moment now and then"
    one.see(seen(3, letter=letter))
    assert (one.facts()["state"], one.facts()["frozen"]) == (state, False)
    one.see(seen(11, letter=letter))
    assert one.facts()["frozen"] is True


def test_a_process_that_runs_between_the_looks_is_not_held() -> None:
    one = track()
    for at in range(20):
        one.see(seen(at, letter="D", own=0.01 * at, cpu=0.01 * at))
    assert (one.facts()["state"], one.facts()["frozen"]) == ("idle", False)
    for at in range(20, 40):  # other threads of it run on
        one.see(seen(at, letter="D", own=0.2, cpu=0.01 * at))
    assert (one.facts()["state"], one.facts()["frozen"]) == ("blocked", True)


def test_a_tracer_is_not_a_stop() -> None:
    one = track()
    for at in range(20):
        one.see(seen(at, letter="t"))
    assert one.facts()["state"] == "idle"


@pytest.mark.parametrize(
    ("last", "now", "overdue"),
    [
        (progress(7, 0.0), 9.9, "no"),
        (progress(7, 0.0), 10.0, "long"),
        (progress(7, 0.0, "evaluate"), 7199.0, "no"),
        (progress(7, 0.0, "evaluate"), 7200.0, "long"),
        (progress(7, 0.0, "evaluate", 60.0), 59.0, "no"),
        (progress(7, 0.0, "evaluate", 60.0), 60.0, "long"),
        (progress(7, 0.0, "train", 60.0), 59.0, "no"),
        (progress(None, 0.0), 10.0, "long"),
    ],
)
def test_progress_that_is_reported_has_a_limit_and_phases_have_their_own(
    last: WorkerProgress, now: float, overdue: str
) -> None:
    one = track()
    one.see(seen(now, progress=last))
    facts = one.facts()
    assert (facts["overdue"], facts["step"]) == (overdue, last.step)
    assert facts["phase"] == ("" if last.phase == "train" else last.phase)


def test_auto_gives_who_computes_half_an_hour() -> None:
    one = track(None)
    for step in range(40):
        one.see(seen(step, progress=progress(step, float(step))))
    assert one.limit == 60.0
    for now, overdue in ((98.0, "no"), (99.0, "yes"), (1838.0, "yes"), (1839.0, "long")):
        one.see(seen(now, progress=progress(39, 39.0)))
        assert one.facts()["overdue"] == overdue, now


# --- the pace -----------------------------------------------------------------------------------------


def walked(gaps: list[float], first: float = 0.0) -> StepPace:
    pace, at = StepPace(), first
    pace.see(progress(0, at), at)
    for step, gap in enumerate(gaps, start=1):
        at += gap
        pace.see(progress(step, at), at)
    return pace


def test_no_pace_before_enough_steps() -> None:
    assert walked([1.0] * (LEAST_GAPS - 1)).limit() is None
    assert walked([1.0] * LEAST_GAPS).limit() == 60.0


def test_ten_times_the_longest_recent_step_and_never_below_a_minute() -> None:
    assert walked([20.0] * 30).limit() == 200.0
    assert walked([1.0] * 25 + [15.0] + [1.0] * 25).limit() == 150.0, "an evaluation that nobody told of"


def test_the_first_step_may_compile() -> None:
    assert walked([500.0] + [1.0] * 30).limit() == 60.0


def test_what_was_long_ago_counts_twice_not_tenfold() -> None:
    assert walked([1.0, *[1.0] * 20, 100.0, *[1.0] * 300]).limit() == 200.0


def test_phases_and_steps_that_go_back_teach_nothing() -> None:
    pace = walked([1.0] * 30)
    pace.see(progress(31, 5000.0, "evaluate"), 5000.0)
    pace.see(progress(31, 5000.0, "evaluate"), 8000.0)
    pace.see(progress(32, 9000.0), 9000.0)
    pace.see(progress(3, 19000.0), 19000.0)
    assert pace.limit() == 60.0


def test_several_steps_between_two_looks_are_shared_out() -> None:
    pace = StepPace()
    for look_at in range(20):
        pace.see(progress(look_at * 10, look_at * 100.0), look_at * 100.0)
    assert pace.limit() == 100.0


def test_a_pause_counts_whole_though_many_steps_follow_before_the_next_look() -> None:
    pace = walked([1.0] * 30)
    for waited in range(5, 60, 5):
        pace.see(progress(30, 30.0), 30.0 + waited)
    pace.see(progress(130, 93.0), 95.0)
    assert pace.limit() == 550.0
    for step in range(131, 300):
        pace.see(progress(step, float(step)), float(step))
    assert pace.limit() == 110.0, "as any long step, when it was long ago"


# --- looks at real processes --------------------------------------------------------------------------


@contextmanager
def process(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


BURNS = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nsys.stdin.read()"


@pytest.mark.parametrize("ended", [False, True], ids=["that lives", "that was reaped"])
def test_a_look_counts_the_cpu_time_of_a_child(ended: bool) -> None:
    code = (
        "import subprocess, sys\n"
        f"one = subprocess.Popen([sys.executable, '-c', {BURNS!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        f"one.stdout.readline()\nif {ended}: one.communicate()\nprint(flush=True)\nsys.stdin.read()"
    )
    with process(code) as pid:
        one = look(pid, 1.0, None, 5)
        assert one is not None
        assert one.ticks >= 0.3 * HZ
        assert (one.at, one.written) == (1.0, 5)
        assert one.own < one.ticks - 0.2 * HZ


def test_nothing_is_seen_of_a_process_that_has_gone() -> None:
    with process("import sys\nprint(flush=True)\nsys.stdin.read()") as pid:
        pass
    end = time.monotonic() + 10
    while look(pid, 0.0, None, 0) is not None:
        assert time.monotonic() < end


def test_without_a_descriptor_nobody_counts_as_gone() -> None:
    with process("import sys\nprint(flush=True)\nsys.stdin.read()") as pid:

        def sees() -> None:
            assert look(pid, 0.0, None, 0) is not None

        seen = seen_with(sees, 4)
        assert seen[0] is False and seen[-1] is True
