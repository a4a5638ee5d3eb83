"""What is read from ``npu-smi info``. The tables are made after documents and public reports (see ascend.py)."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.hardware.accelerator import ProblemError
from nodeagent.hardware.plugins import DEADLINE, PACE, Plugin, Vendor
from nodeagent.hardware.probes.ascend import BOUND, Ascend, parse
from nodeagent.hardware.probes.reader import judged

TRAINING = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 96.2        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3414 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Critical      | 91.0        45                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3397 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4194300       | python                   | 160                     |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""
EDGE = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                                       Version: 25.2.0                                   |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | Alarm           | 0.0          49                15    / 15            |
| 0       0                     | NA              | 0            957   / 10810                           |
+===============================+=================+======================================================+
"""


def fired(npu: dict[str, Any]) -> list[tuple[str, str]]:
    return [(rule, raw) for rule, fires, raw in judged(Ascend(), npu)["looks"] if fires]


def test_a_training_server() -> None:
    first, second = parse(TRAINING)
    assert (first["uuid"], first["name"], first["index"], first["visible"]) == (
        "ascend-0000:c1:00.0", "Ascend 910B3", 0, "0",
    )  # fmt: skip
    assert (first["pci"], first["temperature"]) == ("0000:c1:00", 46)
    assert first["processes"] == [[4194300, 160 << 20]]
    assert (second["visible"], second["processes"]) == ("1", [])
    assert fired(first) == []
    assert fired(second) == [("ascend.critical", "Health: Critical")]


def test_an_edge_module_without_a_bus() -> None:
    (npu,) = parse(EDGE)
    assert (npu["uuid"], npu["temperature"]) == ("ascend-0.0", 49)
    assert "pci" not in npu
    assert "processes" not in npu, "this version lists none: not known"
    assert fired(npu) == [("ascend.alarm", "Health: Alarm")]


@pytest.mark.parametrize(("health", "rule"), [
    ("OK", []), ("Warning", ["ascend.warning"]), ("UNKNOWN", ["ascend.unknown"]), ("Sick", ["ascend.unknown"]),
])  # fmt: skip
def test_each_word_for_health(health: str, rule: list[str]) -> None:
    (npu,) = parse(EDGE.replace("Alarm", health))
    assert [name for name, _ in fired(npu)] == rule


@pytest.mark.parametrize("text", [
    "", "dcmi model initialized failed, because the device is used.", TRAINING[:500],
    EDGE.replace("310B1", ""), TRAINING.replace("Critical", ""), TRAINING.replace("C2:00", "C1:00"),
    TRAINING.replace("| 0                         | 0000:C2", "| -                         | 0000:C2"),
])  # fmt: skip
def test_a_text_that_is_not_understood_is_a_problem_and_never_a_machine_without_npus(text: str) -> None:
    with pytest.raises(ProblemError):
        parse(text)


def test_the_agent_takes_what_it_writes_and_waits_longer_than_the_tool_may_take() -> None:
    plugin = Ascend()
    one = Vendor(Plugin("ascend", "x:y"), {}, "python", lambda: None)
    one.receive({
        "accelerator": {"name": plugin.name, "variable": plugin.variable, "rules": [r.row for r in plugin.rules]},
        "gpus": [judged(plugin, npu) for npu in parse(TRAINING)],
    })  # fmt: skip
    assert [(gpu.uuid, gpu.variable, gpu.visible) for gpu in one.last] == [
        ("ascend-0000:c1:00.0", "ASCEND_RT_VISIBLE_DEVICES", "0"),
        ("ascend-0000:c2:00.0", "ASCEND_RT_VISIBLE_DEVICES", "1"),
    ]
    assert BOUND < PACE + DEADLINE
