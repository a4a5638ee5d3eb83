"""Several roles as one gang: parameter servers and trainers, killed and started again, come to the weights of an
undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

from nodeagent.osutil.linux import is_running
from tests.e2e.roles import CACHES, PLACES, WORK, newest, pids, result, roles_job, submit_caches
from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 3


def test_a_trainer_and_a_server_are_killed(shared: Cluster) -> None:
    steps = 120  # long enough to be looked at between the kills
    shared.submit(roles_job(shared.work, "calm", pause=0.0, steps=steps))
    shared.until_phase("calm", "succeeded", 60)
    shared.submit(roles_job(shared.work, "killed", pause=0.2, steps=steps))
    job = shared.until_running("killed", NODES)
    for kills, place in enumerate(("trainer.1", "pserver.0"), start=1):
        before = newest(shared.work, "killed")
        shared.until(lambda before=before: newest(shared.work, "killed") > before + 5, 30, "it trains")  # type: ignore[misc]
        shared.until(lambda: sorted(pids(shared, "killed")) == PLACES, 10, "all places are seen to run")
        os.kill(pids(shared, "killed")[place], signal.SIGKILL)
        job = shared.until_running("killed", NODES, above=job["generation"])
        assert (job["restarts"], job["budget"]["used"], job["cause"]["kind"]) == (kills, kills, "worker_failed")
    described = shared.ctl("describe", "killed").stdout
    assert "pserver: 2 places" in described and "trainer.1" in described
    job = shared.until_phase("killed", "succeeded", 60)
    assert job["reason"] == f"every worker of role trainer of generation {job['generation']} exited 0"
    assert result(shared.work, "killed") == result(shared.work, "calm")
    lines = shared.ctl("logs", "killed").stdout.splitlines()
    assert {line.partition("<")[0] for line in lines} == {f"[{place}]" for place in PLACES}
    shared.until(lambda: not pids(shared, "killed"), 15, "the servers were stopped")


def test_a_service_restarts_alone_until_the_budget_is_spent(shared: Cluster) -> None:
    folder = submit_caches(
        shared,
        "service",
        job="completes: work\nrestarts: {max: 4, window: 1h}",
        cache="ready: {port: true}, restart: alone",
        work="after: cache",
    )
    before = pids(shared, "service")
    os.kill(before["cache.1"], signal.SIGKILL)
    again = lambda: pids(shared, "service").get("cache.1") not in (None, before["cache.1"])  # noqa: E731
    shared.until(again, 20, "it is started again")
    shared.until(lambda: shared.job("service")["budget"]["used"] == 1, 10, "it has cost a restart")
    job, now = shared.job("service"), pids(shared, "service")
    assert (job["generation"], job["restarts"], job["phase"]) == (1, 0, "running")
    assert {name: now[name] for name in CACHES if name != "cache.1"} == {
        name: before[name] for name in CACHES if name != "cache.1"
    }, "the others saw nothing"
    described = shared.ctl("describe", "service").stdout
    assert "restarts alone" in described and "failed: SIGKILL (9) on" in described
    assert len(shared.happened("WorkerRestarted", "service")) == 1
    (folder / "broken0").touch()
    job = shared.until_phase("service", "failed", 60)
    assert "restart budget spent: 4 restarts within 3600 s; last: " in job["reason"]
    shared.until(lambda: not pids(shared, "service"), 15, "all are stopped")


RING = """
import os, socket, struct, sys, time
from pathlib import Path
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
notices = os.environ["NODEAGENT_ROLE_INDEX"] != "2"
Path(f"begun.{os.getpid()}").touch()
if rank == 0:
    server, peers = socket.create_server(at), {}
    while len(peers) < world - 1:
        peer, _ = server.accept()
        peers[struct.unpack("!i", peer.recv(4, socket.MSG_WAITALL))[0]] = peer
    run = os.getpid()
    for peer in peers.values(): peer.sendall(struct.pack("!i", run))
else:
    while True:  # rank 0 may not listen yet
        try: peer = socket.create_connection(at)
        except ConnectionRefusedError: time.sleep(0.02)
        else: break
    peer.sendall(struct.pack("!i", rank))
    data = peer.recv(4, socket.MSG_WAITALL)
    if len(data) < 4: sys.exit(3)
    run, peers = struct.unpack("!i", data)[0], {0: peer}
Path(f"{run}.{rank}.{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
print(f"meets in {run}", flush=True)
for peer in peers.values(): peer.setblocking(False)
while not Path("enough").exists():
    for peer in peers.values():
        try: gone = peer.recv(1) == b""
        except BlockingIOError: gone = False
        except ConnectionResetError: gone = True
        if gone and notices: sys.exit(1)  # as a collective fails when a peer is gone
    time.sleep(0.05)
"""


def test_a_role_is_started_again_whole_on_all_its_nodes(shared: Cluster) -> None:
    """Its workers need each other: those that notice fail when one is killed. Last, a node's agent is stuck just then,
    and its workers notice nothing."""
    folder = shared.work / "ring"
    folder.mkdir()
    (folder / "ring.py").write_text(RING)
    (folder / "work.py").write_text(WORK)
    python = json.dumps(sys.executable)
    shared.submit(f"""
name: ring
working_dir: {folder}
completes: work
roles:
  work: {{command: [{python}, work.py], nodes: 2, workers_per_node: 1, gpus_per_worker: 0}}
  ring: {{command: [{python}, ring.py], nodes: 3, workers_per_node: 2, gpus_per_worker: 0,
    policies: [{{on: WorkerFailed, do: RestartTask}}]}}
""")

    def runs() -> dict[str, set[str]]:
        """The ranks that have met, by run."""
        found: dict[str, set[str]] = {}
        for path in folder.glob("*.*.*"):
            run, rank, _ = path.name.split(".")
            found.setdefault(run, set()).add(rank)
        return found

    def whole() -> int:
        return sum(len(ranks) == 6 for ranks in runs().values())

    def workers() -> dict[int, int]:
        pods = shared.job("ring")["pods"]
        return {w["rank"]: w["pid"] for p in pods for w in p["workers"] if w["state"] == "running"}

    def seen() -> bool:
        return len(found := workers()) == 8 and all(map(is_running, found.values()))

    shared.until(lambda: whole() == 1 and seen(), 60, "all of it meets")
    before, calm = workers(), pids(shared, "ring")
    for times, victim in enumerate(("ring.2", "ring.0"), start=1):
        os.kill(pids(shared, "ring")[victim], signal.SIGKILL)
        shared.until(lambda times=times: whole() == times + 1 and seen(), 30, "it meets again")  # type: ignore[misc]
    after, job = workers(), shared.job("ring")
    assert all(len(ranks) == 6 for ranks in runs().values()), "nobody has met one of another run"
    assert (job["generation"], job["restarts"], job["phase"]) == (1, 0, "running")
    kept = {rank for rank in before if before[rank] == after[rank]}
    assert {before[rank] for rank in kept} == {calm["work.0"], calm["work.1"]}, "the others saw nothing"
    assert job["budget"]["used"] == 2, "who fails for another's failure costs nothing more"
    assert len(shared.happened("RoleStopped", "ring")) == 2 * NODES

    node = next(p["node"] for p in job["pods"] for w in p["workers"] if w["place"] == "ring.2")
    agent, late = shared.node(node)["agent_pid"], pids(shared, "ring")["ring.2"]
    begun = len(list(folder.glob("begun.*")))
    shared.frozen.add(node)
    os.kill(agent, signal.SIGSTOP)
    try:
        os.kill(pids(shared, "ring")["ring.0"], signal.SIGKILL)
        down = 2 * NODES + NODES - 1
        shared.until(lambda: len(shared.happened("RoleStopped", "ring")) == down, 20, "it is down on two nodes")
        time.sleep(0.5)
        assert is_running(late) and len(list(folder.glob("begun.*"))) == begun, "one of it still lives: nobody starts"
    finally:
        os.kill(agent, signal.SIGCONT)
        shared.frozen.discard(node)
    shared.until(lambda: whole() == 4 and seen(), 30, "it meets again")
    assert not is_running(late) and shared.job("ring")["generation"] == 1
    (folder / "enough").touch()
    shared.until_phase("ring", "succeeded", 30)


def test_a_role_is_scaled_while_the_job_runs(shared: Cluster) -> None:
    shared.submit(roles_job(shared.work, "scaled", pause=0.2, steps=1000))
    first = shared.until_running("scaled", NODES)["generation"]
    shared.until(lambda: newest(shared.work, "scaled") > 3, 30, "it trains")
    assert "did you mean 'trainer'?" in shared.ctl("scale", "scaled", "triner=3", check=6).stderr
    refused = shared.ctl("scale", "scaled", "3", check=6).stderr
    assert "has several roles (pserver 2, trainer 2)" in refused and "scale scaled trainer=3" in refused
    late = shared.ctl("scale", "scaled", "trainer=4", "--timeout", "2s", check=4).stderr
    assert "scale of trainer to 4 timed out after 2s: no node has room for trainer.3" in late
    before, kept = newest(shared.work, "scaled"), pids(shared, "scaled")
    assert sorted(kept) == PLACES, "it was not disturbed"
    done = shared.ctl("scale", "scaled", "trainer=3").stdout
    assert done == "job/scaled scaled: trains with 3 places of trainer on 3 nodes\n"
    assert "pserver 2/2, trainer 3/3" in shared.ctl("get", "scaled", "-o", "wide").stdout
    assert "trainer: 3 places, each on a node of its own" in shared.ctl("describe", "scaled").stdout
    shared.until(lambda: sorted(pids(shared, "scaled")) == [*PLACES, "trainer.2"], 10, "all of them run")
    shared.until(lambda: newest(shared.work, "scaled") > before + 3, 30, "the third trains along")
    assert "trains with 1 place of trainer on " in shared.ctl("scale", "trainer=1", "--job", "scaled").stdout
    job = shared.job("scaled")
    assert (job["target"], job["budget"]["used"], job["cause"]["kind"], job["generation"]) == (3, 0, "scale", first + 2)
    shared.until(lambda: newest(shared.work, "scaled") > before + 6, 30, "one trains on")
    shared.ctl("stop", "scaled")


def test_a_node_is_drained(shared: Cluster) -> None:
    """Its places move, the gang starts again where it was, and the weights are those of an undisturbed run."""
    shared.at_rest()
    shared.submit(roles_job(shared.work, "quiet", pause=0.0))
    shared.until_phase("quiet", "succeeded", 60)
    shared.submit(roles_job(shared.work, "drained", pause=0.2))
    first = shared.until_running("drained", NODES)["generation"]
    shared.until(lambda: newest(shared.work, "drained") > 5, 30, "it trains")
    leaves = next(
        p["node"] for p in shared.job("drained")["pods"] if any(w["place"] == "trainer.1" for w in p["workers"])
    )
    shared.ctl("drain", leaves, "--reason", "a fan", "--timeout", "60s")
    job = shared.until_running("drained", NODES - 1, above=first)
    assert (job["restarts"], job["budget"]["used"], job["cause"]["kind"]) == (1, 0, "drain")
    shared.until(lambda: sorted(pids(shared, "drained")) == PLACES, 10, "all places are on the other nodes")
    assert leaves not in [p["node"] for p in shared.job("drained")["pods"]]
    shared.until_phase("drained", "succeeded", 60)
    assert result(shared.work, "drained") == result(shared.work, "quiet")
    shared.ctl("uncordon", leaves)


def test_an_elastic_role_shrinks_when_a_node_dies_and_grows_when_it_is_back(shared: Cluster) -> None:
    """The servers stay where they are; the trainers go on with two of three, and with three again."""
    shared.at_rest()
    shared.submit(roles_job(shared.work, "elastic", pause=0.2, steps=1000).replace("nodes: 2,", "nodes: 2:3,"))
    all_three = [*PLACES, "trainer.2"]
    shared.until(lambda: sorted(pids(shared, "elastic")) == all_three, 60, "all places run")
    where = {w["place"]: p["node"] for p in shared.job("elastic")["pods"] for w in p["workers"]}
    servers = {name: node for name, node in where.items() if name.startswith("pserver")}
    lost = next(node for node in where.values() if node not in servers.values())
    before = newest(shared.work, "elastic")
    shared.ctl("local", "kill", lost)
    shared.until(lambda: sorted(pids(shared, "elastic")) == PLACES, 30, "it goes on with two trainers")
    job = shared.job("elastic")
    assert (job["budget"]["used"], job["cause"]["kind"], job["target"]) == (0, "node_lost", 5)
    now = {w["place"]: p["node"] for p in job["pods"] for w in p["workers"]}
    assert {name: now[name] for name in servers} == servers
    assert any("runs with 2 of 3 places of trainer: " in why for why in job["why"]), job["why"]
    assert "trainer: 3 places, at least 2, each on a node of its own" in shared.ctl("describe", "elastic").stdout
    shared.until(lambda: newest(shared.work, "elastic") > before + 5, 30, "two train")
    assert "2 to 3 are allowed by its file" in shared.ctl("scale", "elastic", "trainer=4", check=6).stderr
    shared.ctl("local", "start", lost)
    shared.until(lambda: sorted(pids(shared, "elastic")) == all_three, 90, "it has grown again")
    job, before = shared.job("elastic"), newest(shared.work, "elastic")
    assert (job["budget"]["used"], job["cause"]["kind"]) == (0, "join")
    shared.until(lambda: newest(shared.work, "elastic") > before + 3, 30, "three train")
    shared.ctl("stop", "elastic")
