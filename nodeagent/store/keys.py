"""The names of the store's keys. The scripts build their keys from the same prefix; no other code may name a key.

``meta`` cluster uid, version, timing, served clock, counters · ``lease`` node to lease end · ``node:<id>`` ·
``cordons`` · ``queues`` the tree · ``windows`` maintenance windows · ``claims`` queue with a capability to the revision
at which a job last took nodes from it; also ``users:`` + queue with a quota for each user to the revision of the last
submit to it · ``job:<uid>`` · ``names`` name to uid · ``highest`` name to number · ``alloc:<node>`` device to uid ·
``nodes`` node to what agents read of its record · ``changes`` record to revision · ``requests`` (capped) ·
``requests:of:`` owner and ``requests:order`` which of these go first · ``events`` (capped stream) ·
``events:of:`` owner, or ``node:`` and a node, which of them are about a user's jobs, or about how that node came and
went (capped stream, TTL) · ``pod:<uid>:<node>`` (TTL) ·
``usage:<day>`` what removed jobs used · ``saved`` node to what is on its disk ·
``saves`` (capped stream) wakes callers that wait for a save · ``marks:<uid>`` field to the revision that changed it ·
``packed:<uid>`` many entries as one text · ``counts:<uid>`` counts that an ack reads instead of every member ·
``history`` uid, name, owner and bytes of a job that ended, by the time of its end · ``history:index`` its uids and
names, ``history:bytes`` owner to bytes · ``past:<uid>`` the record of such a job · ``wake:<place>`` (stream of one
entry, TTL)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CLUSTER_NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9_.]{0,62}")


def prefix(cluster: str) -> str:
    """The prefix of every key of a cluster. The braces keep all keys in one slot of a Redis Cluster."""
    if not CLUSTER_NAME.fullmatch(cluster):
        raise ValueError(
            f"cluster name {cluster!r}: up to 63 letters, digits, '-', '_' and '.', first a letter or digit"
        )
    return f"na:{{{cluster}}}:"


def job(cluster_prefix: str, uid: str) -> str:
    """The record of a job."""
    return f"{cluster_prefix}job:{uid}"


def pod(cluster_prefix: str, uid: str, node: str) -> str:
    """The pod of a job that a node publishes."""
    return f"{cluster_prefix}pod:{uid}:{node}"


def requests(cluster_prefix: str) -> str:
    """The hash of request ids."""
    return cluster_prefix + "requests"


def history_bytes(cluster_prefix: str) -> str:
    """The hash of owner to the bytes of his jobs of the history."""
    return cluster_prefix + "history:bytes"


def events(cluster_prefix: str) -> str:
    """The stream of events."""
    return cluster_prefix + "events"


def wakes(cluster_prefix: str, node: str, jobs: Iterable[str]) -> list[str]:
    """The streams that wake the agent of this node, which runs or holds these jobs."""
    return [f"{cluster_prefix}wake:{place}" for place in ("all", f"node:{node}", *(f"job:{uid}" for uid in jobs))]


def saved(cluster_prefix: str) -> str:
    """The hash of what is on each node's disk."""
    return cluster_prefix + "saved"


def saves(cluster_prefix: str) -> str:
    """The stream that wakes callers that wait until nodes have saved."""
    return cluster_prefix + "saves"
