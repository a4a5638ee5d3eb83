"""Somebody who can write to Redis, and to nothing else: no command of theirs is run by any node, and a job that was
submitted properly does not notice."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2

QUEUED = (
    "version",
    "uid",
    "name",
    "owner",
    "spec",
    "admission",
    "min",
    "max",
    "control",
    "submitted",
    "since",
    "order",
)
"""Fields of a job's record as a submit leaves it, but for those that are the same for all."""
SETTLED = 5.0
"""Seconds in which a job that may run has long been started: its check, its command, and many heartbeats."""

Record = dict[str, str]

WRITE = """
local job, names, meta, changes, events = unpack(KEYS)
local uid, name = ARGV[1], ARGV[2]
redis.call('DEL', job)
redis.call('HSET', job, unpack(ARGV, 3))
redis.call('HSET', names, name, uid)
local rev = redis.call('HINCRBY', meta, 'rev', 1)
redis.call('HSET', job, 'rev', rev)
redis.call('ZADD', changes, rev, 'job:' .. uid)
redis.call('XADD', events, '*', 'kind', 'JobSubmitted', 'job', '', 'uid', uid, 'node', '', 'generation', '0', 'by', '',
    'text', 'written')
"""


class Intruder:
    """A client of the cluster's Redis, with every right there."""

    def __init__(self, world: Cluster) -> None:
        local = world.json("local", "status")
        config = yaml.safe_load(next(world.home.glob("local/data/*/n1/agent.yaml")).read_text())
        self.prefix = f"na:{{{config['cluster']}}}:"
        self.redis: Any = redis.Redis.from_url(local["redis"]["url"], decode_responses=True)

    def read(self, uid: str) -> Record:
        record: Record = self.redis.hgetall(f"{self.prefix}job:{uid}")
        assert record, f"job {uid} is not in Redis"
        return record

    def write(self, record: Record) -> None:
        """As the agents' own steps do it, all at once: every agent reads it with its next heartbeat."""
        uid = record["uid"]
        names = [self.prefix + name for name in (f"job:{uid}", "names", "meta", "changes", "events")]
        self.redis.eval(WRITE, len(names), *names, uid, record["name"], *chain.from_iterable(record.items()))


def as_queued(record: Record) -> Record:
    """The record with its generation, and everything that happened since the submit, reset."""
    fresh = {"phase": "queued", "reason": "submitted, waits for nodes", "restart_done": "0", "not_before": "0",
             "last_number": "0", "restarts": "0"}  # fmt: skip
    return {field: record[field] for field in QUEUED if field in record} | fresh


def with_spec(record: Record, **changes: Any) -> Record:
    spec = json.loads(record["spec"])
    spec["roles"][0] |= {key: changes.pop(key) for key in ("command", "nodes") if key in changes}
    spec |= changes
    size = spec["roles"][0]["nodes"]
    reported = {"name": spec["name"], "min": str(size["min"]), "max": str(size["max"])}
    return record | reported | {"spec": json.dumps(spec)}


def marker(world: Cluster, name: str) -> tuple[Path, list[str]]:
    """A file, and a command that adds a line to it and stays."""
    file = world.work / f"{name}.ran"
    return file, [sys.executable, "-c", f"open({str(file)!r}, 'a').write('ran\\n'); import time; time.sleep(600)"]


def until_ran(world: Cluster, file: Path, times: int) -> None:
    """That a worker is there does not mean that its script has begun."""
    world.until(lambda: file.exists() and file.read_text() == "ran\n" * times, 20, f"its script ran {times} times")


def submit(world: Cluster, name: str, command: list[str], **more: Any) -> dict[str, Any]:
    spec = {"name": name, "command": command, "nodes": 1, "workers_per_node": 1, "fork_server": "off", "grace": "1s"}
    world.submit(json.dumps(spec | more))
    return world.job(name)


def counted(world: Cluster, reason: str) -> dict[str, int]:
    """``nodeagent_refused_signatures_total`` of this reason, by node."""
    found = {}
    for node in world.ask("/v1/nodes")["items"]:
        with urllib.request.urlopen(node["http"] + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        name = f'nodeagent_refused_signatures_total{{reason="{reason}"}} '
        found[node["name"]] = sum(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))
    return found


def logged(world: Cluster, uid: str) -> list[tuple[str, str]]:
    """(node, reason) of each line in which an agent says that it does not run the job."""
    found = []
    for log in sorted(world.home.glob("local/data/*/*/agent.log")):
        for line in log.read_text().splitlines():
            if '"refused: this job is not run here"' in line and json.loads(line)["uid"] == uid:
                found.append((log.parent.name, json.loads(line)["reason"]))
    return found


@pytest.fixture(scope="module")
def intruder(shared: Cluster) -> Iterator[Intruder]:
    one = Intruder(shared)
    yield one
    one.redis.close()


@pytest.fixture(scope="module")
def healthy(shared: Cluster) -> Iterator[None]:
    """A job on both nodes, before and after: the same processes in the same generation."""
    _, command = marker(shared, "healthy")
    submit(shared, "healthy", command, nodes=2)
    before = shared.until_running("healthy", 2)
    yield
    after = shared.job("healthy")
    assert (after["phase"], after["generation"], after["restarts"]) == ("running", before["generation"], 0)
    assert after["pods"] == before["pods"]
    assert [n["starts"] for n in shared.json("local", "status")["nodes"]] == [1, 1]


def reason_of(world: Cluster, name: str) -> str:
    """As ``get`` shows it; empty for a job that is not known yet."""
    return next((str(job["reason"]) for job in world.ask("/v1/jobs")["items"] if job["name"] == name), "")


def check_refused(world: Cluster, name: str, reason: str, says: str, before: dict[str, int]) -> None:
    """Every node says once why it does not run it, counts it, and the tool shows it."""
    world.until(lambda: says in reason_of(world, name), 20, f"{name} is refused")
    time.sleep(SETTLED)
    uid = world.job(name)["uid"]
    assert logged(world, uid) == [("n1", reason), ("n2", reason)]
    assert counted(world, reason) == {node: count + 1 for node, count in before.items()}
    assert says in world.ctl("get", name, "-o", "wide").stdout
    assert says in world.ctl("describe", name).stdout
    assert world.workers(name) == {}


def test_without_a_signature(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    file, command = marker(shared, "unsigned")
    before = counted(shared, "unsigned")
    record = as_queued(intruder.read(shared.job("healthy")["uid"]))
    small = {"min": 1, "max": 1, "target": 1}
    forged = with_spec(record, name="unsigned", command=command, nodes=small, priority=100)
    forged |= {"uid": "0" * 32, "order": "99"}
    del forged["admission"]
    intruder.write(forged)
    check_refused(shared, "unsigned", "unsigned", "it has no signature", before)
    assert not file.exists()
    refused = shared.ctl("restart", "unsigned", check=6)
    assert "no signature" in refused.stderr
    shared.ctl("delete", "unsigned")
    shared.until(lambda: not intruder.redis.exists(f"{intruder.prefix}job:{forged['uid']}"), 20, "it is removed")


def test_with_the_signature_of_another_job(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    file, command = marker(shared, "borrowed")
    before = counted(shared, "changed")
    record = as_queued(intruder.read(shared.job("healthy")["uid"]))
    small = {"min": 1, "max": 1, "target": 1}
    forged = with_spec(record, name="borrowed", command=command, nodes=small) | {"uid": "1" * 32, "order": "98"}
    intruder.write(forged)
    check_refused(shared, "borrowed", "changed", "changed in the store", before)
    assert not file.exists()
    shared.ctl("delete", "borrowed")


def test_with_a_changed_command(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    """The job waits, properly signed, for a third node; then it wants one only, and another command."""
    file, command = marker(shared, "altered")
    uid = submit(shared, "altered", ["true"], nodes=3)["uid"]
    before = counted(shared, "changed")
    intruder.write(with_spec(intruder.read(uid), command=command, nodes={"min": 1, "max": 1, "target": 1}))
    check_refused(shared, "altered", "changed", "changed in the store", before)
    assert not file.exists()
    shared.ctl("delete", "altered")


def test_a_stolen_old_one(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    """It ended and was deleted; its record is written back as it was when it was new."""
    file, command = marker(shared, "stolen")
    uid = submit(shared, "stolen", command)["uid"]
    stolen = as_queued(intruder.read(uid))
    shared.until_running("stolen", 1)
    until_ran(shared, file, 1)
    shared.ctl("delete", "stolen", "--timeout", "60s")
    shared.until(lambda: not intruder.redis.exists(f"{intruder.prefix}job:{uid}"), 20, "it is deleted")
    before = counted(shared, "ended")
    intruder.write(stolen)
    check_refused(shared, "stolen", "ended", "this job has ended before", before)
    assert file.read_text() == "ran\n", "once, when it was its time"
    shared.ctl("delete", "stolen")


def test_one_that_has_ended_and_is_made_new_again(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    file, command = marker(shared, "kept")
    uid = submit(shared, "kept", command)["uid"]
    shared.until_running("kept", 1)
    until_ran(shared, file, 1)
    stolen = as_queued(intruder.read(uid))
    shared.ctl("stop", "kept", "--timeout", "60s")
    ledgers = [next(shared.home.glob(f"local/data/*/{node}/state/trust.json")) for node in ("n1", "n2")]
    shared.until(
        lambda: all("ended" in json.loads(f.read_text())["jobs"].get(uid, {}) for f in ledgers),
        10,
        "its end is written down",
    )
    intruder.write(stolen)
    shared.until(lambda: "ended before" in reason_of(shared, "kept"), 20, "refused")
    time.sleep(SETTLED)
    assert file.read_text() == "ran\n"
    assert logged(shared, uid) == [("n1", "ended"), ("n2", "ended")]
    shared.ctl("delete", "kept")


def test_one_that_was_stopped_and_whose_record_says_that_it_runs(
    shared: Cluster, intruder: Intruder, healthy: None
) -> None:
    """The record is whole, as it was while it ran: signatures, generation, acknowledgements. No node runs it, and
    nobody says that nothing is wrong with it."""
    file, command = marker(shared, "revived")
    uid = submit(shared, "revived", command)["uid"]
    shared.until_running("revived", 1)
    until_ran(shared, file, 1)
    running = intruder.read(uid)
    assert running["phase"] == "running"
    shared.ctl("stop", "revived", "--timeout", "60s")
    before = counted(shared, "ended")
    intruder.write(running)
    shared.until(lambda: "ended before" in reason_of(shared, "revived"), 20, "refused")
    time.sleep(SETTLED)
    assert logged(shared, uid) == [("n1", "ended"), ("n2", "ended")]
    assert counted(shared, "ended") == {node: count + 1 for node, count in before.items()}
    described = shared.ctl("describe", "revived").stdout
    assert "this job has ended before" in described
    assert described.splitlines()[-1].startswith("Next:        do what Why says"), "it said that nothing is wrong"
    assert file.read_text() == "ran\n"
    shared.ctl("delete", "revived", "--timeout", "60s")
    shared.until(lambda: not intruder.redis.exists(f"{intruder.prefix}job:{uid}"), 20, "it is removed")


def test_a_changed_request(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    """A paused job is made to run, to be three times as large, and to restart, by nobody who may."""
    file, command = marker(shared, "paused")
    uid = submit(shared, "paused", command)["uid"]
    shared.until_running("paused", 1)
    until_ran(shared, file, 1)
    shared.ctl("pause", "paused", "--timeout", "60s")
    before = counted(shared, "control")
    record = intruder.read(uid)
    control = json.loads(record["control"]) | {"desired": "run", "restart": 1}
    control["rev"] += 1
    intruder.write(record | {"control": json.dumps(control)})
    check_refused(shared, "paused", "control", "not through an agent", before)
    assert shared.job("paused")["phase"] == "paused"
    assert file.read_text() == "ran\n"
    shared.ctl("resume", "paused")
    shared.until_running("paused", 1)
    until_ran(shared, file, 2)  # an operator said it anew
    shared.ctl("delete", "paused", "--timeout", "60s")


def test_a_record_that_nobody_can_read(shared: Cluster, intruder: Intruder, healthy: None) -> None:
    """What it runs goes on, everybody else too, and once it is mended all is as before."""
    file, command = marker(shared, "garbled")
    uid = submit(shared, "garbled", command)["uid"]
    shared.until_running("garbled", 1)
    workers, before = shared.workers("garbled"), counted(shared, "unreadable")
    record = intruder.read(uid)
    intruder.write(record | {"mood": "good"})
    shared.until(lambda: "cannot be read" in reason_of(shared, "garbled"), 20, "it is told")
    time.sleep(SETTLED)
    assert logged(shared, uid) == [("n1", "unreadable"), ("n2", "unreadable")]
    assert counted(shared, "unreadable") == {node: count + 1 for node, count in before.items()}
    assert shared.workers("garbled") == workers
    intruder.redis.hdel(f"{intruder.prefix}job:{uid}", "mood")
    intruder.write(intruder.read(uid))
    shared.until(lambda: "cannot be read" not in reason_of(shared, "garbled"), 20, "it is read again")
    assert shared.workers("garbled") == workers
    assert file.read_text() == "ran\n"
    shared.ctl("delete", "garbled", "--timeout", "60s")
