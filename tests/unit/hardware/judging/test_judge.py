"""From findings to verdicts and back: holding times, repair, verification, probation, and heavier repairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.hardware.judging.judge import (
    PROBATION,
    QUIET,
    JudgeMemory,
    JudgePolicy,
    acknowledged,
    escalated,
    judge,
    repaired,
    rules,
    verified,
)
from nodeagent.hardware.readings import DeviceEvent, GpuReading, ProbeReading, Readings
from nodeagent.model.health import Verdict, worst

A = "GPU-a"
FINE = Readings(boot="b1", gpus=(GpuReading(A, 0, pci="0000:3b:00", recovery="none"),), expected=(A,))


EVERY_RULE = JudgePolicy()


class Node:
    """A machine whose clock the test moves."""

    def __init__(self, policy: JudgePolicy = EVERY_RULE) -> None:
        self.memory, self.before, self.now, self.policy = JudgeMemory(), FINE, 1000.0, policy

    def see(self, readings: Readings = FINE, after: float = 1.0) -> tuple[Verdict, ...]:
        self.now += after
        self.memory = judge(self.memory, readings, self.before, self.now, after, policy=self.policy)
        self.before = readings
        return self.memory.verdicts

    def xid(self, code: int, device: str = "0000:3b:00") -> Readings:
        return replace(FINE, events=(DeviceEvent("xid", self.now + 1, device, code, f"Xid {code}"),))

    def stages(self) -> list[tuple[str, str]]:
        return [(v.rule, v.stage) for v in self.memory.verdicts]


def with_gpu(**changes: object) -> Readings:
    assert FINE.gpus is not None
    return replace(FINE, gpus=(replace(FINE.gpus[0], **changes),))  # type: ignore[arg-type]


def test_an_event_names_the_gpu_by_its_bus_id() -> None:
    node = Node()
    (verdict,) = node.see(node.xid(79))
    assert (verdict.rule, verdict.device, verdict.severity, verdict.action) == ("xid.79", A, "fatal", "reboot")
    assert verdict.raw == "Xid 79"
    assert verdict.bars


def test_a_rule_that_must_hold_fires_only_then() -> None:
    node = Node()
    down = with_gpu(links_once=4, links_up=3)
    assert node.see(down) == ()
    assert node.see(down, 4.9) == ()
    assert node.see(with_gpu(links_once=4, links_up=4)) == ()
    assert node.see(down) == ()
    assert node.see(down, 4.9) == (), "the time begins anew"
    assert [v.rule for v in node.see(down, 0.2)] == ["nvlink.down"]


def test_what_comes_and_goes_counts_by_how_much_of_the_window_it_held() -> None:
    """A slowdown of five seconds in every ten never held for ten minutes without a break, so it never fired."""
    node, slow = Node(), with_gpu(slowdown=frozenset({"hw_thermal"}))
    fine = with_gpu(slowdown=frozenset())
    half = 0
    while not node.memory.verdicts:
        node.see(slow, 5.0)
        node.see(fine, 5.0)
        half += 1
        assert half <= 120
    assert [v.rule for v in node.memory.verdicts] == ["clocks.slowdown"]
    assert half in (119, 120), "ten minutes of it, in twenty; the first look speaks for what was before it"
    rare = Node()
    for _ in range(200):
        rare.see(slow, 5.0)
        rare.see(fine, 55.0)
    assert rare.memory.verdicts == (), "five minutes of the hour are not enough"
    (tally,) = rare.memory.tallies.values()
    assert len(tally) == 60


def test_a_link_that_goes_down_and_up_fires_the_third_time() -> None:
    node = Node()
    down, up = with_gpu(links_once=4, links_up=3), with_gpu(links_once=4, links_up=4)
    for _ in range(2):
        assert node.see(down) == ()
        assert node.see(replace(down, gpus=None)) == (), "not seen to be up"
        assert node.see(down) == ()
        assert node.see(up, 600.0) == ()
    assert [(v.rule, v.severity) for v in node.see(down)] == [("nvlink.flaps", "degraded")]


def test_silence_is_not_health() -> None:
    """A verdict stays while its value cannot be read."""
    node = Node()
    node.see(with_gpu(recovery="reset"))
    node.see(replace(FINE, gpus=None, probes=(ProbeReading("nvml", 1),)))
    assert ("nvml.recovery.reset", "active") in node.stages()
    node.see(with_gpu(recovery=None), 10 * PROBATION)
    assert ("nvml.recovery.reset", "active") in node.stages()


def test_what_heals_by_reading_is_verified_and_watched_when_fatal() -> None:
    node = Node()
    node.see(with_gpu(recovery="reset"))
    node.see()
    assert node.stages() == [("nvml.recovery.reset", "repaired")]
    node.see(after=10 * PROBATION)
    assert node.stages() == [("nvml.recovery.reset", "repaired")], "it waits for its check"
    node.memory = verified(node.memory, [A], node.now)
    node.see(after=PROBATION - 1)
    assert node.stages() == [("nvml.recovery.reset", "probation")]
    assert node.memory.verdicts[0].bars, "still out"
    assert node.see() == ()


def test_what_is_not_fatal_is_forgotten_when_it_is_fine() -> None:
    node = Node()
    assert worst(node.see(with_gpu(remap_pending=True))) == "degraded"
    assert node.see(with_gpu(remap_pending=False)) == ()


def test_an_event_heals_only_by_its_repair() -> None:
    node = Node()
    node.see(node.xid(95))
    node.see(after=30 * 86400.0)
    assert node.stages() == [("xid.95", "active")], "time heals nothing"
    assert verified(node.memory, [A], node.now) == node.memory, "a check alone neither"
    assert repaired(node.memory, A, "reboot", node.now) == node.memory, "another repair neither"
    assert repaired(node.memory, "GPU-b", "reset_gpu", node.now) == node.memory, "nor another GPU's"
    node.memory = repaired(node.memory, A, "reset_gpu", node.now)
    assert node.stages() == [("xid.95", "repaired")]
    node.memory = verified(node.memory, [A], node.now)
    assert node.see(after=PROBATION) == ()


def test_a_reboot_repairs_what_a_reset_would() -> None:
    node = Node()
    node.see(node.xid(95))
    node.see(replace(FINE, boot="b2"))
    assert node.stages() == [("xid.95", "repaired")]


@pytest.mark.parametrize("code", [64])
def test_no_reboot_repairs_what_needs_a_technician(code: int) -> None:
    node = Node()
    node.see(node.xid(code))
    node.see(replace(FINE, boot="b2"))
    assert node.stages() == [(f"xid.{code}", "active")]
    node.memory = acknowledged(node.memory, A, None, node.now)
    assert node.stages() == [(f"xid.{code}", "probation")]
    assert node.see(replace(FINE, boot="b2"), PROBATION) == ()


def test_an_acknowledgement_is_of_one_rule_if_so_reported() -> None:
    node = Node()
    node.see(node.xid(64))
    node.see(node.xid(79))
    node.memory = acknowledged(node.memory, A, "xid.64", node.now)
    assert node.stages() == [("xid.64", "probation"), ("xid.79", "active")]


def test_a_repair_that_does_not_last_asks_for_the_next() -> None:
    node = Node()
    for action in ("reset_gpu", "reboot", "service"):
        (verdict,) = node.see(node.xid(95))
        assert (verdict.stage, verdict.action) == ("active", action)
        if action != "service":
            node.memory = verified(repaired(node.memory, A, verdict.action, node.now), [A], node.now)


def test_after_a_week_the_repair_has_lasted() -> None:
    node = Node()
    node.see(node.xid(95))
    node.memory = verified(repaired(node.memory, A, "reset_gpu", node.now), [A], node.now)
    assert node.see(after=7 * 86400.0) == ()
    (verdict,) = node.see(node.xid(95))
    assert verdict.action == "reset_gpu"


def test_what_fires_on_probation_is_active_again_and_counts_on() -> None:
    node = Node()
    node.see(node.xid(79))
    first = node.memory.verdicts[0]
    node.memory = acknowledged(node.memory, A, None, node.now)
    (again,) = node.see(node.xid(79))
    assert (again.stage, again.count, again.since, again.until) == ("active", 2, first.since, None)


def test_what_heals_by_quiet() -> None:
    node = Node()
    node.see(node.xid(31))
    node.see(after=QUIET - 2)
    node.see(node.xid(31))
    node.see(after=QUIET - 1)
    assert ("xid.31", "active") in node.stages(), "counted from the last"
    node.see()
    assert ("xid.31", "active") not in node.stages()


def test_the_driver_hangs_and_answers_again() -> None:
    node = Node()
    silent = [replace(FINE, gpus=None, probes=(ProbeReading("nvml", n),)) for n in (1, 2)]
    assert [(v.rule, v.severity) for v in node.see(silent[0])] == [("probe.nvml.late", "unknown")]
    assert [(v.rule, v.severity) for v in node.see(silent[1])] == [("probe.nvml.hung", "fatal")]
    node.see(replace(FINE, probes=(ProbeReading("nvml"),)))
    assert node.stages() == [("probe.nvml.hung", "repaired")]


def test_a_repair_that_did_not_help_asks_for_the_next_and_holds() -> None:
    node = Node()
    node.see(node.xid(95))
    node.memory = repaired(node.memory, A, "reset_gpu", node.now)
    node.memory = escalated(node.memory, {("xid.95", A)}, node.now, "verify run: gemm")
    (verdict,) = node.see()
    assert (verdict.stage, verdict.action, verdict.raw) == ("active", "reboot", "verify run: gemm")
    assert len(node.memory.repairs) == 1, "it was one repair"
    node.memory = escalated(node.memory, {("xid.95", A)}, node.now, "still there")
    node.memory = escalated(node.memory, {("xid.95", A), ("xid.79", "other")}, node.now, "still there")
    assert [v.action for v in node.memory.verdicts] == ["service"], "there is nothing heavier"


def test_each_relapse_within_a_week_doubles_the_probation() -> None:
    node = Node()
    lengths = []
    for _ in range(3):
        node.see(node.xid(95))
        (verdict,) = node.memory.verdicts
        node.memory = repaired(node.memory, A, verdict.action, node.now)
        node.memory = verified(node.memory, [A], node.now)
        (verdict,) = node.memory.verdicts
        assert verdict.until is not None
        lengths.append(verdict.until - node.now)
    assert lengths == [PROBATION, 2 * PROBATION, 4 * PROBATION]
    node.memory = acknowledged(node.memory, A, None, node.now)
    assert node.memory.verdicts[0].until == node.now + PROBATION, "a person vouches for it"


def test_dry_run_tells_and_bars_nothing() -> None:
    node = Node(JudgePolicy(dry_run=frozenset({"xid.79"})))
    (verdict,) = node.see(node.xid(79))
    assert (verdict.severity, verdict.bars) == ("fatal", False)
    assert worst((verdict,)) == "ok"


def test_a_rule_switched_off_says_nothing() -> None:
    node = Node(JudgePolicy(off=frozenset({"xid.79", "memory.remap_pending"})))
    assert node.see(node.xid(79)) == ()
    assert node.see(with_gpu(remap_pending=True)) == ()


def test_rules_have_one_id_each() -> None:
    ids = [rule.id for rule in rules()]
    assert len(ids) == len(set(ids))
    assert all(rule.source and rule.text for rule in rules())
