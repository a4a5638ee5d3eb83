"""Snapshots that are written out where the nodes that have them are given up: no script here saves anything itself."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.e2e.support import ROOT, Cluster, bounded, is_alive, read_steps
from tests.e2e.test_faults_nodes import go_on, is_guard, stop_all
from tests.e2e.test_snapshots import lost_steps
from tests.processes import command_line

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 3
TRAIN = """
import json, os, time
import torch
import torch.distributed as dist
from nodeagent.train import context, restore, snapshot

dist.init_process_group("gloo")
place = context()
state = {{"weights": torch.full((1000,), float(place.rank)), "step": 0}}
start = restore(state) or 0
assert state["weights"].tolist() == [float(place.rank + start)] * 1000, "each rank has a part of its own"
for step in range(start + 1, 100000):
    time.sleep(0.02)
    dist.all_reduce(torch.ones(1))
    state["weights"] += 1
    state["step"] = step
    snapshot(state, step)
    row = {{"step": step, "rank": place.rank, "generation": place.generation, "mono": time.monotonic()}}
    with open({log!r}, "a") as out:
        out.write(json.dumps(row) + "\\n")
"""


def job(calm: Cluster, name: str, script: str, nodes: str, workers: int, more: str = "") -> None:
    path = calm.work / f"{name}.py"
    path.write_text(script)
    calm.submit(
        f"name: {name}\ncommand: {json.dumps([sys.executable, str(path)])}\nnodes: {nodes}\n"
        f"workers_per_node: {workers}\ncheckpoint_dir: {calm.work / (name + '.ckpt')}\ngrace: 100s\n"
        f"env: {{PYTHONPATH: {json.dumps(str(ROOT))}}}\n{more}"
    )


def test_parts_of_two_nodes_go_on_where_they_were_on_others(calm: Cluster) -> None:
    job(
        calm, "parts", TRAIN.format(log=str(calm.work / "parts.steps")), "2", 2, "preload: [torch, torch.distributed]\n"
    )
    first = calm.until_running("parts", 2)
    calm.until_steps("parts", 10)

    calm.ctl("pause", "parts", "--timeout", "60s")
    paused = calm.job("parts")["checkpoint"]
    # It leaves without a word to the others: of the last step one of them may lack the snapshot, or the line it logs.
    assert abs(paused["step"] - max(r["step"] for r in read_steps(calm.work, "parts"))) <= 1
    story = calm.ctl("describe", "parts").stdout
    assert re.search(rf"snapshot of step {paused['step']} written out in \d", story)
    assert re.search(rf"part of the snapshot of step {paused['step']} written out in \d", story)
    assert f"step {paused['step']} is committed ({paused['name']})" in story
    assert len(calm.happened("WorkersLeft", "parts")) == 2
    calm.ctl("resume", "parts", "--timeout", "60s")
    second = calm.until_running("parts", 2, above=first["generation"])
    calm.until_steps("parts", 10)
    rows = read_steps(calm.work, "parts")
    assert min(r["step"] for r in rows if r["generation"] == second["generation"]) == paused["step"] + 1

    # one of its nodes is drained: the third takes its place, at the same number of ranks
    drained = second["chief"]
    calm.ctl("drain", drained, "--reason", "a fan", "--timeout", "60s")
    third = calm.until_running("parts", 2, above=second["generation"])
    calm.until_steps("parts", 10)
    assert drained not in {p["node"] for p in third["pods"] if p["generation"] == third["generation"]}
    assert lost_steps(read_steps(calm.work, "parts"), third["generation"]) in (-1, 0, 1)
    folders = sorted(path.name for path in (calm.work / "parts.ckpt").glob("ckpt-*"))
    assert folders[0] == paused["name"], "the one before is kept in case of need"
    assert folders[1] == calm.job("parts")["checkpoint"]["name"]
    assert len(folders) == 2
    calm.ctl("uncordon", drained)
    calm.ctl("stop", "parts", "--timeout", "60s")
    calm.until_phase("parts", "stopped")


KEEPS = """
import os, time
from nodeagent.train import Link, context
from nodeagent.train.memory import Header, SharedBuffer, size_of

place, link = context(), Link.of_environment()
if place.rank == 0 and place.generation == 1:  # the other node has no snapshot, so it is waited for a while
    memory = SharedBuffer.of_size(size_of(64, 0))
    link.ask("snapshot.put", 30, fds=(memory.fd,), index=0, bytes=memory.size)
    memory.seal(Header(place.generation, 7, 0, place.world_size, True, 64, 0, 0, 0))
print("kept", flush=True)
time.sleep(600)
"""


def helpers(pids: set[int]) -> list[int]:
    return [p for p in pids if "nodeagent.train.writeout" in command_line(p)]


def test_a_node_that_was_frozen_as_it_wrote_commits_nothing(calm: Cluster) -> None:
    """A whole node freezes between being told to write out and its commit; it thaws when a newer generation runs."""
    job(calm, "frozen", KEEPS, "1:2", 1)
    first = calm.until_running("frozen", 2)
    calm.until(lambda: any(p["snapshot_bytes"] for p in calm.job("frozen")["pods"]), 30, "there is a snapshot")
    folder = calm.work / "frozen.ckpt"
    with bounded(calm.start("pause", "frozen", "--timeout", "60s")):  # it may speak to the node that freezes
        calm.until(lambda: any(folder.glob(".writeout-*/offers-0")), 20, "the helper has offered")
        stopped = stop_all(calm, first["chief"])
    try:
        (helper,) = helpers(stopped)
        calm.until_phase("frozen", "paused", 30)
        assert calm.job("frozen")["checkpoint"] is None
        calm.ctl("resume", "frozen", "--timeout", "60s")
        calm.until_running("frozen", 1, 30, above=first["generation"])
        go_on([helper])  # before anything that guards it: it writes, and asks for its commit
        calm.until(lambda: any(folder.glob("ckpt-*/nodeagent-manifest.json")), 20, "the helper has written")
    finally:
        go_on(pid for pid in stopped if not is_guard(pid))  # the agent, before the shim can act
        go_on(stopped)
        calm.frozen.clear()
    calm.until(lambda: not is_alive(helper), 20, "the stale helper is gone")
    calm.until_running("frozen", 2, above=first["generation"] + 1)
    assert calm.job("frozen")["checkpoint"] is None
    assert not list(folder.glob("ckpt-*/nodeagent-committed"))
    calm.ctl("stop", "frozen")
    calm.until_phase("frozen", "stopped")
