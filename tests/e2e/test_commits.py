"""A stale generation commits nothing: a whole node is frozen with a commit in its hands, the others go on, it thaws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.support import ROOT, Cluster, is_alive
from tests.e2e.test_faults_nodes import go_on, is_guard, stop_all

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 2
WORKER = """
import os, sys, time
from pathlib import Path
from nodeagent.train import Link, LinkError, context
here, place, link = Path({here!r}), context(), Link.of_environment()

def commit(name, step):
    try:
        link.ask("commit", 20, name=name, step=step, order=step)
        said = "committed"
    except LinkError as error:
        said = str(error)
    print(name, said, flush=True)
    (here / name).write_text(said)

if place.rank == 0:
    commit(f"first-g{{place.generation}}", place.generation * 10)
    while not (here / f"thawed-g{{place.generation}}").exists():
        time.sleep(0.01)
    commit("stale", 999)
time.sleep(600)
"""


def test_a_node_that_was_frozen_commits_nothing(calm: Cluster) -> None:
    here = calm.work / "commits"
    here.mkdir()
    script = here / "w.py"
    script.write_text(WORKER.format(here=str(here)))
    calm.submit(
        f"name: commits\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: 1:2\nworkers_per_node: 1\n"
        f"checkpoint_dir: {calm.work / 'commits.ckpt'}\nenv: {{PYTHONPATH: {json.dumps(str(ROOT))}}}\n"
    )
    first = calm.until_running("commits", 2)
    old = first["generation"]  # 2 where a node was ready later than the other
    calm.until(lambda: written(here / f"first-g{old}"), 30, "the first commit")
    newest = {"name": f"first-g{old}", "step": old * 10, "generation": old}
    calm.until(lambda: calm.job("commits")["checkpoint"] == newest, 10, "it counts")
    worker = calm.until_workers("commits", 2)[0]
    stopped = stop_all(calm, first["chief"])
    assert worker in stopped
    now = calm.until_running("commits", 1, above=old)
    name = f"first-g{now['generation']}"
    calm.until(lambda: written(here / name), 30, "the others have committed")
    assert (here / name).read_text() == "committed"
    pointer = calm.job("commits")["checkpoint"]
    assert pointer == {"name": name, "step": now["generation"] * 10, "generation": now["generation"]}

    (here / f"thawed-g{old}").touch()
    go_on([worker])  # before anything that guards it: it asks for its commit
    others = stopped - {worker}
    go_on(pid for pid in others if not is_guard(pid))  # the agent, before the shim can act
    go_on(others)
    calm.frozen.clear()
    calm.until(lambda: not is_alive(worker), 20, "the stale worker is gone")
    grown = calm.until_running("commits", 2, above=now["generation"])
    calm.until(lambda: written(here / f"first-g{grown['generation']}"), 30, "the grown gang has committed")
    last = grown["generation"]  # its checkpoint may have been told by another agent than the one that is asked here
    calm.until(lambda: calm.job("commits")["checkpoint"]["generation"] == last, 10, "it counts")
    assert not (here / "stale").exists() or (here / "stale").read_text() != "committed"
    calm.ctl("stop", "commits")
    calm.until_phase("commits", "stopped")


def written(path: Path) -> bool:
    return path.exists() and bool(path.read_text())
