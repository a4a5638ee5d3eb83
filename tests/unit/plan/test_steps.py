"""The tables of states: closed, connected, and without a way out of what has ended."""

from __future__ import annotations

from typing import get_args

import pytest

from nodeagent.model.job import TERMINAL, Phase
from nodeagent.model.pod import PodPhase
from nodeagent.model.world import GenerationState, Token
from nodeagent.plan.steps import (
    GENERATION,
    GENERATION_MEANING,
    MEANING,
    POD,
    POD_MEANING,
    TRANSITIONS,
    PhaseStep,
    PodStage,
    PodStep,
    diagram,
    may_become,
    phase_may_become,
    pod_state,
)
from nodeagent.pods.base import PodStatus

PHASES: tuple[Phase, ...] = get_args(Phase)


def test_every_step_has_a_meaning_and_is_used() -> None:
    assert set(MEANING) == set(get_args(PhaseStep)) == {step for _, step in TRANSITIONS}


def test_every_phase_is_reachable() -> None:
    seen: set[Phase] = {"queued"}
    while new := {after for (before, _), after in TRANSITIONS.items() if before in seen} - seen:
        seen |= new
    assert seen == set(PHASES)


@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_no_way_leads_out_of_an_ended_job(phase: Phase) -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] == phase]
    assert [other for other in PHASES if phase_may_become(phase, other)] == [phase]


def test_every_live_phase_can_be_stopped() -> None:
    assert {before for (before, step) in TRANSITIONS if step == "stop"} == set(PHASES) - TERMINAL


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("queued", "forming", True),
        ("queued", "running", False),
        ("queued", "succeeded", False),
        ("running", "paused", True),  # pausing was too short to be seen
        ("holding", "running", False),
        ("pausing", "succeeded", False),
        ("paused", "failed", False),
        ("holding", "holding", True),
    ],
)
def test_allowed(before: Phase, after: Phase, expected: bool) -> None:
    assert phase_may_become(before, after) is expected


def test_the_diagram_shows_the_whole_table() -> None:
    lines = [line.strip() for line in diagram(TRANSITIONS, "queued", TERMINAL).splitlines()]
    for (before, step), after in TRANSITIONS.items():
        assert f"{before} --> {after}: {step}" in lines
    for phase in TERMINAL:
        assert f"{phase} --> [*]" in lines
    assert len(lines) == len(TRANSITIONS) + len(TERMINAL) + 2


def test_a_generation_ends_once_and_never_forms_again() -> None:
    states = get_args(GenerationState)
    reach = {before: {after for after in states if may_become(GENERATION, before, after)} for before in states}
    assert reach == {"forming": {*states}, "active": {"active", "ended"}, "ended": {"ended"}}
    assert set(GENERATION_MEANING) == {step for _, step in GENERATION}


def test_a_pod_starts_only_what_it_promised() -> None:
    assert [before for (before, step) in POD if step == "start"] == ["promised"]
    assert [before for before in get_args(PodStage) if may_become(POD, before, "started")] == ["promised", "started"]
    assert set(POD_MEANING) == set(get_args(PodStep)) == {step for _, step in POD}


@pytest.mark.parametrize(
    ("highest", "generation", "phase", "expected"),
    [
        (None, None, "ready", "empty"),
        (3, None, "ready", "promised"),
        (3, 3, "running", "started"),
        (4, 3, "stopping", "started"),  # the next one is promised while the last one ends
        (4, 3, "exited", "promised"),
        (3, 3, "exited", "stopped"),
        (3, 3, "gone", "stopped"),
        (3, 3, "stuck", "started"),
    ],
)
def test_what_a_pod_is(highest: int | None, generation: int | None, phase: PodPhase, expected: PodStage) -> None:
    def token(number: int | None) -> Token | None:
        return None if number is None else Token(number=number, id=f"g{number}")

    status = PodStatus(uid="u", phase=phase, highest=token(highest), generation=token(generation))
    assert pod_state(status) == expected
    assert pod_state(None) == "empty"
