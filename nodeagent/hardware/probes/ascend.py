"""Huawei's Ascend NPUs, read from the text of ``npu-smi info``. Not met on real hardware: written after its documents.

The table and its columns, and the five words for a chip's health, are those of Huawei's npu-smi reference ("Querying
Basic Information", "Querying the Health Status": hiascend.com, Atlas 200I A2 25.2.0, npusmi_007 and npusmi_028), with
the rows of a training server (Ascend 910B) as public reports show them. ``ASCEND_RT_VISIBLE_DEVICES`` is CANN's, and
takes logical ids of devices in ascending order. Text is no interface: a table that is not understood is a problem,
never a machine without NPUs.
"""

from __future__ import annotations

import re

from nodeagent.hardware.accelerator import Accelerator, Command, DeviceRule, ProblemError, numa_of, who

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

BOUND = 12.0
"""Seconds for npu-smi: it takes some for each of 8 or 16 chips."""
SOURCE = "npu-smi info, column Health"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MOST_OWNERS = 8


class Ascend(Accelerator):
    """Each chip is a device; the ids of those of a machine are their places on the PCIe bus, which stay."""

    name = "ascend"
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    rules = (
        DeviceRule(
            "ascend.critical", "fatal", "reboot", "reading", "the NPU reports a critical fault", SOURCE,
            check=lambda npu: npu["_health"] == "Critical" and _shown(npu),
        ),
        DeviceRule(
            "ascend.alarm", "degraded", "reset_gpu", "reading", "the NPU reports a major fault", SOURCE,
            check=lambda npu: npu["_health"] == "Alarm" and _shown(npu),
        ),
        DeviceRule(
            "ascend.warning", "degraded", "diagnose", "reading", "the NPU reports a minor fault", SOURCE,
            check=lambda npu: npu["_health"] == "Warning" and _shown(npu),
        ),
        DeviceRule(
            "ascend.unknown", "unknown", "diagnose", "reading", "the NPU does not say how it is", SOURCE,
            check=lambda npu: npu["_health"] not in ("OK", "Critical", "Alarm", "Warning") and _shown(npu),
        ),
    )  # fmt: skip

    def __init__(self, command: str = "npu-smi") -> None:
        self._command = Command(command, "info", bound=BOUND)

    def look(self) -> list[dict[str, Any]]:
        return parse(self._command.output())


def _shown(npu: dict[str, Any]) -> str:
    return f"Health: {npu['_health']}"


def parse(text: str) -> list[dict[str, Any]]:
    """The NPUs of one ``npu-smi info``. Raises ProblemError for a text that is no such table."""
    if "Bus-Id" not in text or not text.rstrip().endswith("+"):
        raise ProblemError("npu-smi info wrote no whole table of NPUs", again=True)
    rows = list(_rows(text))
    at = next((n for n, row in enumerate(rows) if "Process id" in " ".join(row)), len(rows))
    npus = [_npu(first, second) for first, second in _chips(rows[:at])]
    if not npus:
        raise ProblemError("npu-smi info lists no NPU that could be read", again=True)
    if len({npu["uuid"] for npu in npus}) < len(npus):
        raise ProblemError("npu-smi info lists an NPU twice", again=True)
    users = _processes(rows[at + 1 :]) if at < len(rows) else None
    for place, npu in enumerate(npus):
        npu["index"] = place
        npu["visible"] = str(place)
        key = npu.pop("_place")
        if users is not None:
            mine = users.get(key, [])
            npu["processes"] = [[pid, size] for pid, size in mine]
            npu["owners"] = [[pid, who(pid)] for pid, _ in mine[:_MOST_OWNERS]]
    return npus


def _rows(text: str) -> Iterator[list[str]]:
    """The cells of each row, without the lines between."""
    for line in text.splitlines():
        if line.startswith("|") and line.rstrip().endswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def _chips(rows: list[list[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """The two rows of each chip, below the two of the head: ``npu name | health | power temperature ...`` and ``chip
    [device] | bus | ...``. Raises ProblemError for a row that is neither: a chip that is not understood is not gone."""
    body = [row for row in rows if len(row) == 3][2:]
    for n in range(0, len(body), 2):
        pair = body[n : n + 2]
        if len(pair) < 2 or not re.match(r"\d+\s+\S", pair[0][0]) or not pair[0][1] or not re.match(r"\d", pair[1][0]):
            raise ProblemError(f"npu-smi info wrote a row that is not understood: {' | '.join(body[n])}", again=True)
        yield pair[0], pair[1]


def _npu(first: list[str], second: list[str]) -> dict[str, Any]:
    number, _, name = first[0].partition(" ")
    chip = second[0].split()[0]
    bus = second[1].lower()
    known_bus = re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bus)
    npu: dict[str, Any] = {
        "uuid": f"ascend-{bus}" if known_bus else f"ascend-{number}.{chip}",
        "name": f"Ascend {name.strip()}",
        "_health": first[1],
        "_place": (number, chip),
    }
    if known_bus:
        npu["pci"] = bus.partition(".")[0]
        npu["numa"] = numa_of(npu["pci"])
    numbers = first[2].split()
    if len(numbers) > 1 and _NUMBER.fullmatch(numbers[1]):
        npu["temperature"] = int(float(numbers[1]))
    return npu


def _processes(rows: list[list[str]]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Pid and bytes of the processes of each chip: ``npu chip | pid | name | MB``."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows:
        if len(row) == 4 and row[1].isdecimal() and len(row[0].split()) == 2:
            number, chip = row[0].split()
            size = int(row[3]) << 20 if row[3].isdecimal() else 0
            found.setdefault((number, chip), []).append((int(row[1]), size))
    return found
