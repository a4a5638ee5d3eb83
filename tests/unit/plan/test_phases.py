"""The table of phases: closed, connected, and without a way out of an ended job."""

from __future__ import annotations

from typing import get_args

import pytest

from nodeagent.model.job import TERMINAL, Phase
from nodeagent.plan.phases import MEANING, TRANSITIONS, Step, allowed, diagram

PHASES: tuple[Phase, ...] = get_args(Phase)


def test_every_step_has_a_meaning_and_is_used() -> None:
    assert set(MEANING) == set(get_args(Step)) == {step for _, step in TRANSITIONS}


def test_every_phase_is_reachable() -> None:
    seen: set[Phase] = {"queued"}
    while new := {after for (before, _), after in TRANSITIONS.items() if before in seen} - seen:
        seen |= new
    assert seen == set(PHASES)


@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_no_way_leads_out_of_an_ended_job(phase: Phase) -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] == phase]
    assert [other for other in PHASES if allowed(phase, other)] == [phase]


def test_every_live_phase_can_be_stopped() -> None:
    assert {before for (before, step) in TRANSITIONS if step == "stop"} == set(PHASES) - TERMINAL


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("queued", "forming", True),
        ("queued", "running", False),
        ("forming", "succeeded", False),
        ("running", "paused", True),  # pausing was too short to be seen
        ("holding", "running", False),
        ("pausing", "succeeded", False),
        ("paused", "failed", False),
        ("holding", "holding", True),
    ],
)
def test_allowed(before: Phase, after: Phase, expected: bool) -> None:
    assert allowed(before, after) is expected


def test_the_diagram_shows_the_whole_table() -> None:
    lines = [line.strip() for line in diagram().splitlines()]
    for (before, step), after in TRANSITIONS.items():
        assert f"{before} --> {after}: {step}" in lines
    for phase in TERMINAL:
        assert f"{phase} --> [*]" in lines
    assert len(lines) == len(TRANSITIONS) + len(TERMINAL) + 2
