"""All nodes and Redis lose power at once, and Redis its data: what was acknowledged is on disks, and comes back."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.support import ROOT, Cluster
from tests.e2e.test_faults_nodes import at_once
from tests.e2e.test_lost_store import killed_without_its_data, redis_of, until_restored

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 3
WORKER = """
import os, time
from pathlib import Path
from nodeagent.train import Link, context
here, place, link = Path({here!r}), context(), Link.of_environment()
if place.rank == 0:
    draft = here / "draft"
    draft.write_text(os.environ.get("NODEAGENT_CHECKPOINT", ""))
    draft.rename(here / f"given-g{{place.generation}}")
    link.ask("commit", 20, name=f"saved-g{{place.generation}}", step=place.generation, order=1)
time.sleep(600)
"""


def committed(calm: Cluster, generation: int) -> None:
    name = f"saved-g{generation}"
    calm.until(lambda: (calm.job("dark")["checkpoint"] or {}).get("name") == name, 30, f"{name} is committed")


def test_everything_loses_power_and_nothing_is_lost(calm: Cluster) -> None:
    here = calm.work / "dark"
    here.mkdir()
    script = here / "w.py"
    script.write_text(WORKER.format(here=str(here)))
    # It never begins with one of them, so the first generation after the cut is the one that goes on from the commit.
    calm.submit(
        f"name: dark\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: {{min: 2, max: 3, target: 2}}\n"
        f"workers_per_node: 1\ncheckpoint_dir: {calm.work / 'dark.ckpt'}\n"
        f"env: {{PYTHONPATH: {json.dumps(str(ROOT))}}}\n"
    )
    first = calm.until_running("dark", 2)
    calm.ctl("restart", "dark")
    before = calm.until_running("dark", 2, above=first["generation"])
    committed(calm, before["generation"])
    calm.ctl("cordon", "n3", "--reason", "a fan")

    names = sorted(calm.nodes())
    at_once(calm, "kill", names)
    killed_without_its_data(calm)
    at_once(calm, "start", names)
    after = calm.until_running("dark", 2, above=before["generation"], limit=90)
    assert (after["uid"], after["budget"]["used"]) == (before["uid"], 0)
    assert calm.node("n3")["state"] == "cordoned"
    given = here / f"given-g{after['generation']}"
    calm.until(given.exists, 30, "the new generation runs")
    assert given.read_text() == f"saved-g{before['generation']}"
    committed(calm, after["generation"])

    calm.ctl("uncordon", "n3")
    known = redis_of(calm)
    calm.ctl("scale", "3", "--job", "dark", "--no-wait")
    killed_without_its_data(calm, known=known)  # a moment after the answer
    until_restored(calm)
    grown = calm.until_running("dark", 3, above=after["generation"], limit=90)
    assert (grown["target"], grown["uid"]) == (3, before["uid"])
