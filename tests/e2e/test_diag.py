"""Checks by work on real nodes of a local cluster, asked for with the tool. The CPU's, or
those of GPUs that are not real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.bare import STEPPER
from tests.e2e.support import ROOT, Cluster, home
from tests.fakenvml.build import build, write_state

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.torch, pytest.mark.timeout(240)]

HAND = ROOT / "tests" / "unit" / "diag" / "hand.py"
CHECKS = ["matmul", "memory_bandwidth", "collective"]


def test_any_node_is_checked_and_its_peers_hear_of_it_unless_a_job_uses_it() -> None:
    with home() as (folder, environ):
        cluster = Cluster(folder, folder / "work", environ)
        try:
            cluster.up(2)
            done = cluster.ctl("diag", "n2", "-o", "json")
            found = json.loads(done.stdout)
            assert (found["node"], found["passed"], [c["name"] for c in found["checks"]]) == ("n2", True, CHECKS)
            assert "n2: matmul" in done.stderr, "progress is shown"
            cluster.until(lambda: [f["check"] for f in cluster.node("n2")["figures"]] == CHECKS, 20.0, "others hear")
            assert cluster.node("n1")["figures"] == []
            command = json.dumps([sys.executable, str(STEPPER), str(cluster.work / "busy.steps")])
            cluster.submit(f"name: busy\ncommand: {command}\nnodes: 2\nworkers_per_node: 1\n")
            cluster.until_running("busy", 2)
            refused = cluster.ctl("diag", "n1", check=6)
            assert "is in use by a job" in refused.stderr
            assert "--busy" in refused.stderr
        finally:
            cluster.ctl("local", "down", check=None)


def test_a_node_that_fails_its_preflight_takes_part_once_it_passes(tmp_path: Path) -> None:
    """Two GPUs a node, told by a driver that is not real, and worked on by hands that do as the test says."""
    with home() as (folder, environ):
        plan, driver = folder / "hand", folder / "driver"
        write_state(driver, "gpus 4")
        sick = "GPU-fa4e0000-0000-0000-0000-000000000003"
        plan.write_text(json.dumps({sick: {"matmul": "checksum 3, not 4"}}))
        environ |= {
            "LD_LIBRARY_PATH": str(build(tmp_path)), "FAKE_NVML": str(driver), "HAND": str(plan),
            "NODEAGENT__HEALTH__DIAG__PYTHON": str(HAND), "NODEAGENT__HEALTH__PREFLIGHT__REUSE": "1h",
        }  # fmt: skip
        cluster = Cluster(folder, folder / "work", environ)
        try:
            cluster.up(2)
            command = json.dumps([sys.executable, str(STEPPER), str(cluster.work / "picky.steps")])
            cluster.submit(
                f"name: picky\ncommand: {command}\nnodes: {{min: 1, max: 2, target: 2}}\nworkers_per_node: gpu\n"
            )
            cluster.until_running("picky", 1)
            cluster.until(lambda: "preflight failed" in cluster.ctl("describe", "node/n2").stdout, 30.0, "n2 says why")
            assert f"preflight failed: matmul {sick}: checksum 3, not 4" in cluster.ctl("describe", "node/n2").stdout
            plan.write_text("{}")
            found = json.loads(cluster.ctl("diag", "n2", "-o", "json").stdout)
            assert (found["passed"], len(found["checks"])) == (True, 9)
            cluster.until_running("picky", 2)
            assert cluster.job("picky")["budget"]["used"] == 0
        finally:
            cluster.ctl("local", "down", check=None)
