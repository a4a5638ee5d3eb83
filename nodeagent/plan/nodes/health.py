"""What the verdicts on nodes and GPUs mean for work: who gets none, who is taken out of a running gang, who comes last.

A breaker stands between verdicts and running work: when more nodes become unfit at about the same time than chance
explains, it is the judge that is doubted (a driver update, a bad rule, a broken switch), and what runs is kept. Pure;
must never judge hardware itself: verdicts come with the nodes' facts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeagent.model.health import LABEL, Action, Claim, Verdict
from nodeagent.model.node import NodeFacts, NodeRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import Generation, Member
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, seen
from nodeagent.plan.nodes.failing import failing_nodes

WINDOW = 600.0
"""Seconds within which nodes became unfit at about the same time."""
WINDOW_MS = millis(WINDOW)
ONE_IN = 10
"""Of so many nodes one may become unfit within the window; at least one always may."""
NO_DRIVER = "probe.nvml.broken"
"""NVIDIA's driver is not there, or answers nobody."""
UNLISTED = "nvml.unlisted"
"""NVIDIA's driver tells nothing of a GPU that is in its slot."""
APP_REPEATS = "xid.app.repeats"
"""Application errors that come back on one GPU: on GPUs of several nodes they are the application's after all."""


@dataclass(frozen=True, slots=True)
class Sick:
    """A member of a running gang on hardware that is not to be used."""

    node: str
    text: str


def bar(node: NodeRecord) -> str:
    """Why no work may be given to the node as a whole, beside a cordon: a phrase that follows its name; empty if it
    may."""
    if node.mute:
        return "gets no new work: its agent is silent or cut off from the store"
    facts = node.facts
    if facts.notice is not None:
        return f"is {facts.notice.text}"
    claim = claimed(facts)
    if claim is not None and claim.whole:
        return f"is being repaired: {LABEL[claim.kind]} ({claim.rule})"
    return next((f"is unfit: {_words(v)}" for v in facts.health if v.bars and not v.device), "")


def claimed(facts: NodeFacts) -> Claim | None:
    """The repair that hardware of the node is set aside for."""
    claim = facts.repair_state.claim if facts.repair_state is not None else None
    return claim if claim is not None and claim.bars else None


def worn(cluster: Cluster, node: str) -> bool:
    """Something on the node is degraded: others are taken first."""
    record = cluster.nodes.get(node)
    if record is None or not record.facts.health:
        return False
    found = [v for v in record.facts.health if _degraded(v)]
    return any(v.rule != APP_REPEATS or not _elsewhere(cluster, node, v) for v in found)


def worn_nodes(cluster: Cluster) -> frozenset[str]:
    """All of them, and those on which job after job fails. The very same object for as long as they are the same."""

    def look(before: frozenset[str] | None) -> frozenset[str]:
        found = frozenset(node for node in remarkable(cluster) if worn(cluster, node)) | failing_nodes(cluster).keys()
        return before if before == found else found

    return cluster.once("worn", look)


@dataclass(frozen=True, slots=True)
class _Remarkable:
    seen: SeenNodes
    nodes: frozenset[str]


def remarkable(cluster: Cluster) -> frozenset[str]:
    """Nodes with anything else than whether they are live: a cordon, a verdict, a notice, a silent agent. Mostly there
    are few, and all others need not be looked at."""
    return cluster.once("remarkable", lambda before: _remarkable(cluster, before)).nodes


def _remarkable(cluster: Cluster, before: _Remarkable | None) -> _Remarkable:
    nodes = cluster.nodes
    news = changed(cluster, before.seen) if before is not None else None
    if before is None or news is None:
        return _Remarkable(seen(cluster), frozenset(n for n, record in nodes.items() if _is_remarkable(record)))
    now = before.nodes - news | {n for n in news if n in nodes and _is_remarkable(nodes[n])}
    return _Remarkable(seen(cluster), now)


def _is_remarkable(record: NodeRecord) -> bool:
    facts = record.facts
    return record.cordon is not None or record.mute or bool(facts.health or facts.notice or facts.repair_state)


def sick_members(cluster: Cluster, generation: Generation) -> tuple[tuple[Sick, ...], tuple[str, ...]]:
    """Members to be taken out now, and a sentence for each that the breaker keeps."""
    if remarkable(cluster).isdisjoint(generation.members):
        return (), ()
    go: list[Sick] = []
    kept: list[str] = []
    crowd: _Crowd | None = None
    for member in generation.ordered():
        record = cluster.nodes.get(member.node)
        if record is None or not cluster.live(member.node, member.life):
            continue
        claim = claimed(record.facts)
        if claim is not None and any(claim.takes(device) for device in member.devices):
            go.append(Sick(member.node, f"{record.id} makes room for a repair: {LABEL[claim.kind]} ({claim.rule})"))
            continue
        found = _against(record, member)
        if not found:
            continue
        crowd = crowd or _Crowd(cluster)
        text = _reported(record, found[0])
        unfit = max(crowd.at(_began(cluster, v)) for v in found)
        if unfit <= crowd.limit:
            go.append(Sick(member.node, text))
        else:
            kept.append(
                f"breaker open: {unfit} of {crowd.size} nodes became unfit within {WINDOW / 60:g} minutes; "
                f"what runs is kept ({text})"
            )
    return tuple(go), tuple(kept)


def breaker(cluster: Cluster, facts: NodeFacts) -> str:
    """One phrase for people while it is open for this node; else empty."""
    times = [_began(cluster, v) for v in facts.health if v.bars]
    if not times:
        return ""
    crowd = _Crowd(cluster)
    unfit = max(crowd.at(time) for time in times)
    if unfit <= crowd.limit:
        return ""
    return f"open: {unfit} of {crowd.size} nodes became unfit within {WINDOW / 60:g} minutes; what runs is kept"


def _in_hand(cluster: Cluster, record: NodeRecord) -> bool:
    """What is found on the node stops no work: it is being repaired, or a person has cordoned it and nothing runs there
    any more."""
    claim = claimed(record.facts)
    if claim is not None and claim.whole:
        return True
    return record.cordon is not None and record.id not in cluster.once("working", lambda _before: _working(cluster))


def _working(cluster: Cluster) -> frozenset[str]:
    """Nodes that a gang is on."""
    generations = (job.generation for job in cluster.jobs.values())
    return frozenset(node for g in generations if g is not None and g.state != "ended" for node in g.members)


def _bars(record: NodeRecord) -> Iterable[Verdict]:
    """Verdicts that could stop what runs: not those on what is set aside for a repair."""
    claim = claimed(record.facts)
    return (v for v in record.facts.health if v.bars and not (claim is not None and claim.takes(v.device)))


class _Crowd:
    """How many nodes became unfit at about the same time, of those where it could stop work. Looked up often when
    many did, so it is sorted once."""

    def __init__(self, cluster: Cluster) -> None:
        self.size = 0
        self._begin: list[int] = []
        self._end: list[int] = []
        for record in _live(cluster):
            if _in_hand(cluster, record):
                continue
            self.size += 1
            last: int | None = None
            for at in sorted(_began(cluster, v) for v in _bars(record)):
                if last is not None and at - last <= 2 * WINDOW_MS:
                    self._end.pop()  # a node counts once, however much of it is sick
                else:
                    self._begin.append(at - WINDOW_MS)
                self._end.append(at + WINDOW_MS)
                last = at
        self.limit = max(1, self.size // ONE_IN)
        """Nodes that may become unfit within the window before the breaker opens."""
        self._begin.sort()
        self._end.sort()

    def at(self, time: int) -> int:
        """Nodes of which something became unfit within the window around that served time."""
        return bisect_right(self._begin, time) - bisect_left(self._end, time)


PROBATION = "nothing: it is trusted again when its probation ends"
_REPAIRS: Mapping[Action, str] = {
    "diagnose": "find out what is wrong (nodeagentctl doctor, dcgmi diag)",
    "reset_gpu": "reset the GPU, which nothing may use, nodeagent's own reader neither (systemctl stop nodeagent, "
    "which drains the node; nvidia-smi --gpu-reset; systemctl start nodeagent)",
    "reboot": "reboot the machine",
    "service": "have the hardware looked at",
}


def next_step(verdict: Verdict, node: NodeRecord) -> str:
    """What a person does about it."""
    if verdict.stage == "probation":
        return PROBATION
    repair_state = node.facts.repair_state
    claim = repair_state.claim if repair_state is not None else None
    if claim is not None and (claim.whole or claim.device == verdict.device):
        return f"nothing: nodeagent repairs it ({LABEL[claim.kind]}{f'; {claim.why}' if claim.why else ''})"
    hold = f" ({repair_state.why})" if repair_state is not None and repair_state.why else ""
    if verdict.stage == "repaired":
        if hold:
            return f"see why it is not verified{hold}, or: nodeagentctl health ack {node.id}"
        return "nothing: its probation begins once it was read without a fault for a while"
    if verdict.rule.startswith("check."):  # it heals by itself, once it passes
        return f"on {node.facts.hostname}: run the command of health.checks.{verdict.rule[6:]} in the agent's config"
    repair = _REPAIRS.get(verdict.action)
    if repair is None:
        return "look at the application" if verdict.action == "restart_app" else "nothing: it is only reported"
    if verdict.unknown:
        if any(gpu.uuid == verdict.device and gpu.variable for gpu in node.facts.gpus):
            return f"on {node.facts.hostname}: ask the vendor's own tool"
        if verdict.rule == NO_DRIVER:
            return (
                f"on {node.facts.hostname}: nvidia-smi -q, then install or load the driver, or reboot; to do without "
                "GPUs: gpus: none below node in its config, or, if no driver is loaded, "
                f"nodeagentctl health ack {node.id}"
            )
        if verdict.rule == UNLISTED:
            return (
                f"on {node.facts.hostname}: compare nvidia-smi -L with lspci -d 10de:, see why in dmesg (NVRM), then "
                f"reboot or have the card looked at; to do without it: nodeagentctl health ack {node.id} "
                f"--gpu {verdict.device}"
            )
        if verdict.action == "diagnose":
            return f"on {node.facts.hostname}: nvidia-smi -q"
        return f"on {node.facts.hostname}: nvidia-smi -q; if it finds no fault: nodeagentctl health ack {node.id}"
    own = (
        f"; nodeagent does not by itself{hold}"
        if hold and repair_state and verdict.action in repair_state.kinds
        else ""
    )
    return f"{repair}, then: nodeagentctl health ack {node.id}{own}"


def condition(node: NodeRecord) -> str:
    """The worst verdict's text, or that devices are given to nobody; empty if nothing has a consequence."""
    worst = next((v for v in node.facts.health if v.severity in ("fatal", "degraded", "unknown")), None)
    if worst is None:
        held = len(node.facts.held)
        return f"processes that do not end have {held} of its devices" if held else ""
    index = next((f"GPU {g.index}: " for g in node.facts.gpus if g.uuid == worst.device), "")
    notes = (worst.severity, *(() if worst.stage == "active" else (worst.stage,)), *(("dry run",) * worst.dry_run))
    return f"{index}{worst.text} ({', '.join(notes)})"


def _against(record: NodeRecord, member: Member) -> list[Verdict]:
    """The verdicts that bar what the member uses, the worst first."""
    return [v for v in record.facts.health if v.bars and (not v.device or v.device in member.devices)]


def _reported(record: NodeRecord, verdict: Verdict) -> str:
    if not verdict.device:
        return f"{record.id} is unfit: {_words(verdict)}"
    index = next((str(g.index) for g in record.facts.gpus if g.uuid == verdict.device), verdict.device)
    return f"GPU {index} of {record.id} is unfit: {_words(verdict)}"


def _words(verdict: Verdict) -> str:
    return f"{verdict.text} ({verdict.rule})"


def _elsewhere(cluster: Cluster, node: str, verdict: Verdict) -> bool:
    others = (record for record in _live(cluster) if record.id != node)
    return any(v.rule == verdict.rule and _together(v, verdict) for r in others for v in r.facts.health)


def _together(one: Verdict, other: Verdict) -> bool:
    """They began at about the same time, as far as is known."""
    if one.since_served is None or other.since_served is None:
        return True
    return abs(one.since_served - other.since_served) <= WINDOW_MS


def _began(cluster: Cluster, verdict: Verdict) -> int:
    """Served time: nodes' clocks may be apart by more than the window."""
    return cluster.served if verdict.since_served is None else verdict.since_served


def _degraded(verdict: Verdict) -> bool:
    return verdict.severity == "degraded" and not verdict.dry_run


def _live(cluster: Cluster) -> Iterable[NodeRecord]:
    return (record for record in cluster.nodes.values() if cluster.live(record.id))


def takes_work(cluster: Cluster, name: str) -> bool:
    """It may get work that it does not have: it is live, not cordoned, its agent speaks, and nothing is wrong with all
    of it."""
    node = cluster.nodes.get(name)
    return node is not None and cluster.live(name) and node.cordon is None and not bar(node)


def drained(node: NodeRecord) -> bool:
    """What runs there moves away: an operator drains the node, or it is being taken away."""
    return (node.cordon is not None and node.cordon.drain) or node.facts.notice is not None
