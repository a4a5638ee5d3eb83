"""AMD's Instinct GPUs, read from the JSON of ``amd-smi``. Not met on real hardware: written after its documents.

``amd-smi list``, ``metric`` and ``process`` with ``--json`` are AMD SMI's command line tool ("AMD SMI CLI tool usage",
rocm.docs.amd.com/projects/amdsmi; names of fields after its change log and public reports). Versions differ: a list, or
an object with it as ``gpu_data``; numbers bare, or with a unit beside them; "N/A" where there is none.
``HIP_VISIBLE_DEVICES`` takes indices (ROCm, "GPU isolation techniques"); those of amd-smi and HIP are taken to be in
the same order, which ``amd-smi list -e`` shows. Used memory is left out: it includes what the driver itself holds.
"""

from __future__ import annotations

import json

from nodeagent.hardware.accelerator import AbsentError, Accelerator, Command, DeviceRule, ProblemError, numa_of, who

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BOUND = 5.0
"""Seconds for one call of amd-smi; a look makes three."""
_MOST_OWNERS = 8


class Amd(Accelerator):
    """The GPUs that amd-smi lists."""

    name = "amd"
    variable = "HIP_VISIBLE_DEVICES"
    rules = (
        DeviceRule(
            "amd.ecc_deferred", "degraded", "reset_gpu", "reading",
            "memory errors wait to be consumed since the driver was loaded", "amd-smi metric: total_deferred_count",
            check=lambda gpu: _counted(gpu.get("_deferred")),
        ),
    )  # fmt: skip

    def __init__(self, command: str = "amd-smi") -> None:
        self._command = Command(command, bound=BOUND)

    def open(self) -> None:
        if not items(_json(self._command.output("list", "--json"))):
            raise AbsentError("amd-smi lists no GPU")

    def look(self) -> list[dict[str, Any]]:
        listed = _json(self._command.output("list", "--json"))
        metrics = _json(self._command.output("metric", "--json"))
        try:
            processes = _json(self._command.output("process", "--json"))
        except ProblemError:  # it needs more rights than the others
            processes = None
        return read(listed, metrics, processes)


def _counted(deferred: int | None) -> str | bool | None:
    return None if deferred is None else deferred > 0 and f"{deferred} deferred errors"


def read(listed: object, metrics: object, processes: object) -> list[dict[str, Any]]:
    """The GPUs of three answers; ``processes`` None: not known. Raises ProblemError for answers that are none."""
    measured = {one["gpu"]: one for one in items(metrics)}
    users = None if processes is None else {one["gpu"]: one for one in items(processes)}
    found = []
    for one in items(listed):
        index = one["gpu"]
        uuid = one.get("uuid")
        gpu: dict[str, Any] = {
            "uuid": f"amd-{uuid}" if isinstance(uuid, str) and uuid != "N/A" else f"amd-{one.get('bdf', index)}",
            "index": index,
            "name": "AMD GPU",
            "visible": str(index),
        }
        if isinstance(bus := one.get("bdf"), str):
            gpu["pci"] = bus.lower().partition(".")[0]
            gpu["numa"] = numa_of(gpu["pci"])
        if index in measured:
            gpu |= _measured(measured[index])
        else:
            gpu["error"] = "amd-smi metric says nothing of it"
        if users is not None:
            mine = _users(users.get(index, {}))
            gpu["processes"] = [[pid, size] for pid, size in mine]
            gpu["owners"] = [[pid, who(pid)] for pid, _ in mine[:_MOST_OWNERS]]
        found.append(gpu)
    return found


def items(answer: object) -> list[dict[str, Any]]:
    """What an answer says of each GPU. Raises ProblemError if it says nothing of the kind."""
    if isinstance(answer, dict):
        answer = answer.get("gpu_data")
    if not isinstance(answer, list) or not all(isinstance(x, dict) and isinstance(x.get("gpu"), int) for x in answer):
        raise ProblemError("amd-smi wrote no list of GPUs", again=True)
    return answer


def _measured(metric: dict[str, Any]) -> dict[str, Any]:
    ecc, temperature = _part(metric, "ecc"), _part(metric, "temperature")
    pcie = _part(metric, "pcie")
    found = {
        "ecc_uncorrected": _whole(ecc.get("total_uncorrectable_count")),
        "_deferred": _whole(ecc.get("total_deferred_count")),
        "temperature": _whole(temperature.get("hotspot")),
        "pcie_width": _whole(pcie.get("width")),
        "pcie_replays": _whole(pcie.get("replay_count")),
    }
    return {key: value for key, value in found.items() if value is not None}


def _users(one: dict[str, Any]) -> list[tuple[int, int]]:
    """Pid and bytes of each process of one GPU; a text in their place says that there is none."""
    found = []
    for entry in one.get("process_list", []):
        info = entry.get("process_info") if isinstance(entry, dict) else None
        if isinstance(info, dict) and (pid := _whole(info.get("pid"))) is not None:
            memory = info.get("mem_usage", info.get("mem"))
            found.append((pid, _whole(memory) or 0))
    return found


def _part(metric: dict[str, Any], name: str) -> dict[str, Any]:
    part = metric.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: object) -> float | None:
    """A number, bare, as text or with its unit; None for "N/A"."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            return float(value.split()[0])
        except (ValueError, IndexError):
            return None
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _json(text: str) -> object:
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise ProblemError(f"amd-smi wrote no JSON: {error}", again=True) from error
    return found
