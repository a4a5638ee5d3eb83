"""What goes wrong on one node of four while its network is fine: its agent hangs, its clock is off, its disks are
full, its memory is short; and a fifth node. ``make nodes`` runs it. Each leaves the site whole for the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.nodes.node import Node
from tests.nodes.support import UNITS, Site
from tests.nodes.training import ends_well, member, running, told, undisturbed

pytestmark = [pytest.mark.nodes, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

NODES = 4
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"
HOUR = 3600
FOLDERS = ("/var/lib/nodeagent", "/var/log/nodeagent")


def shown(node: Node, name: str) -> str:
    """A property of the agent's unit."""
    return node.run("systemctl", "show", "nodeagent", "-p", name, "--value").stdout.strip()


def test_the_watchdog_of_an_agent_that_hangs(calm: Site, reference: dict[int, float]) -> None:
    """The watchdog (10 s) is longer than the lease (3 s): its workers end with their granted time, the job goes on
    on another node, and systemd brings back the agent, which is a newcomer then."""
    job = running(calm, "watchdog", "'2:3'", 3)
    victim = member(job)
    node, before, started = calm.lab.nodes[victim], calm.node(victim)["incarnation"], time.monotonic()
    assert shown(node, "NRestarts") == "0"
    node.run("systemctl", "kill", "--kill-who=main", "--signal=STOP", "nodeagent")
    calm.unasked.add(victim)
    after = calm.until_running("watchdog", 3, above=job["generation"])
    told("agent hangs, to the next generation", started)
    assert victim not in {pod["node"] for pod in after["pods"] if pod["generation"] == after["generation"]}
    calm.until(lambda: calm.node(victim)["incarnation"]["life"] != before["life"], 60, "it is back, as a newcomer")
    told("agent hangs, to its return", started)
    calm.unasked.clear()
    calm.until_nodes("ready", victim)
    assert shown(node, "NRestarts") == "1"
    assert "Watchdog timeout" in node.run("journalctl", "--no-pager", "-q", "-u", "nodeagent").stdout
    ends_well(calm, "watchdog", reference)
    assert calm.job("watchdog")["restarts"] == 0


@contextmanager
def ahead(calm: Site, node: Node) -> Iterator[None]:
    """Its agent's clock, and no other, is an hour ahead. What counts from the boot is as it was: as on a machine whose
    administrator sets its clock wrong."""
    library = node.run("sh", "-c", f"ls {FAKETIME}").stdout.strip()
    environ = f"LD_PRELOAD={library} FAKETIME=+{HOUR} FAKETIME_DONT_FAKE_MONOTONIC=1"
    file = f"{UNITS}/nodeagent.service.d/clock.conf"
    node.write(file, f"[Service]\nEnvironment={environ}\n")
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "restart", "nodeagent")
    try:
        yield
    finally:
        node.run("rm", file)
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "restart", "nodeagent")


def test_a_clock_that_is_an_hour_ahead(calm: Site, reference: dict[int, float]) -> None:
    node = calm.lab.nodes["n2"]
    running(calm, "clock", "4", 4)
    with ahead(calm, node):
        calm.until_nodes("ready", "n2")
        said = calm.ctl("n2", "doctor", check=False).stdout
        assert f"the server's clock and this machine's differ by {HOUR} s" in said, said
        undisturbed(calm, "clock", reference)
        calm.train("clock2", nodes="4", steps=20, at="n2")  # signed an hour ahead
        undisturbed(calm, "clock2", reference, 20)
    calm.until_nodes("ready", "n2")
    calm.train("clock3", nodes="4", steps=20, at="n2")  # an hour before that
    undisturbed(calm, "clock3", reference, 20)


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
        said = calm.ctl("n3", "doctor", check=False).stdout
        assert "0 of 8 MiB are free" in said, said
        node.run("systemctl", "restart", "nodeagent")
        calm.until_nodes("ready", "n3")
        undisturbed(calm, "full", reference)


def test_a_fifth_node_joins_the_running_job(calm: Site, reference: dict[int, float]) -> None:
    """Last: it stays."""
    job = running(calm, "fifth", "'2:5'", 4, steps=100, delay=0.5)
    started = time.monotonic()
    calm.lab.add("n5")
    calm.lab.boot("n5")
    calm.install("n5")
    told("a fifth node, from its power switch until it is ready", started)
    calm.until_running("fifth", 5, limit=120, above=job["generation"])
    told("a fifth node, from its power switch to its first generation", started)
    ends_well(calm, "fifth", reference, 100)
