"""What goes wrong on one node of four while its network is fine: its agent hangs, its clock is off, its disks are
full, its memory is short; and a fifth node. ``make nodes`` runs it. Each leaves the site whole for the next."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nodes import image
from tests.nodes.node import OURS, Node, remove_group
from tests.nodes.support import UNITS, Site
from tests.nodes.times import record_time, since
from tests.nodes.training import ends_well, member, running, starts, undisturbed

pytestmark = [pytest.mark.nodes, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

NODES = 4
HOUR = 3600
AHEAD = Path(__file__).with_name("ahead.c")
FOLDERS = ("/var/lib/nodeagent", "/var/log/nodeagent")

MEMORY = Path("/sys/fs/cgroup/memory")
HOG = """
import os, pathlib, time
import torch.distributed as d
d.init_process_group("gloo")
held, mine = [], pathlib.Path("hungry-" + os.environ["RANK"])
while not pathlib.Path("full-up").exists():
    if os.environ["NODEAGENT_GENERATION"] == "1" and mine.exists():
        held.append(bytearray(b"x") * 2**20)
    time.sleep(0.01)
"""
"""Takes more and more once told to, if it is of the first generation."""


def shown(node: Node, name: str) -> str:
    """A property of the agent's unit."""
    return node.run("systemctl", "show", "nodeagent", "-p", name, "--value").stdout.strip()


def test_the_watchdog_of_an_agent_that_hangs(calm: Site, reference: dict[int, float]) -> None:
    """The watchdog (10 s) is longer than the lease (3 s): its lease process holds the lease meanwhile, and systemd
    brings back the agent, which goes on in its old life."""
    job = running(calm, "watchdog", "3", 3, steps=80)
    victim = member(job)
    node, before, started = calm.lab.nodes[victim], calm.node(victim)["incarnation"], time.monotonic()
    assert shown(node, "NRestarts") == "0"
    node.run("systemctl", "kill", "--kill-who=main", "--signal=STOP", "nodeagent")
    calm.unasked.add(victim)
    calm.until(lambda: starts(calm)[victim] == before["start"] + 1, 60, "it is back")
    took = since(started)
    calm.unasked.clear()
    assert calm.node(victim)["incarnation"]["life"] == before["life"]
    assert shown(node, "NRestarts") == "1"
    assert "Watchdog timeout" in node.run("journalctl", "--no-pager", "-q", "-u", "nodeagent").stdout
    undisturbed(calm, "watchdog", reference, 80)
    record_time("agent hangs (SIGSTOP), until its watchdog has brought it back", "no step lost", took)


@contextmanager
def ahead(calm: Site, node: Node) -> Iterator[None]:
    """Its agent's clock, and no other, is an hour ahead. What counts from the boot is as it was: as on a machine whose
    administrator sets its clock wrong."""
    library = "/usr/local/lib/ahead.so"
    image.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(node.here(library)), str(AHEAD)])
    file = f"{UNITS}/nodeagent.service.d/clock.conf"
    node.write(file, f"[Service]\nEnvironment=LD_PRELOAD={library} AHEAD={HOUR}\n")
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "restart", "nodeagent")
    try:
        yield
    finally:
        node.run("rm", file)
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "restart", "nodeagent")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here: install gcc")
def test_a_clock_that_is_an_hour_ahead(calm: Site, reference: dict[int, float]) -> None:
    node = calm.lab.nodes["n2"]
    running(calm, "clock", "4", 4)
    before = starts(calm)["n2"]
    with ahead(calm, node):
        calm.until(lambda: starts(calm)["n2"] == before + 1, 60, "its agent is back")
        output = calm.ctl("n2", "doctor", check=False).stdout
        assert f"the server's clock and this machine's differ by {HOUR} s" in output, output
        undisturbed(calm, "clock", reference)
        calm.train("clock2", nodes="4", steps=20, at="n2")  # signed an hour ahead
        undisturbed(calm, "clock2", reference, 20)
    calm.until_nodes("ready", "n2")
    calm.train("clock3", nodes="4", steps=20, at="n2")  # an hour before that
    undisturbed(calm, "clock3", reference, 20)
    record_time("a node's clock steps by an hour, and back", "no step lost; its jobs start everywhere")


@contextmanager
def small(calm: Site, node: Node) -> Iterator[None]:
    """The agent's folders that last lie on a disk of 8 MiB each."""
    node.run("systemctl", "stop", "nodeagent")
    for folder in FOLDERS:
        node.run("mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", folder)
    node.run("systemctl", "start", "nodeagent")
    try:
        yield
    finally:
        node.run("systemctl", "stop", "nodeagent")
        node.run("systemctl", "stop", "nodeagent-pod-*.service")
        for folder in FOLDERS:
            node.run("umount", "--lazy", folder)
        node.run("systemctl", "start", "nodeagent")


def test_a_full_disk_does_not_stop_training(calm: Site, reference: dict[int, float]) -> None:
    """Neither the steps, nor a restart of its agent, nor does another job start there that could not be accounted
    for."""
    node = calm.lab.nodes["n3"]
    with small(calm, node):
        calm.until_nodes("ready", "n3")
        running(calm, "full", "4", 4)
        for folder in FOLDERS:
            node.run("sh", "-c", f"cat /dev/zero >{folder}/ballast", check=False)
        calm.until_steps("full", 10)
        output = calm.ctl("n3", "doctor", check=False).stdout
        assert "0 of 8 MiB are free" in output, output
        node.run("systemctl", "restart", "nodeagent")
        calm.until_nodes("ready", "n3")
        undisturbed(calm, "full", reference)
    record_time("disks for state and logs full, and the agent restarted then", "no step lost")


def test_a_node_whose_disk_is_full_is_passed_over(calm: Site, reference: dict[int, float]) -> None:
    """It cannot write down what it promises, so a gang that has to be re-formed goes on without it, and says why."""
    node = calm.lab.nodes["n3"]
    with small(calm, node):
        calm.until_nodes("ready", "n3")
        job = running(calm, "passed", "'3:4'", 4)
        for folder in FOLDERS:
            node.run("sh", "-c", f"cat /dev/zero >{folder}/ballast", check=False)
        started = time.monotonic()
        pod = next(pod for pod in job["pods"] if pod["node"] == "n3")
        node.run("kill", "-9", str(pod["workers"][0]["pid"]))
        calm.until_running("passed", 3, above=job["generation"])
        took = since(started)
        output = calm.ctl("n1", "describe", "passed").stdout
        assert "n3 cannot run it" in output and "cannot be written to: No space left on device" in output, output
        ends_well(calm, "passed", reference)
    record_time(
        "worker killed on a node with full disks, until the next generation runs", "re-formed without the node", took
    )


@contextmanager
def limited(node: Node, pid: int) -> Iterator[None]:
    """This process of the node may take no more memory than it has, but for 64 MiB. By the host's old hierarchy: nodes
    have no memory controller of their own."""
    group = MEMORY / f"{OURS}-{node.name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        (group / "cgroup.procs").write_text(str(node.outside(pid)))
        yield
    finally:
        remove_group(group)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="nothing here can limit the memory of a node's process")
def test_a_worker_that_the_kernel_kills_for_want_of_memory(calm: Site) -> None:
    """The cause is named, and the gang re-formed on the same nodes."""
    shared = calm.lab.shared
    (shared / "hog.py").write_text(HOG)
    job = {
        "name": "hog",
        "nodes": 2,
        "workers_per_node": 1,
        "working_dir": "/shared",
        "command": [sys.executable, "hog.py"],
    }
    (shared / "hog.yaml").write_text(json.dumps(job))
    calm.ctl("n1", "submit", "/shared/hog.yaml", user="train")
    before = calm.until_running("hog", 2)
    pod = next(pod for pod in before["pods"] if pod["node"] != before["chief"])
    with limited(calm.lab.nodes[pod["node"]], pod["workers"][0]["pid"]):
        started = time.monotonic()
        (shared / f"hungry-{pod['workers'][0]['rank']}").touch()
        after = calm.until_running("hog", 2, above=before["generation"])
        took = since(started)
    assert (after["restarts"], after["budget"]["used"]) == (1, 1)
    assert {p["node"] for p in after["pods"]} >= {p["node"] for p in before["pods"]}
    output = calm.ctl("n1", "describe", "hog").stdout
    assert f"rank {pod['workers'][0]['rank']} on {pod['node']} failed first: SIGKILL (9), out of memory" in output, (
        output
    )
    (shared / "full-up").touch()
    calm.until_phase("hog", "succeeded")
    record_time(
        "the kernel kills a worker for want of memory, until the next generation runs", "the cause is named", took
    )


def test_a_fifth_node_joins_the_running_job(calm: Site, reference: dict[int, float]) -> None:
    """Last: it stays."""
    job = running(calm, "fifth", "'2:5'", 4, steps=100, delay=0.5)
    started = time.monotonic()
    calm.lab.add("n5")
    calm.lab.boot("n5")
    calm.install("n5")
    ready = since(started)
    calm.until_running("fifth", 5, limit=120, above=job["generation"])
    took = since(started)
    ends_well(calm, "fifth", reference, 100)
    record_time("a fifth node, from its power switch until it is ready", "goes on", ready)
    record_time("the same, until it trains (30 s of it are the time before a newcomer is let in)", "grown", took)
