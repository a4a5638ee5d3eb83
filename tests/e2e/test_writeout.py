"""Snapshots that are written out where the nodes that have them are given up: no script here saves anything itself."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.e2e.support import ROOT, Cluster, read_steps
from tests.e2e.test_snapshots import lost_steps

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
        f"workers_per_node: {workers}\ncheckpoint_dir: {calm.work / (name + '.ckpt')}\ngrace: 20s\n"
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
    assert paused["step"] == max(r["step"] for r in read_steps(calm.work, "parts"))
    story = calm.ctl("describe", "parts").stdout
    assert re.search(rf"snapshot of step {paused['step']} written out in \d", story)
    assert re.search(rf"part of the snapshot of step {paused['step']} written out in \d", story)
    assert f"step {paused['step']} is committed ({paused['name']})" in story
    assert len(calm.happened("WorkersLeft", "parts")) == 2
    calm.ctl("resume", "parts", "--timeout", "60s")
    second = calm.until_running("parts", 2, above=first["generation"])
    calm.until_steps("parts", 10)
    assert lost_steps(read_steps(calm.work, "parts"), second["generation"]) == 0

    # one of its nodes is drained: the third takes its place, at the same number of ranks
    drained = second["chief"]
    calm.ctl("drain", drained, "--reason", "a fan", "--timeout", "60s")
    third = calm.until_running("parts", 2, above=second["generation"])
    calm.until_steps("parts", 10)
    assert drained not in {p["node"] for p in third["pods"] if p["generation"] == third["generation"]}
    assert lost_steps(read_steps(calm.work, "parts"), third["generation"]) in (0, 1)
    folders = sorted(path.name for path in (calm.work / "parts.ckpt").glob("ckpt-*"))
    assert folders[0] == paused["name"], "the one before is kept in case of need"
    assert folders[1] == calm.job("parts")["checkpoint"]["name"]
    assert len(folders) == 2
    calm.ctl("uncordon", drained)
    calm.ctl("stop", "parts", "--timeout", "60s")
    calm.until_phase("parts", "stopped")
