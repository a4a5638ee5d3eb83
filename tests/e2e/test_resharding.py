"""A hybrid layout of FSDP2 changes with the number of processes, from 2x2 to 2x1 and back: not one bit of the weights
or of the optimizer's moments changes with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ROOT, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

NODES = 2
STEPS = 100
SECONDS = 60.0
"""Until a start, with torch, has come to its first checkpoint."""
SCRIPT = Path(__file__).with_name("resharding.py")
PRELOAD = "[torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.fsdp]"


def test_two_by_two_to_two_by_one_and_back_with_equal_weights(calm: Cluster) -> None:
    notes = calm.work / "notes"

    def rows() -> list[dict[str, Any]]:
        whole = notes.read_text().rpartition("\n")[0] if notes.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def until_saved(world: int, above: int = -1) -> int:
        """So many processes have saved twice since the newest load, which comes after the first ``above`` ones; its
        number."""

        def loads() -> list[int]:
            return [i for i, row in enumerate(rows()) if row["what"] == "loaded"]

        def so() -> bool:
            seen, starts = rows(), loads()
            since = seen[starts[-1] + 1 :] if starts else seen
            return len(starts) > above and sum(row["world"] == world for row in since) >= 2

        calm.until(so, SECONDS, f"{world} processes have saved twice after more than {above} loads")
        return len(loads())

    example = str(ROOT / "examples" / "fsdp2" / "train.py")
    command = [sys.executable, str(SCRIPT), str(notes), example, "--steps", str(STEPS), "--step-delay", "0.2"]
    calm.submit(
        f"name: layouts\ncommand: {json.dumps(command)}\nnodes: {{min: 1, max: 2, target: 2}}\nworkers_per_node: 2\n"
        f"gpus_per_worker: 0\ncheckpoint_dir: {calm.work / 'ckpt'}\ngrace: 5s\npreload: {PRELOAD}\n"
    )
    whole = until_saved(4)  # 1 where a node was ready later than the other: then it began with two processes
    calm.ctl("scale", "layouts", "1")
    shrunk = until_saved(2, above=whole)
    calm.ctl("scale", "layouts", "2")
    until_saved(4, above=shrunk)
    job = calm.until_phase("layouts", "succeeded", 120)
    assert job["budget"]["used"] == 0
    saves = {row["checkpoint"]: row for row in rows() if row["what"] == "saved"}
    loads = [row for row in rows() if row["what"] == "loaded"]
    assert [(saves[row["checkpoint"]]["world"], row["world"]) for row in loads[whole:]] == [(4, 2), (2, 4)]
    for row in loads:
        assert row["digest"] == saves[row["checkpoint"]]["digest"], row
    assert len({row["digest"] for row in saves.values()}) == len(saves), "a digest tells weights apart"
