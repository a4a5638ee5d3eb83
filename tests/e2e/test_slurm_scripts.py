"""The prolog and epilog of examples/slurm, run as slurmd runs them, against a real cluster whose job is elastic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import ROOT, TOOL, Cluster, is_alive

pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs them as root"),
]  # fmt: skip
NODES = 2
SCRIPTS = ROOT / "examples" / "slurm"


def as_slurmd(cluster: Cluster, script: str, job: int, **more: str) -> subprocess.CompletedProcess[str]:
    tool = cluster.work / "nodeagentctl"
    if not tool.exists():
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{TOOL}" "$@"\n')
        tool.chmod(0o755)
    env = {
        "NODEAGENTCTL": str(tool), "SLURMD_NODENAME": "n2", "SLURM_JOB_ID": str(job),
        "MARKS": str(cluster.work / "marks"),
    }  # fmt: skip
    return subprocess.run(
        [str(SCRIPTS / script)], env=cluster.environ | env | more, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip


def marks(cluster: Cluster) -> list[str]:
    return sorted(path.name for path in Path(cluster.work / "marks").glob("job-*"))


def on_n2(cluster: Cluster) -> list[int]:
    """The processes of the job's workers there; of a drained node the cluster lists none, alive or not."""
    cluster.until_workers("elastic", 2)
    theirs = list(cluster.workers("elastic", "n2").values())
    assert theirs
    return theirs


def test_a_node_is_lent_to_slurm_and_comes_back_with_the_last_job(calm: Cluster) -> None:
    spec = {"name": "elastic", "command": ["sleep", "600"], "nodes": "1:2", "workers_per_node": 1, "grace": "1s"}
    calm.submit(json.dumps(spec))
    calm.until_running("elastic", 2)

    theirs = on_n2(calm)
    done = as_slurmd(calm, "prolog.sh", 41)
    assert done.returncode == 0, done.stderr
    assert not any(map(is_alive, theirs)), "it returns when nothing of nodeagent's runs there"
    assert (calm.node("n2")["state"], calm.node("n2")["reason"]) == ("drained", "slurm job 41 (by root)")
    assert as_slurmd(calm, "prolog.sh", 42).returncode == 0
    assert marks(calm) == ["job-41", "job-42"]

    assert as_slurmd(calm, "epilog.sh", 41).returncode == 0
    assert calm.nodes()["n2"] == "drained", "the other Slurm job has it"
    assert as_slurmd(calm, "epilog.sh", 42).returncode == 0
    calm.until(lambda: calm.nodes()["n2"] == "ready", 30, "it is given back")
    calm.until_running("elastic", 2)

    theirs = on_n2(calm)
    calm.ctl("cordon", "n2", "--reason", "new fans")
    assert as_slurmd(calm, "prolog.sh", 43).returncode == 0
    assert not any(map(is_alive, theirs))
    assert as_slurmd(calm, "epilog.sh", 43).returncode == 0
    assert (calm.node("n2")["state"], calm.node("n2")["reason"]) == ("drained", "new fans (by root)"), (
        "a person's stays"
    )

    nobody = {"NODEAGENT_LOCAL": str(calm.work / "no-cluster")}
    assert as_slurmd(calm, "prolog.sh", 44, **nobody).returncode != 0, "Slurm keeps its job away"
    assert as_slurmd(calm, "epilog.sh", 44, **nobody).returncode == 0, "and does not drain the node after one"
