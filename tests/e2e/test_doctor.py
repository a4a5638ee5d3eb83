"""``top``, ``hosts`` and ``doctor`` on a real cluster: sound, at work, and with a node that has lost its power."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2
BURNS = """
held = b"x" * (100 << 20)
while True:
    pass
"""


def errors(cluster: Cluster, code: int) -> dict[str, str]:
    found = json.loads(cluster.ctl("doctor", "--peers", "-o", "json", check=code).stdout)
    return {f["where"]: f["what"] for f in found["items"] if f["severity"] == "error"}


def test_what_uses_the_cluster_where_a_job_trains_and_what_is_wrong(calm: Cluster) -> None:
    assert errors(calm, 0) == {}
    output = calm.ctl("doctor", "--peers")
    assert "1 of its 1 peers can be reached" in output.stderr

    spec = {
        "name": "burns", "command": [sys.executable, "-c", BURNS], "nodes": 2, "workers_per_node": 1,
        "fork_server": "off", "grace": "1s",
    }  # fmt: skip
    calm.submit(json.dumps(spec))
    assert calm.ctl("hosts", "burns", check=None).returncode in (0, 6), "before it trains it is refused"
    calm.until_running("burns", 2)
    assert calm.ctl("hosts").stdout == "127.0.0.1:2\n"

    def used() -> dict[str, Any]:
        job: dict[str, Any] = calm.ask("/v1/top")["jobs"][0]
        return job

    def measured() -> bool:
        """Both nodes, and not only while the shims started."""
        job = used()
        return len(job["pods"]) == 2 and all(p["cpu"] for p in job["pods"]) and job["memory"] > 200 << 20

    calm.until(measured, 30, "both nodes measured")
    job = used()
    assert job["cpu"] == pytest.approx(sum(p["cpu"] for p in job["pods"]), abs=0.02)
    rows = calm.ctl("top").stdout.splitlines()
    assert [row.split()[-1] for row in rows[1:3]] == ["burns", "burns"]
    assert rows[-1].split()[:4] == ["burns", "RUNNING", "2", "2"]

    calm.ctl("local", "kill", "n2")
    calm.until(lambda: calm.job("burns")["phase"] == "holding", 30, "it holds")
    found = errors(calm, 1)
    assert set(found) == {"node/n2", "job/burns"}
    assert "holds" in found["job/burns"]
    refused = calm.ctl("hosts", check=6)
    assert "does not train now: holding" in refused.stderr
