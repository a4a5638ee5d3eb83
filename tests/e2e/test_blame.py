"""Workers that do not say why they failed: who is blamed, who pays, and that nodes that are lost cost nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 3
WORKER = """
import os, select, socket, sys, time
from pathlib import Path
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
told = Path({here!r}) / ("port-" + os.environ["NODEAGENT_GENERATION"])
if rank == 0:
    server = socket.create_server(("127.0.0.1", 0))
    draft = told.with_suffix(".new")
    draft.write_text(str(server.getsockname()[1]))
    draft.rename(told)
    peers = [server.accept()[0] for _ in range(world - 1)]
else:
    while not told.exists():
        time.sleep(0.01)
    peers = [socket.create_connection(("127.0.0.1", int(told.read_text())))]
Path({here!r}, f"joined-{{os.environ['NODEAGENT_GENERATION']}}-{{rank}}").touch()
select.select(peers, [], [])
print("training aborted: see the log", file=sys.stderr)
sys.exit(7)
"""
LOSSES = 4


def joined(calm: Cluster, generation: int, world: int) -> None:
    files = [calm.work / "quiet" / f"joined-{generation}-{rank}" for rank in range(world)]
    calm.until(lambda: all(f.exists() for f in files), 30, f"all workers of generation {generation} have met")


def submit(calm: Cluster, budget: int) -> dict[str, Any]:
    here = calm.work / "quiet"
    here.mkdir(exist_ok=True)
    script = here / "w.py"
    script.write_text(WORKER.format(here=str(here)))
    calm.submit(
        f"name: quiet\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: {{min: 2, max: 3, target: 3}}\n"
        f"workers_per_node: 1\ncheckpoint_dir: {here}\nfork_server: off\nrestarts: {{max: {budget}}}\n"
    )
    return calm.until_running("quiet", 3)


def test_a_node_that_is_lost_right_after_the_start_costs_nothing_although_its_peers_hide_it(calm: Cluster) -> None:
    """Within 30 s, where an error of a worker's own ends the job, and with a budget that allows no restart."""
    job = submit(calm, 0)
    generation = job["generation"]
    joined(calm, generation, 3)
    node = job["pods"][-1]["node"]
    calm.ctl("local", "kill", node)
    job = calm.until_running("quiet", 2, above=generation, limit=30)
    assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", node, 0)
    calm.at_rest()
    for file in (calm.work / "quiet").iterdir():
        file.unlink()


def test_lost_nodes_cost_nothing_although_their_peers_hide_it(calm: Cluster) -> None:
    """The first one goes within 30 s of the start, where an error ends a job; then more than the budget allows; then
    workers are killed, and each is charged once: on the node that is never lost, since a failure on one that has just
    joined costs nothing (ADR 103)."""
    job = submit(calm, 2)
    founder, *others = sorted(p["node"] for p in job["pods"])
    for loss in range(LOSSES):
        generation = job["generation"]
        joined(calm, generation, 3)
        node = others[loss % len(others)]
        calm.ctl("local", "kill", node)
        job = calm.until_running("quiet", 2, above=generation, limit=30)
        assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", node, 0)
        calm.ctl("local", "start", node)
        job = calm.until_running("quiet", 3, above=job["generation"], limit=60)
    for killed in (1, 2):
        generation = job["generation"]
        joined(calm, generation, 3)
        (node, pid), *_ = [(p["node"], w["pid"]) for p in job["pods"] for w in p["workers"] if p["node"] == founder]
        os.kill(pid, signal.SIGKILL)
        job = calm.until_running("quiet", 3, above=generation, limit=30)
        assert job["budget"]["used"] == killed

        def blamed(generation: int = generation) -> object:
            ends = {g["number"]: g["ended_by"] for g in calm.job("quiet")["generations"]}
            return ends[generation]["node"], ends[generation]["exit"], ends[generation]["judged_when"]

        calm.until(lambda: blamed() == (node, 137, ""), 10, f"{node} is blamed")  # noqa: B023 - called at once
    assert "training aborted" not in calm.ctl("describe", "quiet").stdout.split("Blamed")[-1]
