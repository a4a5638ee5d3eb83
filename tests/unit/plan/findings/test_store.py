"""What is wrong with a store's server: each thing the protocol needs, missing alone."""

from __future__ import annotations

import pytest

from nodeagent.model.facts import SentinelFacts, StoreFacts
from nodeagent.model.timing import Timing
from nodeagent.plan.findings.store import judge, p99

GOOD = StoreFacts(
    address="redis1:6379",
    server="redis",
    version="7.2.4",
    role="master",
    replicas=0,
    policy="noeviction",
    memory_limit=0,
    memory_used=1_000_000,
    appendonly=True,
    append_failed=False,
    appendfsync="always",
    min_replicas=0,
    max_lag=10,
    pings=(0.001,) * 100,
    clock_step=0.0,
    clock_offset=0.2,
)
WATCHED = SentinelFacts(service="mymaster", listed=3, answered=3, known=3, down_after=5.0, primaries=("10.0.0.1:6379",))
REPLICATED = GOOD.model_copy(
    update={
        "sentinel": WATCHED, "replicas": 2, "replicas_wanted": 1, "min_replicas": 1, "max_lag": 2,
        "appendfsync": "everysec",
    }
)  # fmt: skip


def reported(facts: StoreFacts, **changes: object) -> list[str]:
    """Each finding as one line."""
    found = judge(StoreFacts.model_validate(facts.model_dump() | changes), Timing())
    return [f"{f.severity}: {f.what} | {f.fix}" for f in found]


def watched(**changes: object) -> SentinelFacts:
    return WATCHED.model_copy(update=changes)


@pytest.mark.parametrize("facts", [GOOD, REPLICATED])
def test_a_good_server_has_no_findings(facts: StoreFacts) -> None:
    assert reported(facts) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "allkeys-lru"}, "error: maxmemory-policy is allkeys-lru"),
        ({"policy": "allkeys-lru"}, "| CONFIG SET maxmemory-policy noeviction"),
        ({"policy": "allkeys-lru"}, "throw jobs and leases away, and answer some agents while it refuses others"),
        ({"policy": "allkeys-lru"}, "healthy training may stop, too"),
        ({"policy": "allkeys-lru", "evicted": 31}, "throw jobs and leases away (keys so far: 31), and"),
        ({"policy": "volatile-ttl"}, "throw events and what pods report away, and answer some"),
        ({"memory_limit": 1_048_576}, "warning: 1 of 1 MiB (maxmemory) are used"),
        ({"memory_limit": 1_048_576}, "healthy training goes on on failsafe time"),
        ({"memory_limit": 400_000}, "| CONFIG SET maxmemory 2000000"),
        (
            {"appendonly": False},
            "error: appendonly is no: a restart of the server forgets all jobs: those that an agent",
        ),
        ({"appendonly": False}, "| CONFIG SET appendonly yes"),
        ({"append_failed": True}, "error: the server could not write its append-only file"),
        ({"appendfsync": "no"}, "error: appendfsync is no"),
        ({"appendfsync": "everysec"}, "info: appendfsync is everysec and no replica is waited for"),
        ({"appendfsync": "everysec"}, "give the server a replica (changes are then refused for up to a minute, while"),
        ({"replicas": 2}, "info: the server has 2 replicas and no write waits"),
        ({"replicas_wanted": 1}, "error: 0 replicas are connected and redis.replicas is 1"),
        ({"version": "6.0.16"}, "error: Redis 6.0.16 is too old: nodeagent needs 6.2"),
        ({"server": "valkey", "version": "7.0.1"}, "error: Valkey 7.0.1 is too old: nodeagent needs 7.2"),
        ({"version": "9.0.0"}, "warning: Redis 9.0.0 is newer"),
        ({"role": "slave"}, "error: the server at redis1:6379 is a replica"),
        ({"pings": (0.2,) * 10}, "warning: the slowest in a hundred PINGs takes 200.0 ms"),
        ({"pings": (0.6,) * 10}, "error: the slowest in a hundred PINGs takes 600.0 ms"),
        ({"clock_step": -2.0}, "warning: the server's clock stepped by -2.0 s"),
        ({"clock_offset": -7.0}, "info: the server's clock and this machine's differ by 7 s"),
        ({"clock_offset": -7199.0}, "info: the server's clock and this machine's differ by 7199 s"),
        ({"clock_offset": 7200.0}, "error: the server's clock and this machine's differ by 7200 s: if this one"),
        ({"clock_offset": 100_000.0}, "new jobs are refused here"),
        ({"clock_offset": -100_000.0}, "| set the clock that is wrong (timedatectl)"),
    ],
)
def test_one_thing_wrong(changes: dict[str, object], message: str) -> None:
    (line,) = reported(GOOD, **changes)
    assert message in line


@pytest.mark.parametrize("policy", ["allkeys-lru", None])
def test_a_full_server_leaves_training_alone_only_with_noeviction(policy: str | None) -> None:
    lines = reported(GOOD, policy=policy, memory_limit=1_048_576)
    assert "a full server serves no agent, or throws away what they need" in lines[1]
    assert not any("goes on on failsafe time" in line for line in lines)


@pytest.mark.parametrize(("server", "version"), [("redis", "6.2.0"), ("redis", "8.4.1"), ("valkey", "9.0.0")])
def test_supported_versions(server: str, version: str) -> None:
    assert reported(GOOD, server=server, version=version) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_replicas": 0}, "error: min-replicas-to-write is 0 with Sentinel"),
        ({"min_replicas": 0}, "| CONFIG SET min-replicas-to-write 1"),
        ({"max_lag": 0}, "error: min-replicas-max-lag is 0, which turns"),
        ({"max_lag": 10}, "error: min-replicas-max-lag + 1 + fence = 13.2 s is not below down-after + lease = 8 s"),
        ({"max_lag": 10}, "| CONFIG SET min-replicas-max-lag 4 "),
        ({"sentinel": watched(down_after=0.2)}, "| SENTINEL SET mymaster down-after-milliseconds 2201 on every"),
        ({"replicas_wanted": 0}, "warning: redis.replicas is 0 with Sentinel"),
        ({"replicas": 0}, "error: 0 replicas are connected and redis.replicas is 1"),
        ({"replicas": 1}, "warning: 1 replicas are connected and every step needs 1"),
        ({"sentinel": watched(answered=2)}, "warning: 2 of the 3 sentinels"),
        ({"sentinel": watched(answered=1)}, "error: 1 of the 3 sentinels"),
        ({"sentinel": watched(listed=2, answered=2, known=2)}, "warning: only 2 sentinels watch 'mymaster'"),
        ({"sentinel": watched(primaries=("a:1", "b:1"))}, "warning: the sentinels name different primaries: a:1, b:1"),
    ],
)
def test_one_thing_wrong_with_sentinel(changes: dict[str, object], message: str) -> None:
    assert any(message in line for line in reported(REPLICATED, **changes))


@pytest.mark.parametrize("lag", [1, 2, 3, 4])
def test_what_is_advised_for_the_lag_holds(lag: int) -> None:
    """4 is the largest that fits into the inequality: 4 + 1 + 2.2 < 5 + 3."""
    assert reported(REPLICATED, max_lag=lag) == []
    assert reported(REPLICATED, max_lag=5) != []
    assert reported(REPLICATED, sentinel=watched(down_after=2.201), max_lag=2) == []
    assert reported(REPLICATED, sentinel=watched(down_after=2.2), max_lag=2) != []


def test_what_may_not_be_asked_is_unknown_and_never_fine() -> None:
    every = ("policy", "appendonly", "min_replicas", "replicas", "clock_step")
    lines = reported(REPLICATED, **dict.fromkeys(every), pings=(), version="")
    assert len(lines) == len(every) + 2
    assert all(line.startswith("warning: unknown: ") for line in lines)
    for one in ({"appendfsync": None}, {"max_lag": None}, {"sentinel": watched(down_after=None)}):
        (line,) = reported(REPLICATED, **one)
        assert line.startswith("warning: unknown: ")


def test_a_server_that_cannot_be_asked_is_one_error_beside_the_sentinels() -> None:
    assert reported(GOOD, problem="nobody is there") == ["error: nobody is there | "]
    lines = reported(REPLICATED, problem="nobody is there", sentinel=watched(answered=2))
    assert [line.partition(":")[0] for line in lines] == ["error", "warning"]


def test_errors_come_first() -> None:
    lines = reported(GOOD, clock_offset=9.0, pings=(0.2,), appendonly=False)
    assert [line.partition(":")[0] for line in lines] == ["error", "warning", "info"]


@pytest.mark.parametrize(("values", "late"), [((3.0, 1.0), 3.0), ((*(1.0,) * 99, 7.0), 1.0), ((*(1.0,) * 98, 7, 7), 7)])
def test_p99(values: tuple[float, ...], late: float) -> None:
    assert p99(values) == late
