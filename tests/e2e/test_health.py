"""Sick hardware, told by a driver that is not real under everything that is: what is evicted, what is kept, what heals.

The nodes of a local cluster share the GPUs of one machine, so one state of the driver speaks for all of them.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bare import STEPPER
from tests.e2e.driver import Driver
from tests.e2e.support import Cluster, home, read_steps, rules_of
from tests.processes import command_line

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 4
EACH = 2
"""GPUs of a node."""
PROBATION = "2s"
BEATS_WHILE_HUNG = 15
"""Of half a second, in the two deadlines of 7 s that a driver has."""
BOUND = 60.0
"""Seconds for what takes one or two on an idle machine."""


class Ward:
    """The cluster, and the driver of its machine."""

    def __init__(self, cluster: Cluster, driver: Driver) -> None:
        self.cluster, self.driver = cluster, driver

    def rules(self, node: str) -> dict[str, str]:
        return rules_of(self.cluster.node(node))

    def verdicts(self) -> dict[str, list[dict[str, Any]]]:
        """Of each node, and of its GPUs: what keeps them from being trusted."""
        return {node: self.cluster.node(node)["verdicts"] for node in self.cluster.nodes()}

    def well(self) -> bool:
        nodes = self.cluster.nodes()
        return all(self.healthy(node) == EACH and not self.rules(node) for node in nodes)

    def healthy(self, node: str) -> int:
        return sum(gpu["healthy"] for gpu in self.cluster.node(node)["gpus"])

    def uuid(self, node: str, number: int) -> str:
        uuid: str = self.cluster.node(node)["gpus"][number]["uuid"]
        return uuid

    def start(self, name: str, more: str = "") -> dict[str, Any]:
        """A job on every GPU of every node, whose workers need no GPU."""
        work = self.cluster.work
        command = json.dumps([sys.executable, str(STEPPER), str(work / f"{name}.steps")])
        self.cluster.submit(
            f"name: {name}\ncommand: {command}\nnodes: {{min: 1, max: {NODES}, target: {NODES}}}\n"
            f"workers_per_node: gpu\ngrace: 2s\n{more}"
        )
        job = self.cluster.until_running(name, NODES)
        self.cluster.until(lambda: len(self.cluster.workers(name)) == NODES * EACH, BOUND, "all workers run")
        return job

    def until_used(self, name: str, workers: int) -> dict[str, Any]:
        """Until the job runs with so many workers, in one active generation."""

        def so() -> bool:
            job = self.cluster.job(name)
            return bool(job["phase"] == "running" and job["world_size"] == workers == len(self.cluster.workers(name)))

        self.cluster.until(so, BOUND, f"{name} runs on {workers} GPUs")
        return self.cluster.job(name)


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    with home() as (folder, environ):
        driver = Driver(folder / "driver", NODES * EACH)
        environ["NODEAGENT__HEALTH__PROBATION"] = PROBATION
        one = Cluster(folder, folder / "work", environ | driver.environ(tmp_path_factory.mktemp("nvml")))
        try:
            one.up(NODES)
            yield Ward(one, driver)
        finally:
            one.ctl("local", "down", check=None)


@pytest.fixture
def calm(ward: Ward) -> Iterator[Ward]:
    """Nothing runs, and every GPU is trusted."""
    ward.cluster.at_rest()
    ward.driver.set()
    for node in ward.cluster.nodes():
        if ward.rules(node):
            ward.cluster.ctl("health", "ack", node, check=None)
    try:
        ward.cluster.until(ward.well, BOUND, "every GPU is trusted")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{ward.verdicts()}") from error
    yield ward


def test_a_gpu_that_falls_off_the_bus_is_left_out_until_it_is_repaired(calm: Ward) -> None:
    cluster = calm.cluster
    before = calm.start("lost", "uneven: true\n")
    sick = calm.uuid("n2", 1)
    workers = cluster.workers("lost")
    second = os.pidfd_open(cluster.workers("lost", "n2")[max(cluster.workers("lost", "n2"))])
    at = time.monotonic()
    calm.driver.xid(79, 3)
    assert select.select([second], [], [], BOUND)[0], "the worker on that GPU ends"
    gone = time.monotonic() - at
    os.close(second)
    calm.until_used("lost", NODES * EACH - 1)
    job = cluster.job("lost")
    assert not set(workers.values()) & set(cluster.workers("lost").values())

    def new_steps() -> list[dict[str, Any]]:
        return [step for step in read_steps(cluster.work, "lost") if step["generation"] == job["generation"]]

    cluster.until(lambda: len({step["rank"] for step in new_steps()}) == job["world_size"], BOUND, "all have stepped")
    steps = new_steps()
    first = {step["rank"]: step["mono"] - at for step in reversed(steps)}
    print(f"worker gone {gone:.3f} s after the Xid; the gang without it steps after {max(first.values()):.3f} s")
    assert job["generation"] == before["generation"] + 1, "one re-forming is enough"
    assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("hardware", "n2", 0)
    assert cluster.pod("lost", "n2")["workers"][0]["state"] == "running"
    assert len(cluster.pod("lost", "n2")["workers"]) == 1
    assert calm.rules("n2") == {"xid.79": "active"}
    assert [calm.healthy(n) for n in ("n1", "n2", "n3", "n4")] == [2, 1, 2, 2]
    output = cluster.ctl("describe", "node/n2").stdout
    assert "rule xid.79, active" in output
    assert "nodeagentctl health ack n2" in output
    assert "1/2" in cluster.ctl("nodes", "n2").stdout
    calm.driver.set()
    elsewhere = cluster.ctl("health", "ack", "n2", "--gpu", calm.uuid("n1", 0), check=3)
    assert "did you mean" in elsewhere.stderr
    cluster.ctl("health", "ack", "n2", "--gpu", sick, "--rule", "xid.79")
    cluster.until(lambda: calm.healthy("n2") == EACH, BOUND, "its probation ends")
    assert calm.rules("n2") == {}
    cluster.ctl("restart", "lost")
    job = calm.until_used("lost", NODES * EACH)
    assert job["budget"]["used"] == 0


def test_a_driver_that_hangs_under_one_node_costs_it_its_work_and_not_its_lease(calm: Ward) -> None:
    cluster = calm.cluster
    calm.start("hung")
    agent, life = cluster.node("n3")["agent_pid"], cluster.node("n3")["incarnation"]
    (probe,) = probes(agent)
    before = {node: beats(cluster, node) for node in cluster.nodes()}
    os.kill(probe, signal.SIGSTOP)
    cluster.until(lambda: calm.rules("n3") == {"probe.nvml.late": "active"}, BOUND, "nobody knows how n3's GPUs are")
    assert cluster.job("hung")["world_nodes"] == NODES, "unknown evicts nobody"
    cluster.until_running("hung", NODES - 1, above=1)
    job = cluster.job("hung")
    assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("hardware", "n3", 0)
    assert cluster.nodes()["n3"] == "ready", "its lease is kept"
    assert cluster.node("n3")["agent_pid"] == agent
    during = {node: beats(cluster, node) - before[node] for node in before}
    output = {node: dict(late) for node, late in during.items()}
    assert during["n3"]["all"] >= BEATS_WHILE_HUNG, output
    # One that waited for the driver would be late by the probe's deadlines. A busy machine makes any a little late.
    assert during["n3"]["late"] == 0, output
    assert cluster.node("n3")["incarnation"] == life
    # The probe is replaced, the new one is answered, and n3 comes back by itself.
    cluster.until_running("hung", NODES, above=job["generation"])
    assert calm.rules("n3") == {}
    assert cluster.job("hung")["budget"]["used"] == 0
    assert probe not in probes(agent)


def test_gpus_that_the_config_names_join_when_a_slow_driver_answers(calm: Ward) -> None:
    """As after a boot: the agent knows none from before, and starts without them."""
    cluster, agent = calm.cluster, calm.cluster.node("n2")["agent_pid"]
    (known,) = cluster.home.glob("local/**/n2/state/gpus.json")
    calm.driver.set("hang nvmlDeviceGetCount_v2")
    known.unlink()
    os.kill(agent, signal.SIGKILL)
    unread = {"the driver has not listed it yet"}
    cluster.until(lambda: {gpu["why"] for gpu in cluster.node("n2")["gpus"]} == unread, BOUND, "it starts without them")
    calm.driver.set()
    cluster.until(calm.well, BOUND, "the driver has answered")


def test_the_breaker_keeps_what_runs_when_all_nodes_become_unfit_at_once(calm: Ward) -> None:
    cluster = calm.cluster
    before = calm.start("kept")
    calm.driver.set("hang nvmlDeviceGetTemperatureV")
    nodes = list(cluster.nodes())
    cluster.until(lambda: all("probe.nvml.hung" in calm.rules(n) for n in nodes), BOUND, "every node is unfit")
    steps = len(read_steps(cluster.work, "kept"))
    cluster.until(lambda: len(read_steps(cluster.work, "kept")) > steps + 100, BOUND, "it goes on")
    job = cluster.job("kept")
    # The first to become unfit may have been told of before the others were.
    assert job["world_nodes"] >= NODES - 1
    assert job["generation"] <= before["generation"] + 1
    assert any(w.startswith("breaker open: 4 of 4 nodes became unfit") for w in job["why"])
    assert job["budget"]["used"] == 0
    assert "breaker" in cluster.ctl("describe", "node/n1").stdout.lower()
    assert set(cluster.nodes().values()) == {"ready"}


def test_an_application_error_on_every_node_bars_nothing(calm: Ward) -> None:
    cluster = calm.cluster
    before = calm.start("faulty", "restarts: {max: 1}\n")
    calm.driver.xid(31, *range(0, NODES * EACH, EACH))
    nodes = list(cluster.nodes())
    cluster.until(lambda: all("xid.31" in calm.rules(n) for n in nodes), BOUND, "every node has seen it")
    steps = len(read_steps(cluster.work, "faulty"))
    cluster.until(lambda: len(read_steps(cluster.work, "faulty")) > steps + 100, BOUND, "it goes on")
    job = cluster.job("faulty")
    assert (job["generation"], job["world_nodes"], job["budget"]["used"]) == (before["generation"], NODES, 0)
    os.kill(cluster.workers("faulty")[0], signal.SIGKILL)
    cluster.until_running("faulty", NODES, above=job["generation"])
    assert cluster.job("faulty")["budget"]["used"] == 1, "what the application does is the job's to pay"
    os.kill(cluster.workers("faulty")[0], signal.SIGKILL)
    assert "budget" in cluster.until_phase("faulty", "failed")["reason"]
    assert set(cluster.nodes().values()) == {"ready"}
    assert [calm.healthy(n) for n in nodes] == [EACH] * NODES


def test_a_gpu_that_somebody_else_uses_is_not_free_and_its_user_is_named(calm: Ward) -> None:
    cluster = calm.cluster
    with subprocess.Popen(["sleep", "600"]) as intruder:
        try:
            calm.driver.set(f"2.processes {intruder.pid}:1073741824", "1.memory_used 1073741824")
            cluster.until(lambda: calm.healthy("n2") == calm.healthy("n1") == 1, BOUND, "neither is counted as free")
            assert calm.rules("n2") == {"gpu.foreign": "active"}
            assert calm.rules("n1") == {"gpu.leftover": "active"}
            output = cluster.ctl("describe", "node/n2").stdout
            assert re.search(rf"used by somebody else: pid {intruder.pid} \([^ ]+: sleep\b", output)
            assert "used by somebody else: pid" in cluster.ctl("nodes", "n2", "-o", "wide").stdout
        finally:
            intruder.kill()
    calm.driver.set()
    cluster.until(calm.well, BOUND, "both are free again")


def test_a_drill_is_for_the_nodes_own_agent_and_a_restart_forgets_nothing(calm: Ward) -> None:
    cluster = calm.cluster
    calm.start("stays", "uneven: true\n")
    cluster.ctl("health", "inject", "n4", "--xid", "79")
    cluster.until(lambda: calm.rules("n4") == {"xid.79": "active"}, BOUND, "n4 judges it")
    assert calm.healthy("n4") == EACH - 1
    calm.until_used("stays", NODES * EACH - 1)
    before, workers = cluster.node("n4")["agent_pid"], cluster.workers("stays")
    os.kill(before, signal.SIGTERM)

    def again() -> bool:
        node = cluster.node("n4")
        return bool(node["agent_pid"] != before and node["state"] == "ready")

    cluster.until(again, BOUND, "its agent is started again")
    cluster.until(lambda: calm.rules("n4") == {"xid.79": "active"}, BOUND, "n4 judges it still")
    cluster.until(lambda: cluster.workers("stays") == workers, BOUND, "every pod is published again")
    cluster.until(lambda: len(probes(cluster.node("n4")["agent_pid"])) == 1, BOUND, "it asks the driver again")
    # where the machine is busy the first answer may be late, and the GPUs unknown until then
    cluster.until(lambda: calm.healthy("n4") == EACH - 1, BOUND, "all but the one are trusted")
    assert "xid.79" in cluster.ctl("health", "rules").stdout


def beats(cluster: Cluster, node: str) -> Counter[str]:
    """Heartbeats of a node's agent so far: all, and those that were more than two seconds late."""
    with urllib.request.urlopen(cluster.node(node)["http"] + "/metrics", timeout=10) as page:
        lines = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if not line.startswith("#"))
    name = "nodeagent_heartbeat_late_seconds"
    every, in_time = (int(float(lines[one])) for one in (f"{name}_count", f'{name}_bucket{{le="2.0"}}'))
    return Counter({"all": every, "late": every - in_time})


def probes(agent: int) -> list[int]:
    """The agent's processes that ask the driver."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if any("probes.nvml" in word for word in command_line(int(pid)))]
