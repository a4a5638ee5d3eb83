"""A node whose checkpoint_dir is not the folder of the others: passed over with the reason, and taken once it is.

All nodes of a local cluster see one file system, so one more agent runs in a mount namespace of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.support import Cluster, bounded

NODES = 2


def _reason() -> str:
    """Why it cannot be done here; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "no unshare or nsenter"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    return "" if done.returncode == 0 else "no mount namespaces for this user"


WHY_NOT = _reason()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.redis,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@pytest.fixture
def apart(calm: Cluster) -> Iterator[subprocess.Popen[str]]:
    """The agent of n3, which has another folder at WORK/ckpt."""
    config = yaml.safe_load(next(calm.home.glob("local/data/*/n1/agent.yaml")).read_text())
    config["node"]["id"] = "n3"
    config["dirs"] = {name: str(calm.home / "n3" / name) for name in config["dirs"]}
    file = calm.work / "n3.yaml"
    file.write_text(yaml.safe_dump(config))
    for name in ("ckpt", "other"):
        (calm.work / name).mkdir()
    agent = [sys.executable, "-m", "nodeagent.agent.main", "run", "--config", str(file)]
    mounted = ["sh", "-c", 'mount --bind other ckpt && exec "$@"', "sh", *agent]
    with (calm.work / "n3.log").open("w") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", *mounted], env=calm.environ, cwd=calm.work, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, text=True,
        )  # fmt: skip
    with bounded(process):
        yield process
        process.send_signal(signal.SIGINT)  # orderly: it stops its workers and leaves
        process.wait(30)


def test_a_node_with_another_folder_is_passed_over_until_it_has_the_right_one(
    calm: Cluster, apart: subprocess.Popen[str]
) -> None:
    ckpt = calm.work / "ckpt"
    calm.until(lambda: calm.nodes().get("n3") == "ready", 30, "n3 is there")
    spec = {
        "name": "apart", "command": [sys.executable, "-c", "import time; time.sleep(600)"], "nodes": "2:3",
        "workers_per_node": 1, "standby": "off", "grace": "1s", "checkpoint_dir": str(ckpt),
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
