"""A node whose checkpoint_dir is not the folder of the others: passed over with the reason, and taken once it is.

All nodes of a local cluster see one file system, so one more agent runs in a mount namespace of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.apart import agent_apart, why_not
from tests.e2e.support import Cluster

NODES = 2
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.redis,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@pytest.fixture
def apart(calm: Cluster) -> Iterator[subprocess.Popen[str]]:
    """The agent of n3, which has another folder at WORK/ckpt."""
    for name in ("ckpt", "other"):
        (calm.work / name).mkdir()
    with agent_apart(calm, "n3", "mount --bind other ckpt") as process:
        yield process


def test_a_node_with_another_folder_is_passed_over_until_it_has_the_right_one(
    calm: Cluster, apart: subprocess.Popen[str]
) -> None:
    ckpt = calm.work / "ckpt"
    calm.until(lambda: calm.nodes().get("n3") == "ready", 30, "n3 is there")
    spec = {
        "name": "apart", "command": [sys.executable, "-c", "import time; time.sleep(600)"], "nodes": "2:3",
        "workers_per_node": 1, "fork_server": "off", "grace": "1s", "checkpoint_dir": str(ckpt),
    }  # fmt: skip
    calm.submit(json.dumps(spec))
    job = calm.until_running("apart", 2)
    assert {p["node"] for p in job["pods"]} == {"n1", "n2"}
    text = f"n3 cannot run it: checkpoint_dir {ckpt} there is not the folder that n1 sees; it must be one shared folder"
    calm.until(lambda: text in " ".join(calm.job("apart")["why"]), 20, f"it says {text!r}")
    assert text in " ".join(calm.ctl("describe", "apart").stdout.split())
    workers = calm.workers("apart")
    assert len({(calm.work / f / ".nodeagent-folder").read_text() for f in ("ckpt", "other")}) == 2

    subprocess.run(["nsenter", "--mount", "--target", str(apart.pid), "umount", str(ckpt)], check=True)
    assert calm.workers("apart") == workers
    job = calm.until_running("apart", 3, above=job["generation"])
    assert (job["cause"]["kind"], job["budget"]["used"]) == ("join", 0)
    calm.ctl("stop", "apart", "--timeout", "60s")
