"""Checks by work on real nodes of a local cluster, asked for with the tool. The CPU's, since there is no GPU here."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.bare import STEPPER
from tests.e2e.support import Cluster, home

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.torch, pytest.mark.timeout(240)]

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
