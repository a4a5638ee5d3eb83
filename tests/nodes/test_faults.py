"""Fault after fault on four nodes, as ``make nodes`` runs them. Each leaves the site whole for the next."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.netns import both
from tests.nodes import image
from tests.nodes.net import HUB
from tests.nodes.support import STORE, Site
from tests.nodes.times import record_time, since
from tests.nodes.training import ends_well, member, running, starts, stopped_as_planned, undisturbed

pytestmark = [pytest.mark.nodes, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

NODES = 4
ALL = ("n1", "n2", "n3", "n4")


def newer(calm: Site, folder: Path) -> Path:
    """A wheel of the next version."""
    source = folder / "source"
    source.mkdir()
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(image.ROOT / name, source)
    shutil.copytree(image.ROOT / "nodeagent", source / "nodeagent", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "nodeagent/__init__.py"):
        file = source / name
        file.write_text(file.read_text().replace('"0.1.0"', '"0.1.1"'))
    return image.build_wheel(folder, source)


def test_every_agent_is_upgraded_under_load(calm: Site, reference: dict[int, float], tmp_path: Path) -> None:
    wheel = newer(calm, tmp_path)
    running(calm, "upgraded", "4", 4, steps=80)
    before, started = starts(calm), time.monotonic()
    for name in ALL:  # the new files are there while the old agents still run
        calm.put_wheel(calm.lab.nodes[name], wheel)
    for name in ALL:
        calm.lab.nodes[name].run("systemctl", "restart", "--no-block", "nodeagent")
    calm.until(lambda: starts(calm) == {n: s + 1 for n, s in before.items()}, 120, "all are upgraded")
    took = since(started)
    undisturbed(calm, "upgraded", reference, 80)
    assert "0.1.1" in calm.lab.nodes["n1"].run(f"{image.VENV}/bin/nodeagent", "--version").stdout
    record_time("upgrade of four agents: new wheels, then all restarted", "no step lost", took)


def test_a_rolling_upgrade_in_the_middle_of_a_fault(calm: Site, reference: dict[int, float], tmp_path: Path) -> None:
    wheel = newer(calm, tmp_path)
    job = running(calm, "rolling", "'2:4'", 4, steps=80)
    victim = member(job)
    for name in [n for n in ALL if n != victim]:
        calm.put_wheel(calm.lab.nodes[name], wheel)
        if name == [n for n in ALL if n != victim][1]:
            calm.lab.nodes[victim].cut_power()
        calm.lab.nodes[name].run("systemctl", "restart", "nodeagent")
    calm.until_running("rolling", 3, above=job["generation"])
    calm.lab.boot(victim)
    ends_well(calm, "rolling", reference, 80)
    record_time("power cut in the middle of a rolling upgrade", "goes on without the node, whole again at the end")


def test_a_node_that_was_frozen_for_6_s_does_no_harm(calm: Site, reference: dict[int, float]) -> None:
    job = running(calm, "frozen", "'2:3'", 3)
    victim, started = member(job), time.monotonic()
    calm.lab.nodes[victim].freeze()
    calm.until_running("frozen", 3, above=job["generation"])  # the fourth node steps in
    took = since(started)
    time.sleep(max(0.0, 6 - (time.monotonic() - started)))
    calm.lab.nodes[victim].thaw()
    calm.until_nodes("ready", victim)
    ends_well(calm, "frozen", reference)  # no step, and no commit, of what was thawed
    record_time("node frozen for 6 s, until the next generation runs", "re-formed; no stale step after the thaw", took)


def test_cable_out_and_back(calm: Site, reference: dict[int, float]) -> None:
    job = running(calm, "cable", "'2:3'", 3)
    victim, started = member(job), time.monotonic()
    with calm.lab.net.unplugged(victim):
        calm.unasked.add(victim)
        calm.until_running("cable", 3, above=job["generation"])
        took = since(started)
    calm.unasked.clear()
    calm.until_nodes("ready", victim)
    ends_well(calm, "cable", reference)
    record_time("cable out, until the next generation runs", "re-formed", took)


def test_a_one_way_cut(calm: Site, reference: dict[int, float]) -> None:
    """It hears all others, and none of them hears it."""
    job = running(calm, "oneway", "'2:3'", 3)
    victim, started = member(job), time.monotonic()
    with calm.lab.net.cut([(victim, other) for other in (*ALL, STORE) if other != victim]):
        calm.unasked.add(victim)
        calm.until_running("oneway", 3, above=job["generation"])
        took = since(started)
    calm.unasked.clear()
    calm.until_nodes("ready", victim)
    ends_well(calm, "oneway", reference)
    record_time("nothing that it sends arrives (one-way cut), until the next generation runs", "re-formed", took)


def test_a_slow_cable(calm: Site, reference: dict[int, float]) -> None:
    """25 ms each way, one frame in two hundred lost, 20 Mbit/s: slower steps, and nothing else."""
    with calm.lab.net.slow("n2", delay=0.025, loss=0.005, rate=2.5e6):
        calm.train("slow", nodes="4", steps=40)
        calm.until_running("slow", 4)
        undisturbed(calm, "slow", reference, 40)
    record_time("25 ms each way, 0.5 % loss, 20 Mbit/s on one node's cable", "no step lost")


def test_redis_is_cut_off_for_10_s(calm: Site, reference: dict[int, float]) -> None:
    running(calm, "storecut", "4", 4, steps=80)
    with calm.lab.net.cut(both([STORE], [*ALL, HUB])):
        time.sleep(10)
        calm.until_steps("storecut", 5)
    calm.until_nodes("ready", *ALL)
    undisturbed(calm, "storecut", reference, 80)
    record_time("Redis' host cut off for 10 s", "no step lost")


def test_the_host_of_redis_is_rebooted(calm: Site, reference: dict[int, float]) -> None:
    running(calm, "storeboot", "4", 4, steps=80)
    calm.lab.nodes[STORE].power_off()
    time.sleep(5)
    calm.lab.boot(STORE)
    calm.until_nodes("ready", *ALL)
    undisturbed(calm, "storeboot", reference, 80)
    record_time("Redis' host switched off, and on again after 5 s", "no step lost")


def test_a_killed_agent_is_back_before_its_workers_miss_it(calm: Site, reference: dict[int, float]) -> None:
    job = running(calm, "crash", "4", 4)
    victim = member(job)
    before, started = starts(calm)[victim], time.monotonic()
    calm.lab.nodes[victim].run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "nodeagent")
    calm.until(lambda: starts(calm)[victim] == before + 1, 60, "it is back")
    took = since(started)
    ends_well(calm, "crash", reference)
    assert calm.job("crash")["restarts"] == 0
    record_time("`kill -9` of an agent, until it is back", "not re-formed", took)


def test_a_node_that_is_imaged_anew_under_its_name(calm: Site, reference: dict[int, float]) -> None:
    job = running(calm, "anew", "'2:4'", 4)
    victim = member(job)
    node, life = calm.lab.nodes[victim], calm.node(victim)["incarnation"]["life"]
    node.cut_power()
    calm.until_running("anew", 3, above=job["generation"])
    node.image_anew()
    calm.lab.prepare(node)
    calm.lab.boot(victim)
    calm.install(victim)
    assert calm.node(victim)["incarnation"]["life"] != life
    ends_well(calm, "anew", reference)
    record_time("node imaged anew under its name", "re-formed; the node joins with a new life")


def test_scaled_from_four_to_two_and_back(calm: Site, reference: dict[int, float]) -> None:
    """By a user on the command line; a planned stop saves a checkpoint first, and counts as nobody's fault."""
    job = running(calm, "scaled", "'2:4'", 4, steps=80)
    stood = []
    for count in (2, 4):
        calm.ctl("n1", "scale", "scaled", str(count), user="train")
        job = calm.until_running("scaled", count, above=job["generation"])
        calm.until_steps("scaled", 5)
        stood.append(calm.job("scaled")["generations"][-1]["downtime"])
    stopped_as_planned(calm, "scaled", reference, 80)
    assert calm.job("scaled")["budget"]["used"] == 0
    for seconds, change in zip(stood, ("4 nodes to 2", "2 nodes to 4"), strict=True):
        record_time(f"scaled from {change}: training stands still", "no step lost or made twice", seconds)
