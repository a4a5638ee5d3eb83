"""The store goes away under healthy training, and comes back: the same pids, the same generation, not one step lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis

from tests.e2e import lockstep
from tests.e2e.support import (
    Cluster,
    check_complete,
    check_steps,
    check_undisturbed,
    is_alive,
    lockstep_job,
    read_steps,
)
from tests.e2e.test_lost_store import killed_without_its_data, redis_of

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3
AWAY = 10.0
"""Seconds: several leases."""
REFUSING = 5.0
"""Seconds: more than a lease and a promise's rest."""


def redis_pid(calm: Cluster) -> int:
    return int(calm.json("local", "status")["redis"]["pid"])


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed
            os.kill(pid, signal.SIGCONT)


def trains(calm: Cluster, name: str, nodes: str = "2") -> tuple[dict[str, Any], dict[int, int]]:
    """A training on two nodes that outlasts all that a test does: the job, and its workers."""
    calm.submit(lockstep_job(calm.work, name, nodes=nodes, delay=0.15))
    job = calm.until_running(name, 2)
    calm.until_steps(name, 10)
    return job, calm.until_workers(name, 4)


def undisturbed(calm: Cluster, before: dict[str, Any], workers: dict[int, int]) -> None:
    """It goes on as if nothing had happened, until it is stopped."""
    name = before["name"]
    calm.until_steps(name, 10)
    calm.until(lambda: calm.workers(name) == workers, 20, "every pod is published again")
    stop = ("stop", name, "--timeout", "60s")
    calm.until(lambda: calm.ctl(*stop, check=None).returncode == 0, 30, "a recovery is over, and it takes a stop")
    job = calm.job(name)
    assert (job["phase"], job["generation"], job["restarts"]) == ("stopped", before["generation"], 0)
    assert job["budget"]["used"] == 0
    rows = read_steps(calm.work, name)
    check_undisturbed(rows)
    check_steps(rows, lockstep.losses())


def test_redis_frozen_and_thawed(calm: Cluster) -> None:
    before, workers = trains(calm, "froze")
    with frozen(redis_pid(calm)):
        time.sleep(AWAY)
    undisturbed(calm, before, workers)


def test_redis_killed_and_back_with_its_data(calm: Cluster) -> None:
    before, workers = trains(calm, "died")
    pid = redis_pid(calm)
    os.kill(pid, signal.SIGKILL)
    calm.until(lambda: calm.json("local", "status")["redis"]["pid"] not in (None, pid), 20, "redis is started again")
    undisturbed(calm, before, workers)


@pytest.mark.parametrize("emptied", [False, True])
def test_all_agents_are_killed_and_started_again_while_redis_is_frozen(calm: Cluster, emptied: bool) -> None:
    """Their lease processes go on asking and answering; and nothing is disturbed if Redis comes back empty."""
    name = f"agents-{'empty' if emptied else 'back'}"
    before, workers = trains(calm, name)
    redis_was = redis_of(calm)
    agents = {node: int(calm.node(node)["agent_pid"]) for node in calm.nodes()}
    lives = {node: calm.node(node)["incarnation"]["life"] for node in calm.nodes()}
    with frozen(redis_was[0]):
        time.sleep(2.0)
        for pid in agents.values():
            os.kill(pid, signal.SIGKILL)
        time.sleep(AWAY)
        assert not any(is_alive(pid) for pid in agents.values())
        done = len(read_steps(calm.work, name))
        calm.until(lambda: len(read_steps(calm.work, name)) > done + 20, 20, "it trains on")
        assert all(is_alive(pid) for pid in workers.values())
        if emptied:
            killed_without_its_data(calm, known=redis_was)
    calm.until(lambda: set(calm.nodes().values()) == {"ready"}, 60, "all agents are back")
    assert {node: calm.node(node)["incarnation"]["life"] for node in calm.nodes()} == lives
    undisturbed(calm, before, workers)


def test_a_worker_dies_while_redis_is_frozen(calm: Cluster) -> None:
    before, workers = trains(calm, "both")
    victim = workers[1]
    with frozen(redis_pid(calm)):
        time.sleep(AWAY / 2)
        os.kill(victim, signal.SIGKILL)
        time.sleep(AWAY / 2)
    calm.until_running("both", 2, above=before["generation"])
    calm.until_steps("both", 10)
    calm.ctl("stop", "both", "--timeout", "60s")
    assert calm.job("both")["restarts"] == 1
    rows = read_steps(calm.work, "both")
    check_steps(rows, lockstep.losses())
    check_complete(rows, max(row["step"] for row in rows))


def change_password(admin: redis.Redis) -> None:
    """New logins need a password that no agent has; those who are logged in are thrown out."""
    admin.config_set("requirepass", "changed")
    admin.client_kill_filter(_type="normal", skipme=True)


LONG = pytest.mark.endurance
"""A primary that has become a replica is ``test_failover.py``'s, too."""
FAULTS: dict[str, tuple[Callable[[redis.Redis], object], Callable[[redis.Redis], object], type[redis.RedisError]]] = {
    "full": (
        lambda r: r.config_set("maxmemory", 1),
        lambda r: r.config_set("maxmemory", 0),
        redis.exceptions.OutOfMemoryError,
    ),
    "read-only": (
        lambda r: r.config_set("min-replicas-to-write", 1),
        lambda r: r.config_set("min-replicas-to-write", 0),
        redis.exceptions.ResponseError,
    ),
    "replica": (
        lambda r: r.replicaof("127.0.0.1", 9),
        lambda r: r.replicaof("NO", "ONE"),
        redis.exceptions.ReadOnlyError,
    ),
    "password": (
        change_password,
        lambda r: r.config_set("requirepass", ""),
        redis.exceptions.AuthenticationError,
    ),
}
"""What is done to Redis, what mends it, and what it says meanwhile to who writes."""


@pytest.mark.parametrize("fault", [*(f for f in FAULTS if f != "replica"), pytest.param("replica", marks=LONG)])
def test_redis_answers_but_serves_nobody(calm: Cluster, fault: str) -> None:
    harm, restore, refusal = FAULTS[fault]
    calm.submit(lockstep_job(calm.work, fault, nodes="{min: 1, max: 3, target: 2}", delay=0.1, workers=1))
    first = calm.until_running(fault, 2)  # it may have begun with one node, and have grown: a restart, too
    calm.until_steps(fault, 5)
    before, lent = calm.until_workers(fault, 2), calm.logged("runs on without the store")
    place = calm.json("local", "status")["redis"]["url"]
    with redis.Redis.from_url(place) as admin:
        harm(admin)
        try:
            with redis.Redis.from_url(place) as other, pytest.raises(refusal):
                other.set("anything", "at all")
            time.sleep(REFUSING)
            assert all(is_alive(pid) for pid in before.values())
        finally:
            restore(admin)
    assert calm.logged("runs on without the store") == lent + 2, "both members asked their failsafe members"
    calm.until_steps(fault, 5)
    calm.until(lambda: calm.workers(fault) == before, 20, "every pod is published again")
    job = calm.job(fault)
    assert (job["generation"], job["restarts"]) == (first["generation"], first["restarts"])
    check_undisturbed([row for row in read_steps(calm.work, fault) if row["generation"] == first["generation"]])
    calm.ctl("scale", "3", "--job", fault, "--timeout", "30s")
    calm.until_running(fault, 3, above=first["generation"])
    calm.until_steps(fault, 5)
    calm.ctl("stop", fault)
    check_steps(read_steps(calm.work, fault), lockstep.losses())
