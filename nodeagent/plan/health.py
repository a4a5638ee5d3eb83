"""What the verdicts on nodes and GPUs mean for work: who gets none, who is taken out of a running gang, who comes last.

A breaker stands between verdicts and running work: when more nodes become unfit at about the same time than chance
explains, it is the judge that is doubted (a driver update, a bad rule, a broken switch), and what runs is kept. Pure;
must never judge hardware itself: verdicts come with the nodes' facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeagent.model.health import Action, Verdict
from nodeagent.model.node import NodeFacts, NodeRecord
from nodeagent.model.world import Head, Member
from nodeagent.plan.cluster import Cluster

WINDOW = 600.0
"""Seconds within which nodes became unfit at about the same time."""
ONE_IN = 10
"""Of so many nodes one may become unfit within the window; at least one always may."""
APP_REPEATS = "xid.app.repeats"
"""Application errors that come back on one GPU: on GPUs of several nodes they are the application's after all."""


@dataclass(frozen=True, slots=True)
class Sick:
    """A member of a running gang on hardware that is not to be used."""

    node: str
    text: str


def bar(facts: NodeFacts) -> str:
    """Why no work may be given to the node as a whole: a phrase that follows its name; empty if it may."""
    return next((f"is unfit: {_words(v)}" for v in facts.health if v.bars and not v.device), "")


def worn(cluster: Cluster, node: str) -> bool:
    """Something on the node is degraded: others are taken first."""
    record = cluster.nodes.get(node)
    found = [v for v in record.facts.health if _degraded(v)] if record is not None else []
    return any(v.rule != APP_REPEATS or not _elsewhere(cluster, node, v) for v in found)


def sick_members(cluster: Cluster, head: Head) -> tuple[tuple[Sick, ...], tuple[str, ...]]:
    """Members to be taken out now, and what is to be said of those that the breaker keeps."""
    go: list[Sick] = []
    kept: list[str] = []
    for member in head.ordered():
        record = cluster.nodes.get(member.node)
        found = _against(record, member) if record is not None and cluster.live(member.node, member.life) else []
        if record is None or not found:
            continue
        text = _told(record, found[0])
        unfit = max(len(_unfit(cluster, v.since)) for v in found)
        if unfit <= limit(cluster):
            go.append(Sick(member.node, text))
        else:
            kept.append(
                f"breaker open: {unfit} of {_size(cluster)} nodes became unfit within {WINDOW / 60:g} minutes; "
                f"what runs is kept ({text})"
            )
    return tuple(go), tuple(kept)


def limit(cluster: Cluster) -> int:
    """Nodes that may become unfit within the window before the breaker opens."""
    return max(1, _size(cluster) // ONE_IN)


def breaker(cluster: Cluster) -> str:
    """One phrase while it is open for some node, for whoever looks at the nodes; else empty."""
    times = [v.since for record in _live(cluster) for v in record.facts.health if v.bars]
    most = max((len(_unfit(cluster, at)) for at in times), default=0)
    if most <= limit(cluster):
        return ""
    return f"{most} of {_size(cluster)} nodes became unfit within {WINDOW / 60:g} minutes: what runs on them is kept"


_REPAIRS: Mapping[Action, str] = {
    "diagnose": "find out what is wrong (nodeagentctl doctor, dcgmi diag)",
    "reset_gpu": "reset the GPU (nvidia-smi --gpu-reset, nothing may run on it)",
    "reboot": "reboot the machine",
    "service": "have the hardware looked at",
}


def next_step(verdict: Verdict, node: str) -> str:
    """What a person does about it."""
    if verdict.stage == "probation":
        return "nothing: it is trusted again when its probation ends"
    if verdict.stage == "repaired":
        return "nothing: its probation begins once it was read without a fault for a while"
    repair = _REPAIRS.get(verdict.action)
    if repair is None:
        return "look at the application" if verdict.action == "restart_app" else "nothing: it is told only"
    return repair if verdict.severity == "unknown" else f"{repair}, then: nodeagentctl health ack {node}"


def _against(record: NodeRecord, member: Member) -> list[Verdict]:
    """The verdicts that bar what the member uses, the worst first."""
    return [v for v in record.facts.health if v.bars and (not v.device or v.device in member.devices)]


def _told(record: NodeRecord, verdict: Verdict) -> str:
    if not verdict.device:
        return f"{record.id} is unfit: {_words(verdict)}"
    index = next((str(g.index) for g in record.facts.gpus if g.uuid == verdict.device), verdict.device)
    return f"GPU {index} of {record.id} is unfit: {_words(verdict)}"


def _words(verdict: Verdict) -> str:
    return f"{verdict.text} ({verdict.rule})"


def _unfit(cluster: Cluster, at: float) -> set[str]:
    """Live nodes of which something became unfit at about that time."""
    return {r.id for r in _live(cluster) if any(v.bars and abs(v.since - at) <= WINDOW for v in r.facts.health)}


def _elsewhere(cluster: Cluster, node: str, verdict: Verdict) -> bool:
    others = (record for record in _live(cluster) if record.id != node)
    return any(
        v.rule == verdict.rule and abs(v.since - verdict.since) <= WINDOW for r in others for v in r.facts.health
    )


def _degraded(verdict: Verdict) -> bool:
    return verdict.severity == "degraded" and not verdict.dry_run


def _live(cluster: Cluster) -> Iterable[NodeRecord]:
    return (record for record in cluster.nodes.values() if cluster.live(record.id))


def _size(cluster: Cluster) -> int:
    return sum(1 for _ in _live(cluster))
