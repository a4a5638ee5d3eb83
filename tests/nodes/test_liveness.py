"""What keeps a node's right to run, on nodes with systemd: the lease process without its agent, and the fence beside a
folder for logs that hangs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent.model.timing import Timing
from tests.nodes.node import Node
from tests.nodes.support import Site
from tests.nodes.times import record_time
from tests.nodes.training import ends_well, member, running, starts, undisturbed

pytestmark = [pytest.mark.nodes, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

NODES = 3
LEASE, LOGS = "nodeagent-lease.service", "/var/log/nodeagent"
SLACK = 0.5
"""Seconds beyond the fence until the test has seen what it did."""


def main_pid(node: Node, unit: str) -> int:
    return int(node.run("systemctl", "show", unit, "-p", "MainPID", "--value").stdout)


def test_the_lease_process_is_killed_while_the_agent_is_stuck(calm: Site, reference: dict[int, float]) -> None:
    """Systemd alone brings it back, and sees to the agent in the end."""
    job = running(calm, "stuck", "3", 3, steps=120)
    victim = member(job)
    node, before = calm.lab.nodes[victim], starts(calm)
    calm.unasked.add(victim)
    node.run("systemctl", "kill", "--kill-who=main", "--signal=STOP", "nodeagent")
    stuck, kills, started = main_pid(node, "nodeagent"), 0, time.monotonic()
    while time.monotonic() < started + 7:  # within the watchdog's time for the agent
        old = main_pid(node, LEASE)
        assert old > 0
        node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", LEASE)
        calm.until(lambda old=old: main_pid(node, LEASE) not in (0, old), 5, "systemd has started it again")  # type: ignore[misc]
        kills += 1
        time.sleep(1)
    assert kills >= 3
    assert main_pid(node, "nodeagent") == stuck, "it was stuck all the time"
    calm.until(lambda: main_pid(node, "nodeagent") not in (0, stuck), 30, "systemd's watchdog ends what is stuck")
    calm.unasked.clear()
    calm.until(lambda: starts(calm)[victim] == before[victim] + 1, 60, "another agent is there")
    undisturbed(calm, "stuck", reference, 120)
    record_time(f"`kill -9` of a lease process, {kills} times, while its agent is stopped", "no step lost")


@contextmanager
def that_may_freeze(folder: Path) -> Iterator[Path]:
    """A folder on a file system of its own (``fsfreeze``: whoever writes there waits, and cannot be killed)."""
    folder.mkdir()
    image, place = folder / "image", folder / "logs"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["fsfreeze", "-u", place], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    subprocess.run(["fsfreeze", "-f", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", place], check=True)


def test_the_fence_acts_though_the_folder_for_logs_hangs(
    calm: Site, reference: dict[int, float], tmp_path: Path
) -> None:
    node = calm.lab.nodes["n3"]
    with that_may_freeze(tmp_path / "own") as place:
        node.power_off()
        node.shared[place] = Path(LOGS)
        calm.lab.boot("n3")
        try:
            calm.until_nodes("ready", "n1", "n2", "n3")
            fenced(calm, node, place, reference)
        finally:
            node.power_off()
            del node.shared[place]
    calm.lab.boot("n3")


def fenced(calm: Site, node: Node, place: Path, reference: dict[int, float]) -> None:
    job = running(calm, "hung", "'2:3'", 3, steps=80)
    (worker,) = [w["pid"] for p in job["pods"] if p["node"] == node.name for w in p["workers"]]
    inside = node.here(f"/proc/{worker}")
    with frozen(place):
        writer = node.start("sh", "-c", f"echo x >> {LOGS}/probe")
        for _ in range(3):  # whatever writes there, waits by now: the shim's logs, too
            time.sleep(0.5)
        assert writer.poll() is None, "the folder hangs"
        assert inside.exists(), "a folder that hangs alone disturbs nobody"
        calm.unasked.add(node.name)
        with calm.lab.net.unplugged(node.name):
            began = time.monotonic()
            while inside.exists():
                assert time.monotonic() < began + Timing().fence + SLACK, "the worker runs on without a lease"
                time.sleep(0.01)
            took = time.monotonic() - began
            assert writer.poll() is None, "and the folder hangs still"
            calm.until_running("hung", 2, above=job["generation"])
    assert writer.wait(30) == 0
    calm.unasked.clear()
    calm.until_nodes("ready", node.name)
    ends_well(calm, "hung", reference, 80)
    record_time("cable out on a node whose folder for logs hangs, until its worker is gone", "re-formed", took)
