"""What is wrong with the store's server, judged from what was seen of it: against what the protocol needs of it.

Pure. ``nodeagent/store/inspect.py`` does the asking. What could not be asked is reported as unknown, never as fine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from nodeagent.model.facts import Finding, SentinelFacts, StoreFacts
from nodeagent.model.job import SKEW
from nodeagent.model.timing import Timing

SUPPORTED = {"redis": ((6, 2), (8, 99)), "valkey": ((7, 2), (9, 99))}
"""First and last version of each server that nodeagent is made for."""
LAG_REST = 1.0
"""A primary counts a replica's lag in whole seconds: it may be this much longer than it says."""
MIN_SENTINELS = 3
"""Fewer cannot lose one and still agree on a fail-over."""
SLOW_SHARE = 0.25
"""A beat is a few round trips: one PING should take no more than this part of ``store_timeout``."""
FULL_SHARE = 0.8
"""Of maxmemory."""


def judge(facts: StoreFacts, timing: Timing) -> tuple[Finding, ...]:
    """Everything worth saying, errors first; empty when all is well and known."""
    if facts.problem:
        return (Finding(severity="error", what=facts.problem, fix=""), *_sentinels(facts, timing))
    parts: tuple[Callable[[StoreFacts, Timing], Iterator[Finding]], ...] = (
        _version, _role, _eviction, _persistence, _replication, _sentinels, _latency, _clock,
    )  # fmt: skip
    found = [finding for part in parts for finding in part(facts, timing)]
    order = ("error", "warning", "info")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _version(facts: StoreFacts, _timing: Timing) -> Iterator[Finding]:
    number = _numbers(facts.version)
    known = SUPPORTED.get(facts.server)
    if known is None or number is None:
        yield _unknown("the server's version", "nodeagent is made for Redis 6.2 to 8 and Valkey 7.2 to 9")
        return
    (first, last), name = known, f"{facts.server.capitalize()} {facts.version}"
    if number < first:
        oldest = ".".join(map(str, first))
        yield _error(f"{name} is too old: nodeagent needs {oldest} or newer", "install a newer server")
    elif number > last:
        yield _warning(f"{name} is newer than nodeagent was made for ({facts.server} {last[0]})", "")


def _numbers(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def _role(facts: StoreFacts, _timing: Timing) -> Iterator[Finding]:
    if facts.role not in ("master", ""):
        yield _error(
            f"the server at {facts.address} is a replica: agents refuse to talk to it",
            "set redis.url to the primary, or to redis+sentinel://HOST:26379,.../SERVICE",
        )


def _eviction(facts: StoreFacts, _timing: Timing) -> Iterator[Finding]:
    if facts.policy is None:
        yield _unknown("maxmemory-policy", "it must be noeviction: ask the server's operator")
    elif facts.policy != "noeviction":
        lost = "jobs and leases" if facts.policy.startswith("allkeys") else "events and what pods report"
        so_far = f" (keys so far: {facts.evicted})" if facts.evicted else ""
        yield _error(
            f"maxmemory-policy is {facts.policy}: when its memory is full the server may throw {lost} away{so_far}, "
            "and answer some agents while it refuses others: then no fault is recovered from, and healthy training "
            "may stop, too, node by node, since who is refused gets no failsafe time while another is answered",
            "CONFIG SET maxmemory-policy noeviction (and maxmemory-policy noeviction in its config file)",
        )
    if facts.memory_limit and facts.memory_used is not None and facts.memory_used > FULL_SHARE * facts.memory_limit:
        full = (
            "serves no agent: healthy training goes on on failsafe time, but no fault is recovered from"
            if facts.policy == "noeviction"
            else "serves no agent, or throws away what they need, by its maxmemory-policy"
        )
        yield _warning(
            f"{facts.memory_used / 2**20:.0f} of {facts.memory_limit / 2**20:.0f} MiB (maxmemory) are used: a full "
            f"server {full}",
            f"CONFIG SET maxmemory {2 * max(facts.memory_limit, facts.memory_used)}",
        )


def _persistence(facts: StoreFacts, _timing: Timing) -> Iterator[Finding]:
    if facts.appendonly is None:
        yield _unknown("whether the server keeps its data (appendonly)", "it must be yes: ask the server's operator")
        return
    if not facts.appendonly:
        yield _error(
            "appendonly is no: a restart of the server forgets all jobs: those that an agent knows it gives back, the "
            "rest is lost",
            "CONFIG SET appendonly yes (and appendonly yes in its config file)",
        )
        return
    if facts.append_failed:
        yield _error(
            "the server could not write its append-only file: it may forget jobs at its next restart",
            "free disk space where it keeps its data, then see its log and INFO persistence",
        )
    if facts.appendfsync is None:
        yield _unknown("appendfsync", "it should be always, or everysec where a replica has every write")
    elif facts.appendfsync == "no":
        yield _error(
            "appendfsync is no: a power cut of the server's machine loses many seconds of writes",
            "CONFIG SET appendfsync everysec",
        )
    elif facts.appendfsync == "everysec" and facts.replicas_wanted == 0:
        yield _info(
            "appendfsync is everysec and no replica is waited for: a power cut of the server's machine can lose the "
            "last second of writes",
            "CONFIG SET appendfsync always, or give the server a replica (changes are then refused for up to a minute, "
            "while training goes on) and then set redis.replicas to 1",
        )


def _replication(facts: StoreFacts, _timing: Timing) -> Iterator[Finding]:
    wanted, there = facts.replicas_wanted, facts.replicas
    if wanted and there is None:
        yield _unknown("how many replicas are connected", f"redis.replicas asks for {wanted}")
    elif there is not None and there < wanted:
        yield _error(
            f"{there} replicas are connected and redis.replicas is {wanted}: no job can take a step",
            "start the replicas, or set redis.replicas lower on every node",
        )
    elif there is not None and there == wanted > 0 and facts.sentinel is not None:
        yield _warning(
            f"{there} replicas are connected and every step needs {wanted}: after a fail-over the new primary has too "
            "few, and no job takes a step until the old one is back",
            f"give the primary {wanted + 1} replicas",
        )
    elif there and wanted == 0:
        yield _info(
            f"the server has {there} replicas and no write waits for them: a fail-over to one may lose writes",
            "set redis.replicas to 1 on every node if anything fails over to them",
        )


def _sentinels(facts: StoreFacts, timing: Timing) -> Iterator[Finding]:
    seen = facts.sentinel
    if seen is None:
        return
    if seen.answered < seen.listed:
        some = _error if seen.answered * 2 <= seen.listed else _warning
        yield some(
            f"{seen.answered} of the {seen.listed} sentinels in redis.url answer",
            "start the others, or take them out of redis.url",
        )
    if max(seen.listed, seen.known or 0) < MIN_SENTINELS:
        yield _warning(
            f"only {max(seen.listed, seen.known or 0)} sentinels watch {seen.service!r}: when one is gone, nothing "
            "fails over",
            f"run at least {MIN_SENTINELS}, on machines of their own, and list them all in redis.url",
        )
    if len(seen.primaries) > 1:
        yield _warning(f"the sentinels name different primaries: {', '.join(seen.primaries)}", "look again in a moment")
    if facts.replicas_wanted == 0:
        yield _warning(
            "redis.replicas is 0 with Sentinel: a fail-over can lose steps that agents have acted on",
            "set redis.replicas to 1 on every node",
        )
    if facts.problem:
        return
    yield from _isolated(facts, seen, timing)


def _isolated(facts: StoreFacts, seen: SentinelFacts, timing: Timing) -> Iterator[Finding]:
    """An old primary that is cut off must stop serving before the new one lets leases lapse."""
    if facts.min_replicas is None:
        yield _unknown("min-replicas-to-write", "with Sentinel it must be 1 or more: ask the server's operator")
        return
    if facts.min_replicas == 0:
        yield _error(
            "min-replicas-to-write is 0 with Sentinel: a primary that is cut off goes on renewing leases that the new "
            "one has let lapse, so a generation can run twice",
            "CONFIG SET min-replicas-to-write 1 on the primary and its replicas (and in their config files)",
        )
        return
    if facts.max_lag is None or seen.down_after is None:
        what = "min-replicas-max-lag" if facts.max_lag is None else "down-after-milliseconds"
        yield _unknown(what, "min-replicas-max-lag + 1 + fence < down-after + lease must hold")
        return
    if facts.max_lag == 0:
        yield _error(
            "min-replicas-max-lag is 0, which turns min-replicas-to-write off",
            "CONFIG SET min-replicas-max-lag 2 on the primary and its replicas",
        )
        return
    stops = facts.max_lag + LAG_REST + timing.fence
    lapses = seen.down_after + timing.lease
    if stops < lapses:
        return
    room = math.ceil(lapses - LAG_REST - timing.fence) - 1
    if room >= 1:
        fix = f"CONFIG SET min-replicas-max-lag {room} on the primary and its replicas"
    else:
        needed = math.floor((stops - timing.lease) * 1000) + 1
        fix = f"SENTINEL SET {seen.service} down-after-milliseconds {needed} on every sentinel"
    yield _error(
        f"min-replicas-max-lag + 1 + fence = {stops:g} s is not below down-after + lease = {lapses:g} s: a primary "
        "that is cut off may still renew leases when the new one lets them lapse",
        fix,
    )


def _latency(facts: StoreFacts, timing: Timing) -> Iterator[Finding]:
    if not facts.pings:
        yield _unknown("the server's latency", "")
        return
    late = p99(facts.pings)
    text = f"the slowest in a hundred PINGs takes {late * 1000:.1f} ms, and store_timeout is {timing.store_timeout:g} s"
    if late >= timing.store_timeout:
        yield _error(f"{text}: renewals fail and workers stop", "see SLOWLOG GET and LATENCY DOCTOR of the server")
    elif late > SLOW_SHARE * timing.store_timeout:
        yield _warning(f"{text}: little room is left", "see SLOWLOG GET and LATENCY DOCTOR of the server")


def p99(values: tuple[float, ...]) -> float:
    """The value that at most one in a hundred is above (the largest of fewer than a hundred)."""
    ranked = sorted(values)
    return ranked[math.ceil(0.99 * len(ranked)) - 1]


def _clock(facts: StoreFacts, timing: Timing) -> Iterator[Finding]:
    if facts.clock_step is None:
        yield _unknown("the server's clock", "")
        return
    if abs(facts.clock_step) > timing.credit:
        yield _warning(
            f"the server's clock stepped by {facts.clock_step:+.1f} s while it was looked at: each step holds back the "
            "replacement of dead nodes for one lease",
            "let chrony slew that machine's clock instead of stepping it",
        )
    offset = facts.clock_offset
    if offset is not None and abs(offset) >= SKEW:
        yield _error(
            f"the server's clock and this machine's differ by {abs(offset):.0f} s: if this one is wrong, new "
            "jobs are refused here, and those submitted here may be refused by other nodes; what runs goes on",
            "set the clock that is wrong (timedatectl), and run chrony on both",
        )
    elif offset is not None and abs(offset) > timing.lease:
        yield _info(
            f"the server's clock and this machine's differ by {abs(offset):.0f} s: workers run all the same, but "
            "times of events and logs will not fit together, and what has ended is kept for longer or less long",
            "run chrony on both",
        )


def _error(what: str, fix: str) -> Finding:
    return Finding(severity="error", what=what, fix=fix)


def _warning(what: str, fix: str) -> Finding:
    return Finding(severity="warning", what=what, fix=fix)


def _info(what: str, fix: str) -> Finding:
    return Finding(severity="info", what=what, fix=fix)


def _unknown(what: str, fix: str) -> Finding:
    return Finding(severity="warning", what=f"unknown: {what} could not be found out", fix=fix)
