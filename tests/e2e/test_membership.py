"""Nodes that are missing, join, return and are drained; jobs that are scaled, paused and restarted while they train."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.support import Cluster, check_complete, check_steps, check_undisturbed, digits_job, is_alive, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 2
COOLDOWN = 5.0
"""Seconds; what ``nodeagentctl local`` tells its agents."""


def on(job: dict[str, Any]) -> list[str]:
    """The nodes that run workers of the newest generation, by rank."""
    running = [p for p in job["pods"] if p["generation"] == job["generation"]]
    return [p["node"] for p in running if any(w["state"] == "running" for w in p["workers"])]


def test_a_job_that_wants_more_nodes_than_there_are(calm: Cluster, reference: dict[int, float]) -> None:
    size = len(calm.nodes())
    calm.submit(digits_job(calm.work, "many", nodes=str(size + 1), steps=40, workers=1))
    missing = f"needs {size + 1} nodes, and only {size} are known"
    calm.until(lambda: missing in " ".join(calm.job("many")["why"]), 60, f"it says {missing!r}")
    assert calm.job("many")["phase"] == "queued"
    described = calm.ctl("describe", "many").stdout
    assert missing in described
    assert f"start more nodes: it needs {size + 1}, and of all nodes {size} live" in described
    assert calm.workers("many") == {}
    calm.ctl("local", "add")
    calm.until_running("many", size + 1)
    calm.until_phase("many", "succeeded", 90)
    rows = read_steps(calm.work, "many")
    check_undisturbed(rows)
    check_steps(rows, reference)
    check_complete(rows, 40)


def test_a_node_that_joins_or_returns_while_the_job_is_full_disturbs_nothing(
    calm: Cluster, reference: dict[int, float]
) -> None:
    calm.submit(digits_job(calm.work, "full", nodes="2", steps=600, delay=0.2, workers=1))
    before = calm.until_running("full", 2)
    workers = calm.until_workers("full", 2)
    for other in sorted(set(calm.nodes()) - set(on(before))):
        calm.ctl("local", "kill", other)
    calm.until_steps("full", 5)
    added = calm.ctl("local", "add").stdout.strip().removeprefix("node/")

    def spare(node: str) -> bool:
        return any((p["node"], p["phase"]) == (node, "ready") for p in calm.job("full")["spares"])

    calm.until(lambda: spare(added), 60, f"{added} is a spare")
    calm.ctl("local", "kill", added)
    calm.until(lambda: calm.nodes()[added] != "ready", 20, f"{added} is gone")
    calm.ctl("local", "start", added)
    calm.until(lambda: spare(added), 60, f"{added} is a spare again")
    calm.until_steps("full", 5)
    assert calm.workers("full") == workers
    job = calm.job("full")
    assert (job["phase"], job["generation"], job["restarts"]) == ("running", before["generation"], 0)
    calm.ctl("stop", "full", "--timeout", "60s")
    rows = read_steps(calm.work, "full")
    check_undisturbed(rows)
    check_steps(rows, reference)


def test_a_node_that_joins_below_the_target(calm: Cluster, reference: dict[int, float]) -> None:
    size = len(calm.nodes())
    calm.submit(digits_job(calm.work, "below", nodes=f"'2:{size + 1}'", steps=600, delay=0.2, workers=1))
    first = calm.until_running("below", size)["generation"]  # 2 where a node was ready later than the others
    calm.until_steps("below", 5)
    assert f"runs on {size} of {size + 1} nodes" in calm.ctl("describe", "below").stdout
    added = calm.ctl("local", "add").stdout.strip().removeprefix("node/")
    job = calm.until_running("below", size + 1, above=first)
    assert (job["generation"], job["cause"]["kind"], job["budget"]["used"]) == (first + 1, "join", 0)
    assert on(job)[-1] == added, "survivors keep their ranks"
    waited = calm.happened("GenerationForming", "below")[-1] - calm.happened("NodeJoined", added)[-1]
    assert waited >= COOLDOWN, "the newcomer has been steady for the cool-down"
    calm.until_steps("below", 5)
    calm.ctl("stop", "below", "--timeout", "60s")
    check_steps(read_steps(calm.work, "below"), reference)


def test_scale_up_and_down_while_training(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "scaled", nodes="{min: 1, max: 2, target: 1}", steps=600, delay=0.1))
    calm.until_running("scaled", 1)
    calm.until_steps("scaled", 10)
    calm.ctl("scale", "scaled", "2", "--timeout", "60s")
    job = calm.until_running("scaled", 2, above=1)
    assert (job["target"], job["generation"], job["cause"]["kind"]) == (2, 2, "scale")
    calm.until_steps("scaled", 10)
    first = on(job)[0]
    calm.ctl("scale", "scaled", "1", "--timeout", "60s")
    job = calm.until_running("scaled", 1, above=2)
    assert (job["generation"], on(job), job["budget"]["used"]) == (3, [first], 0)
    calm.until_steps("scaled", 10)
    calm.ctl("stop", "scaled", "--timeout", "60s")
    rows = read_steps(calm.work, "scaled")
    assert {r["generation"]: r["world"] for r in rows} == {1: 2, 2: 4, 3: 2}
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))


@pytest.mark.endurance  # with the helper, test_graceful.py does the same
def test_pause_resume_and_restart_keep_the_steps(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "paused", nodes="2", steps=80, workers=1))
    calm.until_running("paused", 2)
    calm.until_steps("paused", 15)
    workers = calm.workers("paused")
    standbys = {p["node"]: p["fork_server_pid"] for p in calm.job("paused")["pods"]}
    calm.ctl("pause", "paused", "--timeout", "60s")
    assert calm.job("paused")["phase"] == "paused"
    assert not any(is_alive(p) for p in workers.values())
    made = len(read_steps(calm.work, "paused"))
    calm.ctl("resume", "paused", "--timeout", "60s")
    calm.until_running("paused", 2, above=1)
    calm.until_steps("paused", 10)
    again = calm.job("paused")["pods"]
    assert {p["node"]: p["fork_server_pid"] for p in again} == standbys, "kept warm, so that nothing is imported anew"
    second = calm.workers("paused")
    calm.ctl("restart", "paused", "--timeout", "60s")
    assert not any(is_alive(p) for p in second.values())
    job = calm.until_phase("paused", "succeeded", 90)
    assert (job["generation"], job["budget"]["used"]) == (3, 0)
    rows = read_steps(calm.work, "paused")
    check_steps(rows, reference)
    check_complete(rows, 80)
    assert max(r["generation"] for r in rows[:made]) == 1
    for generation in (1, 2):
        last = max(r["step"] for r in rows if r["generation"] == generation)
        first = min(r["step"] for r in rows if r["generation"] == generation + 1)
        assert last - 5 < first <= last + 1, "it goes on from the newest checkpoint"


def test_drain_moves_the_work(calm: Cluster, reference: dict[int, float]) -> None:
    if len(calm.nodes()) < 3:
        calm.ctl("local", "add")
    calm.submit(digits_job(calm.work, "drained", nodes="2", steps=600, delay=0.1))
    before = calm.until_running("drained", 2)
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job("drained")["spares"]), 60, "a spare is ready")
    calm.until_steps("drained", 10)
    leaves, stays = on(before)
    calm.until_workers("drained", 4)
    old = calm.workers("drained", leaves)
    calm.ctl("drain", leaves, "--reason", "a fan", "--timeout", "60s")
    assert not any(is_alive(p) for p in old.values())
    job = calm.until_running("drained", 2, above=before["generation"])
    assert leaves not in on(job)
    assert stays in on(job)
    assert (job["restarts"], job["cause"]["kind"], job["budget"]["used"]) == (1, "drain", 0)
    node = calm.node(leaves)
    assert (node["state"], node["pods"]) == ("drained", [])
    assert "a fan" in node["reason"]
    calm.until_steps("drained", 10)
    calm.ctl("stop", "drained", "--timeout", "60s")
    rows = read_steps(calm.work, "drained")
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))
