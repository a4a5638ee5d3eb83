"""A sick GPU all the way round: out of the running job, its node drained, repaired, verified, on probation, and back by
itself, with real agents and a driver that is not real under everything that is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nodeagent.local.privateredis import PrivateRedis
from tests.e2e.bare import STEPPER, Bare, bare
from tests.e2e.support import ROOT, read_steps, rules_of
from tests.e2e.ward import GPUS, Machines, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip

NODES = ("n1", "n2", "n3", "n4")
BOUND = 60.0


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = ROOT / "tests" / "fakenvml" / "fakenvml.c"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    server = PrivateRedis(tmp_path_factory.mktemp("store"))
    server.start()
    try:
        with bare({"url": server.url}) as one:
            one.environ |= {"NODEAGENT__HEALTH__PROBATION": "5s", "NODEAGENT__TIMING__COOLDOWN": "2s"}
            machines = Machines(one, library)
            for node in NODES:
                machines.start(node)
            one.until_ready()
            yield machines
    finally:
        server.stop()


@pytest.fixture
def calm(ward: Machines) -> Iterator[Machines]:
    """No job lives, every GPU is trusted."""
    ward.cluster.at_rest()
    ward.cluster.until(lambda: all(well(ward.cluster, node) for node in NODES), BOUND, "every GPU is trusted")
    yield ward


def rules(cluster: Bare, node: str) -> dict[str, str]:
    return rules_of(cluster.node(node))


def well(cluster: Bare, node: str) -> bool:
    return not rules(cluster, node) and all(gpu["healthy"] for gpu in cluster.node(node)["gpus"])


def start(cluster: Bare, name: str) -> None:
    command = json.dumps([sys.executable, str(STEPPER), str(cluster.work / f"{name}.steps")])
    cluster.submit(
        f"name: {name}\ncommand: {command}\nnodes: {{min: 1, max: 4, target: 4}}\n"
        "workers_per_node: gpu\nuneven: true\ngrace: 1s\n"
    )
    until_used(cluster, name, len(NODES) * GPUS)


def until_used(cluster: Bare, name: str, workers: int) -> None:
    def so() -> bool:
        job = cluster.job(name)
        return bool(job["phase"] == "running" and job["world_size"] == workers == len(cluster.workers(name)))

    cluster.until(so, BOUND, f"{name} runs on {workers} GPUs")


def test_an_xid_79_all_the_way_round(calm: Machines) -> None:
    cluster = calm.cluster
    start(cluster, "round")
    calm.xid(79, ("n2", 1))
    cluster.until(lambda: calm.asked("reboot") == [f"n2 {calm.gpu('n2', 1)} xid.79"], BOUND, "n2 is to be rebooted")
    job = cluster.job("round")
    assert job["world_size"] == 3 * GPUS, "its other GPU makes room before the reboot"
    assert [pod["node"] for pod in job["pods"]] == ["n1", "n3", "n4"]
    assert (job["cause"]["kind"], job["cause"]["node"]) == ("hardware", "n2")
    cluster.until(lambda: cluster.node("n2")["reason"] == "reboot under way", BOUND, "the node that is asked knows it")
    assert cluster.node("n2")["state"] == "repairing"
    assert "nothing: nodeagent repairs it (reboot)" in cluster.ctl("describe", "node/n2").stdout
    assert "reboot under way" in cluster.ctl("nodes", "-o", "wide").stdout
    calm.reboot("n2")
    cluster.until(lambda: calm.asked("verify") == ["n2  "], BOUND, "n2 is verified")
    last: dict[str, Any] = {}

    def on_probation() -> bool:
        last.update(cluster.node("n2"))
        return rules_of(last) == {"xid.79": "probation"}

    cluster.until(on_probation, BOUND, "n2 is on probation")
    assert last["gpus"][1]["healthy"] is False
    cluster.until(lambda: well(cluster, "n2"), BOUND, "n2 is trusted")
    until_used(cluster, "round", len(NODES) * GPUS)
    assert cluster.job("round")["budget"]["used"] == 0
    assert len(calm.asked("reboot")) == 1
    reported = [e["kind"] for e in cluster.json("events", "--limit", "500")["items"] if e["node"] == "n2"]
    seen = [kind for kind in reported if kind.startswith(("Repair", "Verify", "Readmitted"))]
    assert seen == ["RepairStarted", "RepairDone", "VerifyPassed", "Readmitted"]


@pytest.mark.endurance
def test_a_reset_that_did_not_help_is_followed_by_what_is_heavier(calm: Machines) -> None:
    """The GPU alone is reset while the other one trains; the verify run fails it, and only then comes the reboot."""
    cluster = calm.cluster
    start(cluster, "heavier")
    checks = {"passed": False, "checks": [{"name": "gemm", "gpu": 0, "passed": False, "why": "wrong sums"}]}
    calm.answers("n3", "verify", 1, json.dumps(checks))
    reboots = len(calm.asked("reboot"))
    calm.xid(95, ("n3", 0))
    cluster.until(lambda: calm.asked("gpu_reset") != [], BOUND, "n3's GPU is reset")
    assert calm.asked("gpu_reset") == [f"n3 {calm.gpu('n3', 0)} xid.95"]
    until_used(cluster, "heavier", len(NODES) * GPUS - 1)
    cluster.until(lambda: len(calm.asked("reboot")) > reboots, BOUND, "it did not help")
    assert "verify run: gemm: wrong sums" in cluster.ctl("describe", "node/n3").stdout
    calm.answers("n3", "verify", 0)
    calm.reboot("n3")
    cluster.until(lambda: well(cluster, "n3"), BOUND, "n3 is trusted")
    assert cluster.job("heavier")["budget"]["used"] == 0


def test_faults_on_all_nodes_at_once_repair_nothing(calm: Machines) -> None:
    cluster = calm.cluster
    start(cluster, "kept")
    before = {kind: calm.asked(kind) for kind in ("reboot", "gpu_reset")}
    calm.xid(79, *((node, 0) for node in NODES))
    cluster.until(lambda: all("xid.79" in rules(cluster, node) for node in NODES), BOUND, "every node is unfit")
    steps = len(read_steps(cluster.work, "kept"))
    cluster.until(lambda: len(read_steps(cluster.work, "kept")) > steps + 100, BOUND, "it goes on")
    assert cluster.job("kept")["world_nodes"] >= len(NODES) - 1

    def held() -> int:
        reported = [cluster.node(n)["repair"] for n in NODES]
        return sum(text.startswith("not repaired by itself: the breaker is open") for text in reported)

    cluster.until(lambda: held() >= len(NODES) - 1, BOUND, "it is said why they are not repaired")
    assert {kind: calm.asked(kind) for kind in before} == before
    assert "breaker" in cluster.ctl("doctor", check=None).stdout
    for node in NODES:
        calm.driver(node)
        cluster.ctl("health", "ack", node, "--agent", str(cluster.home / "local" / "run" / "b" / node / "api.sock"))
