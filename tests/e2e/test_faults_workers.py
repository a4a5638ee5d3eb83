"""Faults of workers and shims: the training recovers with the losses of an undisturbed run, each fault is counted once,
and what cannot recover ends with its reason."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.e2e import lockstep
from tests.e2e.stubborn import STUBBORN, outlived
from tests.e2e.support import (
    DIGITS,
    Cluster,
    check_complete,
    check_steps,
    digits_job,
    is_alive,
    lockstep_job,
    read_steps,
)

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3


def test_each_kill_of_a_worker_is_counted_once(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "killed", nodes="2", steps=600))
    job = calm.until_running("killed", 2)
    for kills, rank in enumerate((0, 3, 1), start=1):  # rank 0, another node's, rank 0's neighbour
        calm.until_steps("killed", 6)
        victim = calm.until_workers("killed", 4)[rank]
        node = next(p["node"] for p in calm.job("killed")["pods"] if any(w["rank"] == rank for w in p["workers"]))
        os.kill(victim, signal.SIGKILL)
        job = calm.until_running("killed", 2, above=job["generation"])
        assert (job["restarts"], job["budget"]["used"]) == (kills, kills)
        assert (job["cause"]["kind"], job["cause"]["node"], job["cause"]["rank"]) == ("worker_failed", node, rank)
        calm.until(lambda k=kills: calm.restarts_counted("killed") == k, 10, f"{kills} restarts are counted")  # type: ignore[misc]
    calm.until_steps("killed", 6)
    calm.ctl("stop", "killed", "--timeout", "60s")
    assert calm.restarts_counted("killed") == 3
    rows = read_steps(calm.work, "killed")
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))


def test_shim_killed(calm: Cluster) -> None:
    calm.submit(lockstep_job(calm.work, "shim", nodes="2"))
    before = calm.until_running("shim", 2)
    calm.until_steps("shim", 6)
    node = before["pods"][1]["node"]
    calm.until_workers("shim", 4)
    workers = calm.workers("shim", node)
    assert len(workers) == 2
    os.kill(before["pods"][1]["shim_pid"], signal.SIGKILL)
    calm.until(lambda: not any(is_alive(p) for p in workers.values()), 10, "the shim's workers died with it")
    job = calm.until_running("shim", 2, above=before["generation"])
    # A new pod may take longer to get ready than a generation may take to form: then it is tried again, at no cost.
    assert (job["restarts"], job["budget"]["used"]) == (1, 1)
    # The peers' workers fail at once, and may be reported first: then the verdict comes with the shim's own node.
    calm.until(lambda: calm.job("shim")["cause"]["kind"] == "pod_failed", 10, "the shim's end is the cause")
    assert calm.job("shim")["cause"]["node"] == node
    calm.until_steps("shim", 6)
    calm.ctl("stop", "shim", "--timeout", "60s")
    assert calm.restarts_counted("shim") == 1
    rows = read_steps(calm.work, "shim")
    check_steps(rows, lockstep.losses())
    check_complete(rows, max(row["step"] for row in rows))


REFORM_ME = """
import os, runpy, threading
if os.environ["RANK"] == "2":
    def look():
        while not os.path.exists({gate!r}):
            threading.Event().wait(0.05)
        os.unlink({gate!r})  # once
        os._exit(101)
    threading.Thread(target=look, daemon=True).start()
runpy.run_path({digits!r}, run_name="__main__")
"""


def test_exit_code_101_is_re_formed_and_costs_nothing(calm: Cluster, reference: dict[int, float]) -> None:
    gate, script = calm.work / "gate", calm.work / "reform.py"
    script.write_text(REFORM_ME.format(gate=str(gate), digits=str(DIGITS)))
    calm.submit(digits_job(calm.work, "reform", nodes="2", steps=600, script=script))
    first = calm.until_running("reform", 2)["generation"]
    calm.until_steps("reform", 6)
    gate.touch()
    job = calm.until_running("reform", 2, above=first)
    assert (job["restarts"], job["cause"]["kind"], job["cause"]["rank"]) == (1, "reform", 2)
    calm.until_steps("reform", 6)
    calm.ctl("stop", "reform", "--timeout", "60s")
    assert calm.job("reform")["budget"]["used"] == 0
    rows = read_steps(calm.work, "reform")
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))


FAILS_LATER = """
import os, sys, threading, time
print("working", flush=True)
time.sleep(0.5)
if os.environ["RANK"] == "1":
    raise ValueError("batch " + os.environ["NODEAGENT_GENERATION"] + " is bad")
time.sleep(600)
"""


def test_a_script_that_fails_again_and_again_spends_its_budget(calm: Cluster) -> None:
    script = calm.work / "later.py"
    script.write_text(FAILS_LATER)
    # The policy: otherwise an error within 30 s of the first start fails the job at once.
    calm.submit(
        f"name: later\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: 2\nworkers_per_node: 1\n"
        "restarts: {max: 2}\npolicies:\n  - {on: WorkerFailed, do: RestartJob}\n"
    )
    job = calm.until_phase("later", "failed", 90)
    assert (job["generation"], job["restarts"], job["outcome"]["code"]) == (3, 2, 1)
    assert "restart budget spent: 2 restarts" in job["reason"]
    blamed = [g["ended_by"]["text"].partition(" failed")[0] for g in job["generations"]]
    assert len(blamed) == 3
    assert len(set(blamed)) == 1, "ranks keep their nodes"
    assert blamed[0].startswith("rank 1 on n")
    output = calm.ctl("describe", "later").stdout
    assert "restart budget spent" in output
    assert "Traceback (most recent call last)" in output
    assert "ValueError: batch 3 is bad" in output
    assert "logs later" in output, "where to read on"
    assert calm.workers("later") == {}


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(calm: Cluster) -> None:
    folder, script = calm.work / "stubborn", calm.work / "stubborn.py"
    folder.mkdir()
    script.write_text(STUBBORN.format(folder=str(folder)))
    calm.submit(
        f"name: stubborn\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: '1:2'\nworkers_per_node: 1\n"
        "grace: 5s\n"
    )
    whole = calm.until_running("stubborn", 2)["generation"]
    calm.until(lambda: len(list(folder.glob(f"*.{whole}"))) == 2, 20, "both beat")
    first = calm.until_workers("stubborn", 2)
    calm.ctl("scale", "stubborn", "1")
    assert not any(is_alive(pid) for pid in first.values())
    for rank in (0, 1):
        assert outlived(folder / f"rank{rank}.{whole}") > 2, "the grace is its own"
    alone = calm.until_running("stubborn", 1, above=whole)["generation"]
    calm.until((folder / f"rank0.{alone}").exists, 20, "the second generation beats")
    second = calm.until_workers("stubborn", 1)
    assert list(second) == [0]
    calm.ctl("stop", "stubborn", "--timeout", "60s")
    assert calm.job("stubborn")["phase"] == "stopped"
    assert not is_alive(second[0])
    assert outlived(folder / f"rank0.{alone}") > 2
