"""The monitor between probes and judge: which events are whose, what is told when, what survives a restart."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from errno import ENOENT
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from structlog.testing import capture_logs

from nodeagent.hardware.judging.judge import JudgePolicy
from nodeagent.hardware.monitor import VERIFY, Machine, Monitor, OwnWork
from nodeagent.hardware.plugins import Plugin
from nodeagent.hardware.probes.process import NotUnderstoodError
from nodeagent.hardware.readings import DeviceEvent, ProbeReading
from nodeagent.hardware.saved import VERSION, SavedHealth, load_memory, save_memory

UUIDS = ("GPU-a", "GPU-b")
BUS = {"GPU-a": "0000:10:00", "GPU-b": "0000:20:00"}


class Clock:
    def __init__(self) -> None:
        self.time = 1_000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_700_000_000 + self.time


class Watched:
    """A monitor whose probes never run: the test speaks for them, and moves the clock."""

    def __init__(
        self, folder: Path, *, configured: tuple[str, ...] | None = None, gpus: bool = True, checked: bool = False,
        boot: str = "boot", plugins: tuple[Plugin, ...] = (), own: OwnWork | None = None, slots: tuple[str, ...] = (),
        models: Mapping[str, str] = MappingProxyType({}), **policy: Any,
    ) -> None:  # fmt: skip
        self.clock, self.changes = Clock(), 0
        machine = Machine(boot=boot, gpus=gpus, configured=configured, plugins=plugins, slots=slots, models=models)
        self.monitor = Monitor(
            machine,
            folder,
            {},
            self.clock,
            policy=JudgePolicy(**policy),
            changed=self._changed,
            own=own or OwnWork(),
            checked=checked,
        )

    def _changed(self) -> None:
        self.changes += 1

    def read(self, *uuids: str, **fields: object) -> None:
        """The driver tells of these GPUs; ``fields`` are the first one's."""
        line = [{"uuid": u, "index": i, "pci": BUS[u]} | (fields if not i else {}) for i, u in enumerate(uuids)]
        self.monitor.take_gpus({"gpus": line})
        self.monitor.judge()

    def kernel(self, code: int, bus: str) -> None:
        """The kernel's log tells of an Xid."""
        event = {"kind": "xid", "at": self.clock.wall(), "device": bus, "code": code, "raw": f"Xid {code}", "count": 1}
        self.monitor.take_host({"events": [event]})
        self.monitor.judge()

    def later(self, seconds: float) -> None:
        self.clock.time += seconds
        self.monitor.judge()

    @property
    def found(self) -> list[tuple[str, str, str]]:
        return [(v.rule, v.device, v.stage) for v in self.monitor.verdicts]


def test_a_bus_id_becomes_the_gpus_uuid_and_the_others_hear_of_it_at_once(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    before = one.changes
    one.kernel(79, BUS["GPU-b"])
    assert one.found == [("xid.79", "GPU-b", "active")]
    assert (one.changes, [v.rule for v in one.monitor.published]) == (before + 1, ["xid.79"])


def test_the_kernels_log_alone_makes_a_gpu_that_answers_a_suspect(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    one.kernel(79, BUS["GPU-b"])
    assert [(v.rule, v.severity, v.bars) for v in one.monitor.verdicts] == [("xid.79", "unknown", False)]
    one.monitor.take_gpus({"events": [["GPU-b", 79, one.clock.wall(), 1, ""]]})
    one.monitor.judge()
    assert [(v.rule, v.severity, v.bars) for v in one.monitor.verdicts] == [("xid.79", "fatal", True)]
    one.kernel(79, BUS["GPU-b"])
    assert [v.severity for v in one.monitor.verdicts] == ["fatal"]


def test_the_kernels_log_is_believed_of_a_gpu_that_does_not_answer(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS, error="GPU_IS_LOST")
    one.kernel(79, BUS["GPU-a"])
    assert {(v.rule, v.severity) for v in one.monitor.verdicts} == {("xid.79", "fatal"), ("nvml.lost", "fatal")}


def after_a_boot(folder: Path, **more: Any) -> Watched:
    return Watched(folder, boot="next boot", **more)


async def test_a_boot_that_finds_fewer_gpus_is_no_sound_machine_with_fewer(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    await one.monitor.save()
    next_one = after_a_boot(tmp_path)
    next_one.read("GPU-a")
    assert next_one.found == [], "the driver may still be finding them"
    next_one.later(10)
    assert next_one.found == [("nvml.missing", "GPU-b", "active")]
    assert next_one.monitor.expected == {*UUIDS}, "its repair is one of a known GPU"
    next_one.kernel(79, BUS["GPU-b"])
    assert ("xid.79", "GPU-b", "active") in next_one.found, "its bus is known"
    next_one.monitor.acknowledge("GPU-b", None)
    next_one.read("GPU-a")
    assert "nvml.missing" not in {rule for rule, _, _ in next_one.found}
    await next_one.monitor.save()
    third = Watched(tmp_path, boot="third boot")
    third.read("GPU-a")
    third.later(10)
    assert "nvml.missing" not in {rule for rule, _, _ in third.found}, "the new number was taken"


def test_a_gpu_that_the_driver_lists_again_is_not_given_up(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    one.read("GPU-a")
    one.later(10)
    one.monitor.take_gpus({"gpus": [{"uuid": uuid, "index": 0, "pci": BUS[uuid]} for uuid in UUIDS]})
    assert one.found == [("nvml.missing", "GPU-b", "active")], "not judged yet"
    one.monitor.acknowledge("GPU-b", None)
    assert one.monitor.expected == {*UUIDS}


async def test_what_a_boot_does_not_find_is_unlisted_until_a_person_gives_it_up(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    await one.monitor.save()

    def unlisted(watched: Watched) -> list[str]:
        return [gpu.uuid for gpu in watched.monitor.unlisted]

    assert unlisted(one) == []
    next_one = after_a_boot(tmp_path)
    assert unlisted(next_one) == [*UUIDS], "nothing was read yet"
    next_one.read("GPU-a")
    assert unlisted(next_one) == ["GPU-b"]
    next_one.later(10)
    before = next_one.changes
    next_one.monitor.acknowledge("GPU-b", None)
    assert (unlisted(next_one), next_one.changes) == ([], before + 1)
    assert unlisted(after_a_boot(tmp_path, off=frozenset({"nvml.missing"}))) == []
    assert unlisted(after_a_boot(tmp_path, dry_run=frozenset({"nvml.missing"}))) == []


async def test_the_verdicts_of_a_card_leave_with_it(tmp_path: Path) -> None:
    """Those of a card that is not there any more heal by nothing: the node was worn for ever."""
    one = Watched(tmp_path)
    one.read(*UUIDS, remap_failed=True, links_up=1)
    one.read(*UUIDS, remap_failed=True, links_up=0)
    assert one.found == [("memory.remap_failed", "GPU-a", "active")]
    await one.monitor.save()
    next_one = after_a_boot(tmp_path)
    new = {"uuid": "GPU-new", "index": 0, "pci": BUS["GPU-a"]}
    next_one.monitor.take_gpus({"gpus": [new, {"uuid": "GPU-b", "index": 1, "pci": BUS["GPU-b"]}]})
    assert (next_one.found, next_one.monitor.published) == ([], ())
    next_one.later(10)
    assert next_one.found == []


async def test_a_driver_that_does_not_come_up_after_a_boot_is_asked_where_there_were_gpus(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    await one.monitor.save()
    assert after_a_boot(tmp_path, gpus=False).monitor.asks_the_driver
    assert not Watched(tmp_path / "bare", gpus=False).monitor.asks_the_driver


async def test_an_operator_takes_a_machine_whose_driver_is_gone_as_it_is(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    await one.monitor.save()
    next_one = after_a_boot(tmp_path, gpus=False)
    next_one.read(*UUIDS)
    next_one.monitor.probe("nvml").reading = ProbeReading("nvml", problem="NVML: Driver Not Loaded")
    next_one.later(1)
    assert next_one.found == [("probe.nvml.broken", "", "active")]
    next_one.monitor.acknowledge("", "probe.nvml.broken")
    next_one.later(1)
    assert next_one.found == [("probe.nvml.broken", "", "probation")]
    assert (next_one.monitor.expected, next_one.monitor.last_gpus) == (frozenset(), ())
    await next_one.monitor.save()
    assert not after_a_boot(tmp_path, gpus=False).monitor.asks_the_driver
    here = Watched(tmp_path / "here")
    here.read(*UUIDS)
    here.monitor.probe("nvml").reading = ProbeReading("nvml", problem="NVML: Unknown Error")
    here.monitor.acknowledge("", None)
    assert here.monitor.expected == {*UUIDS}, "its driver is there, and may answer again"


SLOTS = tuple(BUS.values())
NOT_LOADED = "NVML: Driver Not Loaded"


def without_driver(folder: Path, gpus: bool = False, slots: tuple[str, ...] = SLOTS, boot: str = "boot") -> Watched:
    """A machine with GPUs in its slots; the driver does not answer."""
    one = Watched(folder, gpus=gpus, slots=slots, boot=boot)
    one.monitor.judge()
    assert one.found == [], "it may still answer"
    one.monitor.probe("nvml").reading = ProbeReading("nvml", problem=NOT_LOADED)
    one.later(1)
    return one


def unlisted(one: Watched) -> list[str]:
    return [gpu.uuid for gpu in one.monitor.unlisted]


@pytest.mark.parametrize("loaded", [False, True])
def test_gpus_of_a_machine_whose_driver_never_answered_are_installed_and_unknown(tmp_path: Path, loaded: bool) -> None:
    """It was a sound machine without GPUs."""
    one = without_driver(tmp_path, gpus=loaded)
    (verdict,) = one.monitor.verdicts
    assert (verdict.rule, verdict.device, verdict.unknown) == ("probe.nvml.broken", "", True)
    assert verdict.raw == f"nvml: NVIDIA GPUs are installed ({', '.join(SLOTS)}), but: {NOT_LOADED}"
    assert (unlisted(one), one.monitor.asks_the_driver) == ([*SLOTS], True)
    many = without_driver(tmp_path, slots=tuple(f"0000:{n}0:00" for n in range(8)))
    assert "(0000:00:00, 0000:10:00, 0000:20:00 and 5 more)" in many.monitor.verdicts[0].raw


def test_a_driver_that_lists_no_gpu_of_those_installed_is_no_driver(tmp_path: Path) -> None:
    one = Watched(tmp_path, slots=SLOTS)
    one.read()
    assert one.found == [("probe.nvml.broken", "", "active")]
    assert one.monitor.verdicts[0].raw.endswith(", but: the driver lists none")
    one.monitor.acknowledge("", None)
    assert unlisted(one) == [], "a person does without them"
    bare = Watched(tmp_path)
    bare.read()
    assert bare.found == [], "there is none that it could list"


@pytest.mark.parametrize("loaded", [False, True])
async def test_an_operator_takes_a_machine_that_never_had_a_driver_as_it_is(tmp_path: Path, loaded: bool) -> None:
    one = without_driver(tmp_path, gpus=loaded)
    one.monitor.acknowledge("", "port.down")
    assert unlisted(one) == [*SLOTS]
    before = one.changes
    one.monitor.acknowledge("", None)
    assert one.changes > before
    one.later(1)
    stage, kept = ("active", [*SLOTS]) if loaded else ("probation", [])
    assert (one.found, unlisted(one)) == ([("probe.nvml.broken", "", stage)], kept), "a driver may answer again"
    await one.monitor.save()
    again = after_a_boot(tmp_path, gpus=loaded, slots=SLOTS)
    assert (unlisted(again), again.monitor.asks_the_driver) == (kept, loaded)
    assert unlisted(after_a_boot(tmp_path, gpus=loaded, slots=(*SLOTS, "0000:30:00"))) == [*kept, "0000:30:00"]


async def test_nothing_is_taken_as_it_is_before_anything_is_wrong(tmp_path: Path) -> None:
    one = Watched(tmp_path, gpus=False, slots=SLOTS)
    one.monitor.acknowledge("", None)
    assert unlisted(one) == [*SLOTS]


H200S = dict.fromkeys(SLOTS, "0x2335")


async def test_a_new_machine_whose_driver_lists_fewer_gpus_than_it_has_is_no_sound_one_with_fewer(
    tmp_path: Path,
) -> None:
    one = Watched(tmp_path, models=H200S)
    assert unlisted(one) == [], "the driver has not answered"
    one.read("GPU-a")
    assert (one.found, unlisted(one)) == ([], [SLOTS[1]]), "the driver may still be finding it"
    one.later(10)
    (verdict,) = one.monitor.verdicts
    assert (verdict.rule, verdict.device, verdict.unknown) == ("nvml.unlisted", SLOTS[1], True)
    assert verdict.raw == f"{SLOTS[1]} is on the PCI bus, and not among the 1 GPUs that NVML lists"
    one.read(*UUIDS)
    assert (one.found, unlisted(one), {*one.monitor.expected}) == ([], [], {*UUIDS})
    one.read("GPU-a")
    one.later(10)
    assert one.found == [("nvml.missing", "GPU-b", "active")], "by its name, once that is known"
    assert unlisted(one) == ["GPU-b"]


async def test_a_gpu_that_the_driver_never_listed_is_given_up_too(tmp_path: Path) -> None:
    one = Watched(tmp_path, models=H200S)
    one.read("GPU-a")
    one.later(10)
    one.monitor.acknowledge(SLOTS[1], "nvml.missing")
    assert unlisted(one) == [SLOTS[1]]
    before = one.changes
    one.monitor.acknowledge(SLOTS[1], None)
    assert (one.found, unlisted(one), one.changes) == ([], [], before + 1)
    await one.monitor.save()
    again = after_a_boot(tmp_path, models=H200S)
    again.read("GPU-a")
    again.later(10)
    assert (again.found, unlisted(again)) == ([], [])


async def test_a_restart_looks_anew_whether_the_driver_lists_a_gpu(tmp_path: Path) -> None:
    one = Watched(tmp_path, models=H200S)
    one.read("GPU-a")
    one.later(10)
    await one.monitor.save()
    again = after_a_boot(tmp_path, models={SLOTS[0]: "0x2335"})
    again.read("GPU-a")
    assert again.found == [], "it was taken out"


async def test_links_that_were_up_are_remembered_in_this_boot_alone(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read("GPU-a", links=12, links_up=12)
    await one.monitor.save()
    for boot, found in (("boot", [("nvlink.down", "GPU-a", "active")]), ("next boot", [])):
        again = Watched(tmp_path, boot=boot)
        again.read("GPU-a", links=12, links_up=11)
        again.later(6)
        assert again.found == found


HOST = {
    "memory_available": 0.5, "full_disks": [], "port_flaps": [], "fabric_manager": None, "nvswitches": False,
    "imex": None, "kernel_log": "",
    "memory_pressure": None, "io_pressure": None, "files_used": None, "processes_used": None,
    "clock_synchronised": None,
}  # fmt: skip


async def test_the_kernels_log_is_followed_from_where_it_was_reported_to(tmp_path: Path) -> None:
    def after(monitor: Monitor) -> object:
        return json.loads(monitor._host_command()[-1])["after"]

    one = Watched(tmp_path, gpus=False)
    assert after(one.monitor) is None, "nobody knows what became of what is older"
    await one.monitor.save()
    one.monitor.take_host({"host": HOST | {"ports_down": [], "ports": []}, "record": 7})
    await one.monitor.save()
    assert after(Watched(tmp_path, gpus=False).monitor) == 7
    one.monitor.take_host({"events": [], "record": 9})
    one.kernel(79, BUS["GPU-a"])
    assert after(one.monitor) == 9, "a probe that is started anew goes on there"
    await one.monitor.save()
    assert after(Watched(tmp_path, gpus=False).monitor) == 9
    assert after(after_a_boot(tmp_path, gpus=False).monitor) == -1, "all of it is new"


async def test_a_port_that_was_up_once_is_expected_until_a_person_says_otherwise(tmp_path: Path) -> None:
    one = Watched(tmp_path, gpus=False)
    one.monitor.take_host({"host": HOST | {"ports_down": [], "ports": ["mlx5_0/1"]}})
    await one.monitor.save()
    next_one = after_a_boot(tmp_path, gpus=False)
    assert json.loads(next_one.monitor._host_command()[-1])["ports"] == ["mlx5_0/1"]
    down = {"host": HOST | {"ports_down": [["mlx5_0/1", 31.0]], "ports": []}}
    next_one.monitor.take_host(down)
    next_one.monitor.judge()
    assert next_one.found == [("port.down", "", "active")]
    next_one.monitor.acknowledge("", "port.down")
    next_one.monitor.take_host(down)
    next_one.monitor.judge()
    assert next_one.found == [("port.down", "", "probation")]
    assert not next_one.monitor.ports


async def test_a_probe_that_ended_with_its_agent_says_nothing_to_the_next_start(tmp_path: Path) -> None:
    """Or the GPUs would be unknown until the driver has answered the new one."""
    one = Watched(tmp_path)
    one.read(*UUIDS)
    one.kernel(79, BUS["GPU-a"])
    one.monitor.probe("nvml").reading = ProbeReading("nvml", problem="its process ended")
    one.monitor.judge()
    assert ("probe.nvml.broken", "", "active") in one.found
    await one.monitor.save()
    assert Watched(tmp_path).found == [("xid.79", "GPU-a", "active")]


def test_an_event_from_before_the_drivers_first_answer_waits_for_it(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.kernel(79, BUS["GPU-a"])
    assert one.found == []
    one.read(*UUIDS)
    assert one.found == [("xid.79", "GPU-a", "active")]


def test_it_does_not_wait_where_nobody_asks_the_driver(tmp_path: Path) -> None:
    one = Watched(tmp_path, gpus=False)
    one.kernel(79, BUS["GPU-a"])
    assert one.found == [("xid.79", BUS["GPU-a"], "active")]


def test_gpus_of_other_nodes_of_the_machine_are_not_its_business(tmp_path: Path) -> None:
    one = Watched(tmp_path, configured=("GPU-b",))
    one.read(*UUIDS, error="GPU_IS_LOST")
    one.kernel(79, BUS["GPU-a"])
    assert one.found == []
    assert [g.uuid for g in one.monitor.last_gpus] == ["GPU-b"]
    one.kernel(79, BUS["GPU-b"])
    assert one.found == [("xid.79", "GPU-b", "active")]
    assert dict(one.monitor.xids) == {("GPU-b", 79): 1}


def test_one_replay_on_a_pcie_link_is_no_fault_and_many_within_a_minute_are(tmp_path: Path) -> None:
    one, link = Watched(tmp_path), {"pcie_generation": 5, "pcie_width": 16}
    for second in range(0, 62, 2):
        one.read("GPU-a", **link, pcie_replays=int(second > 30))
        one.clock.time += 2
    assert one.found == []
    for second in range(0, 64, 2):
        one.read("GPU-a", **link, pcie_replays=1 + second)
        one.clock.time += 2
    assert one.found == [("pcie.replays", "GPU-a", "active")]


def test_a_driver_that_answers_late_is_reported_for_gpus_that_the_config_names_too(tmp_path: Path) -> None:
    """At the start they were taken for missing."""
    one = Watched(tmp_path, configured=UUIDS)
    assert one.changes == 0
    one.read(*UUIDS)
    assert one.changes == 1
    one.read(*UUIDS)
    assert one.changes == 1


def test_repetitions_are_not_reported_again(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS)
    one.kernel(79, BUS["GPU-a"])
    before = one.changes
    for _ in range(5):
        one.kernel(79, BUS["GPU-a"])
    assert (one.changes, one.monitor.verdicts[0].count) == (before, 6)


def test_an_operators_word_begins_probation_and_then_it_is_forgotten(tmp_path: Path) -> None:
    one = Watched(tmp_path, probation=60.0)
    one.read(*UUIDS)
    one.kernel(79, BUS["GPU-a"])
    one.monitor.acknowledge("GPU-a", None)
    assert one.found == [("xid.79", "GPU-a", "probation")]
    one.later(59)
    assert one.found != []
    before = one.changes
    one.later(1)
    assert (one.found, one.changes) == ([], before + 1)


def test_what_was_repaired_is_read_for_a_while_before_its_probation(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS, recovery="reset")
    assert one.found == [("nvml.recovery.reset", "GPU-a", "active")]
    one.read(*UUIDS, recovery="none")
    assert one.found == [("nvml.recovery.reset", "GPU-a", "repaired")]
    one.later(VERIFY - 1)
    assert one.found == [("nvml.recovery.reset", "GPU-a", "repaired")]
    one.later(1)
    assert one.found == [("nvml.recovery.reset", "GPU-a", "probation")]


def test_with_a_verify_run_it_waits_for_that_and_a_fault_meanwhile_begins_anew(tmp_path: Path) -> None:
    one = Watched(tmp_path, checked=True)
    one.read(*UUIDS)
    one.kernel(95, BUS["GPU-a"])
    one.monitor.repaired(["GPU-a"], "reset_gpu")
    one.read(*UUIDS)
    one.later(VERIFY - 1)
    assert one.monitor.waiting == frozenset()
    one.later(1)
    assert one.monitor.waiting == {"GPU-a"}
    assert one.found == [("xid.95", "GPU-a", "repaired")]
    one.monitor.passed(["GPU-a"])
    assert one.found == [("xid.95", "GPU-a", "probation")]
    one.monitor.escalate([("xid.95", "GPU-a")], "no")
    one.later(1)
    assert (one.found, one.monitor.waiting) == ([("xid.95", "GPU-a", "active")], frozenset())


def unknown(one: Watched) -> bool:
    return one.monitor.gpus is None and one.monitor.processes is None


async def test_while_the_driver_is_left_alone_nothing_is_known_of_its_gpus(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.read(*UUIDS, processes=[(7, 1)])
    assert one.monitor.processes == {"GPU-a": [7]}
    await one.monitor.pause()
    assert unknown(one)
    one.read(*UUIDS)  # a line that was on its way
    assert unknown(one)
    one.monitor.resume()
    assert unknown(one)
    one.read(*UUIDS, processes=[])
    assert one.monitor.processes == {"GPU-a": []}
    assert len(one.monitor.last_gpus) == 2


EMPTY = {"version": VERSION, "boot": "boot", "gpus": [], "at": 0.0, "verdicts": [], "past": [], "repairs": []}
"""A file that can be read."""


async def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    one = Watched(tmp_path, gpus=False)
    one.kernel(79, BUS["GPU-a"])
    await one.monitor.save()
    again = Watched(tmp_path, gpus=False)
    assert again.found == [("xid.79", BUS["GPU-a"], "active")]
    assert [v.rule for v in again.monitor.published] == ["xid.79"]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"devices": []}', json.dumps(EMPTY | {"devices": []}), "[" * 5000, None],
    ids=lambda t: str(t)[:20],
)
async def test_a_file_that_cannot_be_read_does_not_keep_the_agent_from_starting(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "health.json"
    if text is None:
        file.mkdir()
    else:
        file.write_text(text)
    with capture_logs() as logs:
        assert Watched(tmp_path).found == []
    [log] = logs
    assert log["event"].startswith("what was known of this node's health is lost: devices")
    if text is None:
        assert (log["file"], log["damaged_copy"]) == (str(file), "nowhere (Operation not permitted)")
    else:
        assert (log["file"], log["damaged_copy"]) == (str(file), f"{file}.damaged")
        save_memory(file, SavedHealth())
        assert file.with_name("health.json.damaged").read_text() == text


async def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    one = Watched(folder, gpus=False)
    one.kernel(79, BUS["GPU-a"])
    with capture_logs() as logs:
        await one.monitor.save()
        await one.monitor.save()
        folder.mkdir()
        await one.monitor.save()
        assert [v.rule for v in load_memory(folder / "health.json").memory.verdicts] == ["xid.79"]
        shutil.rmtree(folder)
        one.kernel(48, BUS["GPU-a"])
        await one.monitor.save()
    assert [log["why"] for log in logs if log["event"] == "verdicts cannot be saved"] == [os.strerror(ENOENT)] * 2


class HungDisk(Monitor):
    """Its memory cannot be written until the test lets it."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        machine = Machine(boot="boot", gpus=False)
        super().__init__(machine, folder, {}, Clock(), policy=JudgePolicy(), changed=changed, own=OwnWork())
        self._probes = ()
        self.disk, self.begun, self.written = asyncio.Event(), 0, asyncio.Event()

    async def save(self) -> None:
        self.begun += 1
        await self.disk.wait()
        await super().save()
        if len(self.verdicts) == 2:
            self.written.set()


async def test_a_disk_that_hangs_does_not_keep_the_monitor_from_judging(tmp_path: Path) -> None:
    """The agent was blind for as long: a GPU that fell off the bus kept its work."""
    changed = asyncio.Event()
    monitor = HungDisk(tmp_path, changed.set)
    running = asyncio.create_task(monitor.run())
    try:
        async with asyncio.timeout(60):
            for n, bus in enumerate(BUS.values(), 1):
                changed.clear()
                monitor.inject(DeviceEvent("xid", monitor._clock.wall(), bus, 79, "Xid 79"))
                await changed.wait()
                assert len(monitor.published) == n
            assert monitor.begun == 1, "one at a time"
            monitor.disk.set()
            await monitor.written.wait()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert len(load_memory(tmp_path / "health.json").memory.verdicts) == 2, "the newest is what counts"


async def test_an_error_of_what_a_change_calls_ends_the_monitor_and_is_not_the_probes(tmp_path: Path) -> None:
    def changed() -> None:
        raise KeyError("of the agent")

    machine = Machine(boot="boot", gpus=False)
    monitor = Monitor(machine, tmp_path, {}, Clock(), policy=JudgePolicy(), changed=changed, own=OwnWork())
    probe = monitor.probe("nvml")
    monitor._probes = (probe,)
    probe._command = lambda: ("/bin/echo", json.dumps({"gpus": [{"uuid": "GPU-a", "index": 0}]}))
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await monitor.run()
    assert [str(error) for error in caught.value.exceptions] == ["'of the agent'"]
    assert probe.reading.problem == ""


MALFORMED: list[dict[str, Any]] = [
    {"gpus": [{"uuid": "GPU-b", "index": 1}, {"index": 0}]},
    {"gpus": [{"uuid": "GPU-b", "index": 1}, {"uuid": ["GPU-a"], "index": 0}]},
    {"gpus": [{"uuid": "GPU-b", "index": 1, "links_up": "many"}]},
    {"gpus": [{"uuid": "GPU-b", "index": 1, "pci": {}}]},
    {"gpus": [{"uuid": "GPU-b", "index": 1}], "events": [["GPU-b", 79]]},
    {"gpus": [{"uuid": "GPU-b", "index": 1}], "events": [[["GPU-b"], 79, 1.0, 1, ""]]},
    {"gpus": None},
]


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: str(line)[:60])
def test_a_line_of_the_driver_that_cannot_be_is_refused_whole(tmp_path: Path, line: dict[str, Any]) -> None:
    one = Watched(tmp_path)
    one.read("GPU-a")
    with pytest.raises(NotUnderstoodError):
        one.monitor.take_gpus(line)
    one.monitor.judge()
    assert [gpu.uuid for gpu in one.monitor.last_gpus] == list(one.monitor.expected) == ["GPU-a"]
    assert one.found == []


@pytest.mark.parametrize("wrong", [{"record": 8, "events": [{"kind": "oom"}]}, {"host": {"ports": ["b/1"]}}])
def test_a_line_of_the_machine_that_cannot_be_is_refused_whole(tmp_path: Path, wrong: dict[str, Any]) -> None:
    one = Watched(tmp_path, gpus=False)
    one.monitor.take_host({"host": HOST | {"ports_down": [], "ports": ["a/1"]}, "record": 7})
    with pytest.raises(NotUnderstoodError):
        one.monitor.take_host({"host": HOST | {"ports_down": [], "ports": ["b/1"]}} | wrong)
    assert (one.monitor.ports, one.monitor._record) == (("a/1",), 7)


ACME = Plugin("acme", "acme:Acme")
NPUS = [{"uuid": f"acme-{n}", "index": n, "visible": str(n)} for n in range(2)]
IN_USE = [npu | {"processes": [[4711, 1]]} for npu in NPUS]


def with_npus(folder: Path, boot: str = "boot", gpus: bool = False) -> tuple[Watched, Any]:
    """A machine with a plug-in, and the agent's side of it."""
    one = Watched(folder, boot=boot, gpus=gpus, plugins=(ACME,))
    (vendor,) = one.monitor._vendors
    return one, vendor


def npus(one: Watched, vendor: Any, *found: dict[str, Any]) -> None:
    declared = {"name": "acme", "variable": "ACME_VISIBLE_DEVICES", "rules": []}
    vendor.receive({"accelerator": declared, "gpus": list(found)})
    one.monitor.judge()


async def test_a_plug_ins_devices_outlive_a_restart_in_this_boot_alone(tmp_path: Path) -> None:
    one, vendor = with_npus(tmp_path)
    npus(one, vendor, *NPUS)
    await one.monitor.save()
    again, _ = with_npus(tmp_path)
    assert [(gpu.uuid, gpu.variable, gpu.visible) for gpu in again.monitor.last_gpus] == [
        ("acme-0", "ACME_VISIBLE_DEVICES", "0"), ("acme-1", "ACME_VISIBLE_DEVICES", "1"),
    ]  # fmt: skip
    assert again.monitor.devices == (), "not read since the start"
    after, vendor = with_npus(tmp_path, boot="next")
    assert after.monitor.last_gpus == ()
    assert [(gpu.uuid, gpu.variable) for gpu in after.monitor.unlisted] == [
        ("acme-0", "ACME_VISIBLE_DEVICES"), ("acme-1", "ACME_VISIBLE_DEVICES"),
    ]  # fmt: skip
    npus(after, vendor, NPUS[0])
    assert [gpu.uuid for gpu in after.monitor.unlisted] == ["acme-1"]
    after.later(10)
    assert after.found == [("accelerator.missing", "acme-1", "active")]
    assert after.monitor.expected == {"acme-0", "acme-1"}


async def test_a_plug_in_whose_driver_did_not_come_up_is_asked_where_it_had_devices(tmp_path: Path) -> None:
    """All that was known of them was forgotten with that boot, and the node was one without accelerators."""
    (sign := tmp_path / "acme_driver").touch()

    def boot(name: str) -> Watched:
        return Watched(tmp_path, boot=name, gpus=False, plugins=(replace(ACME, signs=(sign,)),))

    first = boot("first")
    npus(first, first.monitor._vendors[0], *NPUS)
    await first.monitor.save()
    sign.unlink()
    second = boot("second")
    assert [gpu.uuid for gpu in second.monitor.unlisted] == ["acme-0", "acme-1"]
    second.monitor._vendors[0].probe.reading = ProbeReading("acme", problem="there is no driver")
    second.later(1)
    assert ("accelerator.silent", "acme-1", "active") in second.found
    for device in ("acme-0", "acme-1"):
        second.monitor.acknowledge(device, None)
    assert second.monitor.unlisted == ()
    second.later(1)
    assert not {device for _, device, _ in second.found}.intersection({"acme-0", "acme-1"})
    await second.monitor.save()
    assert boot("third").monitor._vendors == []


def test_a_device_that_is_missing_is_given_up_on_an_operators_word(tmp_path: Path) -> None:
    one, vendor = with_npus(tmp_path)
    npus(one, vendor, *NPUS)
    npus(one, vendor, NPUS[0])
    one.later(10)
    assert one.found == [("accelerator.missing", "acme-1", "active")]
    one.monitor.acknowledge("acme-1", None)
    one.later(10)
    assert one.found == []


def test_a_silent_plug_in_leaves_the_drivers_gpus_alone(tmp_path: Path) -> None:
    one, vendor = with_npus(tmp_path, gpus=True)
    one.read(*UUIDS, processes=[(7, 1)])
    npus(one, vendor, *IN_USE)
    assert one.monitor.processes == {"GPU-a": [7], "acme-0": [4711], "acme-1": [4711]}
    vendor.probe.reading = ProbeReading("acme", missed=2)
    one.later(1)
    assert one.found == [
        ("accelerator.problem", "", "active"), ("accelerator.silent", "acme-0", "active"),
        ("accelerator.silent", "acme-1", "active"),
    ]  # fmt: skip
    assert [v.severity for v in one.monitor.verdicts] == ["info", "unknown", "unknown"]
    assert [gpu.uuid for gpu in one.monitor.devices] == list(UUIDS)
    assert one.monitor.processes == {"GPU-a": [7]}


def test_without_nvidias_driver_the_processes_on_a_plug_ins_devices_are_known(tmp_path: Path) -> None:
    one, vendor = with_npus(tmp_path)
    npus(one, vendor, *IN_USE)
    assert one.monitor.processes == {"acme-0": [4711], "acme-1": [4711]}


class Looked(OwnWork):
    """Counts how often this node's processes were looked for."""

    times = 0

    def among(self, pids: Collection[int]) -> frozenset[int]:
        self.times += 1
        return frozenset(pids) & {7}


def test_this_nodes_processes_are_looked_for_once_a_reading_that_lists_any(tmp_path: Path) -> None:
    """A storm of events held the agent's loop for as long as each look takes."""
    own = Looked()
    one = Watched(tmp_path, own=own)
    one.read(*UUIDS, processes=[])
    one.later(5)
    assert own.times == 0, "nobody's processes are there to be told apart"
    one.read(*UUIDS, processes=[(7, 1)])
    for _ in range(100):
        one.kernel(79, BUS["GPU-b"])
    assert (own.times, one.monitor.strangers) == (1, frozenset())
    one.read(*UUIDS, processes=[(7, 1), (8, 1)])
    one.later(1)
    assert (own.times, one.monitor.strangers) == (2, frozenset({8}))


def test_this_nodes_processes_on_a_plug_ins_devices_are_looked_for_too(tmp_path: Path) -> None:
    own = Looked()
    one = Watched(tmp_path, gpus=False, plugins=(ACME,), own=own)
    (vendor,) = one.monitor._vendors
    for times in (1, 2):
        npus(one, vendor, *IN_USE)
        one.later(1)
        assert (own.times, one.monitor.strangers) == (times, frozenset({4711}))
