"""What is read from ``amd-smi --json``. The answers are made after AMD's documents and public reports (see amd.py)."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.hardware.accelerator import AbsentError, ProblemError
from nodeagent.hardware.plugins import DEADLINE, PACE, Plugin, Vendor
from nodeagent.hardware.probes.amd import BOUND, Amd, read
from nodeagent.hardware.probes.reader import judged

LIST = [
    {"gpu": 0, "bdf": "0000:0C:00.0", "uuid": "09ff74a1-0000-1000-80e9-ba9de5bcb4c8", "kfd_id": 1, "node_id": 2},
    {"gpu": 1, "bdf": "0000:22:00.0", "uuid": "f6ff74a1-0000-1000-80a9-0a70f8a7b8aa", "kfd_id": 2, "node_id": 3},
]
METRIC: list[dict[str, Any]] = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 0, "unit": "%"}, "mm_activity": "N/A"},
        "power": {"socket_power": {"value": 133, "unit": "W"}, "throttle_status": "UNTHROTTLED"},
        "temperature": {"edge": "N/A", "hotspot": {"value": 41, "unit": "C"}, "mem": {"value": 33, "unit": "C"}},
        "pcie": {"width": 16, "speed": {"value": 32, "unit": "GT/s"}, "replay_count": 0},
        "ecc": {"total_correctable_count": 5, "total_uncorrectable_count": 0, "total_deferred_count": 0},
    },
    {
        "gpu": 1,
        "power": {"socket_power": "131 W"},
        "temperature": {"hotspot": 37},
        "pcie": "N/A",
        "ecc": {"total_correctable_count": "N/A", "total_uncorrectable_count": 2, "total_deferred_count": 1},
    },
]
PROCESS = [
    {
        "gpu": 0,
        "process_list": [{"process_info": {"name": "python3", "pid": 4194300, "mem": {"value": 64, "unit": "B"}}}],
    },
    {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
]


@pytest.mark.parametrize("wrapped", [False, True])
def test_two_gpus(wrapped: bool) -> None:
    answers = [{"gpu_data": answer} if wrapped else answer for answer in (LIST, METRIC, PROCESS)]
    first, second = read(*answers)
    assert (first["uuid"], first["pci"], first["visible"]) == (
        "amd-09ff74a1-0000-1000-80e9-ba9de5bcb4c8", "0000:0c:00", "0",
    )  # fmt: skip
    assert (first["temperature"], first["pcie_width"], first["pcie_replays"]) == (41, 16, 0)
    assert first["ecc_uncorrected"] == 0
    assert first["processes"] == [[4194300, 64]]
    assert (second["temperature"], second["ecc_uncorrected"]) == (37, 2)
    assert "pcie_width" not in second, "N/A is not zero"
    assert second["processes"] == []
    looks = [judged(Amd(), gpu)["looks"] for gpu in (first, second)]
    assert looks == [[["amd.ecc_deferred", False, ""]], [["amd.ecc_deferred", True, "1 deferred errors"]]]


def test_one_of_which_nothing_is_measured_cannot_be_read_and_unknown_processes_are_none() -> None:
    _, second = read(LIST, METRIC[:1], None)
    assert second["error"]
    assert "processes" not in second


@pytest.mark.parametrize("answer", [None, {}, {"gpu_data": 7}, [7], [{"gpu": "0"}], "none"])
def test_an_answer_that_is_not_understood_is_a_problem(answer: object) -> None:
    with pytest.raises(ProblemError):
        read(answer, METRIC, None)


def test_the_agent_takes_what_it_writes() -> None:
    plugin = Amd()
    one = Vendor(Plugin("amd", "x:y"), {}, "python", lambda: None)
    one.receive({
        "accelerator": {"name": plugin.name, "variable": plugin.variable, "rules": [r.row for r in plugin.rules]},
        "gpus": [judged(plugin, gpu) for gpu in read(LIST, METRIC, PROCESS)],
    })  # fmt: skip
    assert [(gpu.variable, gpu.visible) for gpu in one.last] == [
        ("HIP_VISIBLE_DEVICES", "0"),
        ("HIP_VISIBLE_DEVICES", "1"),
    ]
    assert 3 * BOUND < PACE + DEADLINE


def test_without_the_tool_there_is_nothing_to_read() -> None:
    with pytest.raises(AbsentError):
        Amd("no-such-tool-of-amd").open()
