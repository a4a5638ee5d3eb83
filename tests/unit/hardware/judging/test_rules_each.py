"""The life of a verdict, for each rule of the table: it fires once it has held, not before, and heals as the table
says.

What fires a rule, and what just does not, is in ``test_rules.py`` (readings) and ``test_eventrules.py`` (events).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nodeagent.hardware.judging.eventrules import EVENT_RULES, SETTLE, XIDS
from nodeagent.hardware.judging.judge import (
    LONGEST_LOOK,
    PROBATION,
    QUIET,
    JudgeMemory,
    acknowledged,
    judge,
    rules,
    verified,
)
from nodeagent.hardware.judging.rules import READING_RULES, Rule
from nodeagent.hardware.readings import DeviceEvent, EventKind, Readings
from tests.unit.hardware.judging.test_rules import ALL_GOOD, CASES, OURS

T = 1_700_000_000.0
DEVICE = "GPU-a"
BY_ID = {rule.id: rule for rule in rules()}
READING_CASES = [pytest.param(BY_ID[rule], bad, id=f"{rule}-{i}") for i, (rule, bad, _) in enumerate(CASES)]


class Course:
    """Readings one after the other, each a minute after those that it is compared with."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.at, self.memory = rule, T, JudgeMemory()

    def see(self, readings: Readings, after: float = 0.0) -> None:
        self.at += after
        self.memory = judge(self.memory, readings, ALL_GOOD, self.at, 60.0, OURS)

    def stage(self) -> str | None:
        """Of the rule's verdict; None: there is none."""
        return next((v.stage for v in self.memory.verdicts if v.rule == self.rule.id), None)

    def device(self) -> str:
        return next(v.device for v in self.memory.verdicts if v.rule == self.rule.id)


@pytest.mark.parametrize(("rule", "bad"), READING_CASES)
def test_a_rule_on_readings_fires_once_it_has_held(rule: Rule, bad: Readings) -> None:
    course = Course(rule)
    if rule.window:
        hold(course, bad, breaks=True)
        return
    course.see(bad)
    if rule.after:
        assert course.stage() is None
        course.see(bad, rule.after - 0.1)
        assert course.stage() is None, "a moment too early"
        course.see(ALL_GOOD, 0.05)
        course.see(bad, 0.1)
        assert course.stage() is None, "a break in between: it has to hold anew"
        course.see(bad, rule.after)
    assert course.stage() == "active"
    found = next(v for v in course.memory.verdicts if v.rule == rule.id)
    assert (found.severity, found.action, found.text) == (rule.severity, rule.action, rule.text)


@pytest.mark.parametrize(("rule", "bad"), READING_CASES)
def test_a_rule_on_readings_heals_as_the_table_says(rule: Rule, bad: Readings) -> None:
    course = Course(rule)
    if rule.window:
        hold(course, bad, breaks=False)
    else:
        course.see(bad)
        course.see(bad, rule.after)
    assert course.stage() == "active"
    unknown = Readings(boot="b1")
    course.see(unknown, 1.0)
    assert course.stage() == "active", "silence is not health"
    course.see(ALL_GOOD, 1.0)
    if rule.heals == "reading":
        assert course.stage() == ("repaired" if rule.severity == "fatal" else None)
    elif rule.heals == "quiet":
        assert course.stage() == "active"
        course.see(ALL_GOOD, QUIET)
        assert course.stage() is None
    else:
        course.see(ALL_GOOD, 30 * 86_400.0)
        assert course.stage() == "active", "only its repair heals it"
        heal_by_repair(course)
    if course.stage() == "repaired":
        through_probation(course)


def hold(course: Course, bad: Readings, breaks: bool) -> None:
    """For as long, or as often, as a rule with a window asks for, within which there may be breaks."""
    steps = int(course.rule.after / LONGEST_LOOK) or course.rule.times
    for left in reversed(range(steps)):
        assert course.stage() is None, "a moment too early"
        course.see(bad, LONGEST_LOOK)
        if left and (breaks or course.rule.times):
            course.see(ALL_GOOD, 0.1)
    assert course.stage() == "active"


def heal_by_repair(course: Course) -> None:
    """A reboot, where that repairs it; else a person's word."""
    if course.rule.action in ("reset_gpu", "reboot"):
        course.see(replace(ALL_GOOD, boot="b2"), 60.0)
        assert course.stage() == "repaired"
        return
    course.memory = acknowledged(course.memory, course.device(), course.rule.id, course.at)
    assert course.stage() == "probation"
    course.see(ALL_GOOD, PROBATION)
    assert course.stage() is None


def through_probation(course: Course) -> None:
    course.memory = verified(course.memory, [course.device()], course.at)
    assert course.stage() == "probation"
    course.see(ALL_GOOD, PROBATION - 1.0)
    assert course.stage() == "probation"
    course.see(ALL_GOOD, 1.0)
    assert course.stage() is None


def xid(code: int, at: float, device: str = DEVICE) -> DeviceEvent:
    return DeviceEvent("xid", at, device, code, f"Xid {code}")


def kernel(kind: EventKind) -> Callable[[float], list[DeviceEvent]]:
    device = DEVICE if kind in ("off_bus", "init_failed") else ""
    return lambda at: [DeviceEvent(kind, at, device, 0, kind)]


def day(code: int, *hours: float, device: str = DEVICE) -> Callable[[float], list[DeviceEvent]]:
    """One event in each of these hours before."""
    return lambda at: [xid(code, at - 3600.0 * hour, device) for hour in hours]


EVENT_CASES: dict[str, tuple[Callable[[float], list[DeviceEvent]], Callable[[float], list[DeviceEvent]]]] = {
    "kernel.off_bus": (kernel("off_bus"), kernel("aer")),
    "kernel.init_failed": (kernel("init_failed"), kernel("api_mismatch")),
    "kernel.api_mismatch": (kernel("api_mismatch"), kernel("init_failed")),
    "kernel.sxid_fatal": (kernel("sxid_fatal"), kernel("sxid")),
    "kernel.sxid": (kernel("sxid"), kernel("sxid_fatal")),
    "kernel.nvlink_nonfatal": (kernel("nvlink_nonfatal"), kernel("nvlink")),
    "kernel.lockup": (kernel("lockup"), kernel("hung_task")),
    "kernel.nvlink": (kernel("nvlink"), kernel("aer")),
    "kernel.aer": (kernel("aer"), kernel("mce")),
    "kernel.mce": (kernel("mce"), kernel("mce_corrected")),
    "kernel.mce_corrected": (kernel("mce_corrected"), kernel("mce")),
    "kernel.oom": (kernel("oom"), kernel("hung_task")),
    "kernel.hung_task": (kernel("hung_task"), kernel("oom")),
    "kernel.io_error": (kernel("io_error"), kernel("oom")),
    "kernel.overrun": (kernel("overrun"), kernel("oom")),
    "xid.app.repeats": (day(31, 5, 0), day(31, 0.01, 0)),
    "xid.app.spread": (
        lambda at: [xid(31, at), xid(31, at, "GPU-b")],
        lambda at: [xid(31, at - 3600.0), xid(31, at, "GPU-b")],
    ),
    "xid.94.repeats": (day(94, 10, 5, 0), day(94, 5, 0)),
    "xid.nvlink.repeats": (day(74, 10, 5, 0), day(74, 5, 0)),
    "xid.48.handled": (lambda at: [xid(48, at), xid(63, at)], lambda at: [xid(48, at), xid(13, at)]),
} | {f"xid.{code}": (day(code, 0), day(code + 1000, 0)) for code in XIDS}
"""Rule to the events that fire it and those that just do not."""


def after(events: list[DeviceEvent]) -> JudgeMemory:
    """Each judged when it came, and what waits for its burst once it has settled."""
    memory = JudgeMemory()
    for at in sorted({event.at for event in events}):
        now = tuple(event for event in events if event.at == at)
        memory = judge(memory, replace(ALL_GOOD, events=now), None, at, 0.0, OURS)
    return judge(memory, ALL_GOOD, None, T + SETTLE, 0.0, OURS)


def test_every_rule_on_events_has_a_case() -> None:
    assert set(EVENT_CASES) == {r.id for r in EVENT_RULES} | {f"xid.{code}" for code in XIDS}
    assert set(EVENT_CASES) | {case[0] for case in CASES} == set(BY_ID)
    assert not set(EVENT_CASES) & {rule.id for rule in READING_RULES}


@pytest.mark.parametrize("name", EVENT_CASES)
def test_a_rule_on_events_fires_and_does_not_on_the_near_miss(name: str) -> None:
    fires, misses = EVENT_CASES[name]
    assert [v.stage for v in after(fires(T)).verdicts if v.rule == name] == ["active"]
    assert name not in {v.rule for v in after(misses(T)).verdicts}


@pytest.mark.parametrize("name", EVENT_CASES)
def test_a_rule_on_events_heals_as_the_table_says(name: str) -> None:
    course = Course(BY_ID[name])
    course.memory, course.at = after(EVENT_CASES[name][0](T)), T + SETTLE
    course.see(ALL_GOOD, QUIET - SETTLE - 1.0)
    assert course.stage() == "active"
    course.see(ALL_GOOD, 2.0)
    if course.rule.heals == "quiet":
        assert course.stage() is None
        return
    course.see(ALL_GOOD, 86_400.0)
    assert course.stage() == "active", "only its repair heals it"
    heal_by_repair(course)
    if course.stage() == "repaired":
        through_probation(course)
