"""Events: bursts are judged whole, equal ones folded, and an application's errors never take a GPU out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.hardware.judging.eventrules import MOST_KEPT, XIDS, Fired, judge_events, remember, waits_until
from nodeagent.hardware.readings import DeviceEvent, EventKind

A, B = "GPU-a", "GPU-b"
NONE: frozenset[str] = frozenset()


def xid(code: int, at: float, device: str = A, count: int = 1) -> DeviceEvent:
    return DeviceEvent("xid", at, device, code, f"NVRM: Xid (PCI:0000:3b:00): {code}", count)


class History:
    """Events fed one call after another."""

    def __init__(self) -> None:
        self.past: tuple[DeviceEvent, ...] = ()
        self.last = 0.0

    def at(
        self, now: float, *events: DeviceEvent, bad_links: frozenset[str] = NONE, sound: frozenset[str] = NONE
    ) -> list[Fired]:
        self.past = remember(self.past, events, self.last, now)
        fired = list(judge_events(self.past, events, self.last, now, bad_links, sound))
        self.last = now
        return fired

    def ids(self, now: float, *events: DeviceEvent, bad_links: frozenset[str] = NONE) -> list[tuple[str, str]]:
        return [(f.rule.id, f.device) for f in self.at(now, *events, bad_links=bad_links)]


@pytest.mark.parametrize("code", sorted(XIDS))
def test_each_xid_of_the_table(code: int) -> None:
    history = History()
    (fired,) = [*history.at(100, xid(code, 100)), *history.at(101)]
    row = XIDS[code]
    assert (fired.rule.id, fired.rule.severity, fired.rule.action) == (f"xid.{code}", row.severity, row.action)
    assert str(code) in fired.raw
    assert row.source.startswith("NVIDIA Xid catalog: ")


def test_an_unknown_xid_is_not_trusted_and_stops_nothing() -> None:
    (fired,) = History().at(100, xid(999, 100))
    assert (fired.rule.severity, fired.rule.action, fired.rule.heals) == ("degraded", "diagnose", "quiet")


@pytest.mark.parametrize(
    "kind",
    [
        "off_bus",
        "init_failed",
        "api_mismatch",
        "sxid_fatal",
        "nvlink",
        "nvlink_nonfatal",
        "sxid",
        "aer",
        "mce",
        "mce_corrected",
        "oom",
        "hung_task",
        "lockup",
        "io_error",
    ],
)
def test_kernel_lines(kind: EventKind) -> None:
    (fired,) = History().at(100, DeviceEvent(kind, 100, A if kind in ("off_bus", "init_failed") else "", raw="a line"))
    assert fired.rule.id == f"kernel.{kind}"
    assert fired.rule.severity == {
        "off_bus": "fatal",
        "nvlink": "degraded",
        "mce": "degraded",
        "io_error": "degraded",
        "lockup": "degraded",
        "init_failed": "fatal",
        "sxid_fatal": "fatal",
    }.get(kind, "info")


def test_a_double_bit_error_waits_for_what_explains_it() -> None:
    for explains in (63, 94):
        history = History()
        assert history.ids(100, xid(48, 100)) == []
        assert waits_until(history.past, 100) == 101
        assert (f"xid.{explains}", A) in history.ids(100.5, xid(explains, 100.5))
        assert history.ids(101) == [("xid.48.handled", A)]
        assert history.ids(102) == [], "it is judged once"


def test_a_double_bit_error_alone_is_fatal() -> None:
    history = History()
    assert history.ids(100, xid(48, 100), xid(94, 100, B)) == [("xid.94", B)], "another GPU's explains nothing"
    (fired,) = history.at(101.2)
    assert (fired.rule.id, fired.rule.severity, fired.rule.action) == ("xid.48", "fatal", "reset_gpu")
    assert waits_until(history.past, 101.2) is None


def test_a_storm_of_double_bit_errors_does_not_put_the_verdict_off() -> None:
    history = History()
    fired = [history.ids(100 + i / 10, xid(48, 100 + i / 10)) for i in range(15)]
    assert ("xid.48", A) in fired[10]


def test_a_double_bit_error_that_is_reported_late_waits_from_then_on() -> None:
    """What waited for the error's own time to pass was never judged if it came a second late."""
    history = History()
    assert history.ids(100) == []
    assert history.ids(100.1, xid(48, 98)) == []
    assert waits_until(history.past, 100.1) == pytest.approx(101.1)
    assert history.ids(101.2) == [("xid.48", A)]
    assert history.ids(102.3) == [], "it is judged once"
    history = History()
    assert history.ids(100.1, xid(48, 98)) == []
    assert ("xid.94", A) in history.ids(100.9, xid(94, 98.5))
    assert history.ids(101.2) == [("xid.48.handled", A)]


def test_a_storm_of_double_bit_errors_is_one_in_memory_and_each_counts_once() -> None:
    history = History()
    fired = [one for i in range(100) for one in history.at(100 + i / 10, xid(48, 100 + i / 10))]
    fired += history.at(111.0)
    assert {one.rule.id for one in fired} == {"xid.48"}
    assert sum(one.count for one in fired) == 100
    assert len(history.past) == 1


def test_contained_errors_are_fatal_when_they_come_back() -> None:
    history = History()
    assert history.ids(0.5, xid(94, 0.5)) == [("xid.94", A)]
    assert history.ids(1000, xid(94, 1000)) == [("xid.94", A)]
    assert history.ids(2000, xid(94, 2000)) == [("xid.94.repeats", A), ("xid.94", A)]


def test_contained_errors_of_one_burst_or_of_two_days_do_not_come_back() -> None:
    burst = History()
    for at in (1, 100, 200, 300):
        assert burst.ids(at, xid(94, at)) == [("xid.94", A)]
    days = History()
    for day in (1.0, 60_000.0, 120_000.0, 180_000.0):
        assert days.ids(day, xid(94, day)) == [("xid.94", A)]


def test_contained_errors_come_back_whatever_their_peers_say_of_it() -> None:
    """Each took a peer's worker with it: five on one GPU were the application's, and the peer became degraded."""
    history = History()
    found = [history.ids(600.0 * n, xid(94, 600.0 * n), xid(31, 600.0 * n, B)) for n in range(1, 6)]
    assert [("xid.94.repeats", A) in ids for ids in found] == [False, False, True, True, True]
    assert {rule for ids in found for rule, device in ids if device == B} == {"xid.31"}
    assert not any(rule == "xid.app.spread" for ids in found for rule, _ in ids)


def test_an_application_error_twice_on_one_gpu_alone() -> None:
    history = History()
    assert history.ids(1, xid(31, 1)) == [("xid.31", A)]
    assert history.ids(100, xid(13, 100)) == [("xid.13", A)], "the same burst"
    assert history.ids(1000, xid(13, 1000)) == [("xid.app.repeats", A), ("xid.13", A)]


def test_an_application_error_on_several_gpus_is_the_applications() -> None:
    history = History()
    history.at(1, xid(31, 1))
    assert history.ids(2, xid(31, 2, B)) == [("xid.app.spread", "")]
    assert history.ids(1000, xid(31, 1000)) == [("xid.31", A)], "and later it is no GPU's either"


def test_nvlink_errors_are_fatal_when_a_link_is_down_or_they_repeat() -> None:
    assert History().ids(1, xid(74, 1)) == [("xid.74", A)]
    assert History().ids(1, xid(74, 1), bad_links=frozenset({B})) == [("xid.74", A)]
    assert History().ids(1, xid(74, 1), bad_links=frozenset({A})) == [("xid.nvlink.repeats", A), ("xid.74", A)]
    history = History()
    assert history.ids(1, xid(145, 1)) == []
    assert history.ids(2, bad_links=frozenset({A})) == [("xid.nvlink.repeats", A), ("xid.145", A)]
    history = History()
    for at in (1, 1000):
        assert history.ids(at, xid(149, at)) == []
        assert history.ids(at + 1) == [("xid.149", A)]
    assert history.ids(2000, xid(149, 2000)) == []
    assert history.ids(2001) == [("xid.nvlink.repeats", A), ("xid.149", A)]


def nonfatal(code: int, at: float, device: str = A) -> DeviceEvent:
    return DeviceEvent("nvlink_nonfatal", at, device, code, f"NVRM: Xid (PCI:0000:3b:00): {code}, X Nonfatal", 1, True)


@pytest.mark.parametrize("line_first", [True, False])
def test_what_the_driver_calls_nonfatal_is_shown_and_never_comes_back(line_first: bool) -> None:
    """NVML reports the same Xid without that word: three in a day were fatal, and an idle GPU was reset for one."""
    history = History()
    for at in (1000.0, 2000.0, 3000.0, 4000.0):
        pair = [nonfatal(145, at), xid(145, at + 0.2)]
        fired = history.at(at + 0.2, pair[not line_first]) + history.at(at + 0.7, pair[line_first])
        assert [(f.rule.id, f.rule.severity, f.rule.action, f.device) for f in fired] == [
            ("kernel.nvlink_nonfatal", "info", "none", A)
        ]
        assert history.ids(at + 3) == []


def test_a_nonfatal_line_explains_its_own_device_code_and_burst_alone() -> None:
    for other in (nonfatal(145, 1000, B), nonfatal(146, 1000), nonfatal(145, 800)):
        history = History()
        history.at(1000, other, xid(145, 1000))
        assert history.ids(1002) == [("xid.145", A)]
    history = History()
    history.at(1000, nonfatal(145, 1000), xid(145, 1000), replace(xid(145, 1000), logged=True))
    assert history.ids(1002) == [("xid.145", A)], "the log has a fatal one, too"


def test_an_nvlink_error_that_repeats_counts_what_is_not_explained() -> None:
    history = History()
    for at in (1000, 2000, 3000):
        history.at(at, nonfatal(145, at), xid(145, at))
        history.at(at + 2)
    history.at(4000, xid(145, 4000))
    assert history.ids(4002) == [("xid.145", A)]


def test_a_switchs_error_that_is_not_fatal_asks_for_nothing() -> None:
    """Its repair was tried on the switch's bus id: a reset that failed, a reboot, a ticket."""
    (fired,) = History().at(100, DeviceEvent("sxid", 100, "0000:06:00", 11006, "a line", logged=True))
    assert (fired.rule.severity, fired.rule.action, fired.device) == ("info", "none", "")


def test_what_only_the_kernels_log_says_of_a_gpu_that_answers_is_a_suspicion() -> None:
    """Somebody may have forged it; so no run loses its GPU, and no new one gets it."""
    history, log = History(), replace(xid(79, 100), logged=True)
    (fired,) = history.at(100, log, sound=frozenset({A, B, ""}))
    assert (fired.rule.id, fired.rule.severity, fired.rule.action) == ("xid.79", "unknown", "reboot")
    (fired,) = history.at(101, xid(79, 101), sound=frozenset({A}))
    assert fired.rule.severity == "fatal", "the driver reports it, too"
    (fired,) = history.at(102, replace(log, at=102), sound=frozenset({A}))
    assert fired.rule.severity == "fatal", "it was confirmed within the burst"
    (fired,) = History().at(100, log, sound=frozenset({B}))
    assert fired.rule.severity == "fatal", "the driver does not read that GPU well"


def test_a_lost_gpu_that_the_log_does_not_name_takes_no_other_with_it() -> None:
    (fired,) = History().at(100, DeviceEvent("off_bus", 100, raw="NVRM: fallen off the bus and is not responding"))
    assert (fired.rule.id, fired.rule.severity, fired.device) == ("kernel.off_bus", "degraded", "")


def test_a_switchs_fatal_error_is_the_nodes() -> None:
    event = DeviceEvent("sxid_fatal", 100, "0000:c1:00", 28006, "a line", logged=True)
    (fired,) = History().at(100, event)
    assert (fired.rule.severity, fired.device) == ("fatal", "")
    (fired,) = History().at(100, event, sound=frozenset({A, ""}))
    assert (fired.rule.severity, fired.device) == ("unknown", "")


def test_a_storm_is_one_line_and_no_memory() -> None:
    history = History()
    for i in range(2000):
        assert history.ids(100 + i / 100, xid(45, 100 + i / 100, count=50)) == [("xid.45", A)]
    assert [(e.code, e.count, e.raw) for e in history.past] == [(45, 100_000, xid(45, 0).raw)]


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    history = History()
    history.at(1000, *[xid(13, 1000 + i / 1000, f"GPU-{i}") for i in range(2 * MOST_KEPT)])
    assert len(history.past) == MOST_KEPT
    assert history.past[-1].device == f"GPU-{2 * MOST_KEPT - 1}"
