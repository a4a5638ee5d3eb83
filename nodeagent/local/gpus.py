"""Sharing this machine's GPUs out among the nodes of a local cluster. Owns the list and the shares; asks NVML in a
process of its own, since a broken driver can block the asker for ever. Must never fail: no answer is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

DEADLINE = 5.0
"""Seconds for NVML to answer."""

_ASK = """
import json, pynvml
pynvml.nvmlInit()
handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
uuids = map(pynvml.nvmlDeviceGetUUID, handles)
print(json.dumps([u.decode() if isinstance(u, bytes) else u for u in uuids]))
"""


def installed() -> tuple[list[str], str]:
    """The UUIDs of this machine's GPUs, and, when NVML was there but did not answer well, why there are none."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (
            [],
            f"NVML did not answer within {DEADLINE:g} s: the local nodes have no GPUs (see `nodeagentctl doctor`)",
        )
    if answer.returncode != 0:
        problem = (answer.stderr.strip().splitlines() or [f"exit {answer.returncode}"])[-1]
        absent = "LibraryNotFound" in problem or "ModuleNotFound" in problem or "NVML Shared Library" in problem
        return [], "" if absent else f"NVML failed ({problem}): the local nodes have no GPUs"
    found: list[str] = json.loads(answer.stdout)
    return found, ""


def shares(uuids: Sequence[str], nodes: int, workers: int | None) -> list[tuple[str, ...]]:
    """Each node's GPUs, neighbours together. If every node is to run ``workers`` workers and there are not enough
    GPUs for all of them to have one, nobody gets any: the nodes of one gang should be alike."""
    if workers is not None and len(uuids) < nodes * workers:
        return [()] * nodes
    each, more = divmod(len(uuids), nodes)
    ends = [node * each + min(node, more) for node in range(nodes + 1)]
    return [tuple(uuids[low:high]) for low, high in pairwise(ends)]
