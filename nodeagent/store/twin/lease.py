"""The steps of a node's lease in the twin: join, beat, leave, forget, cordon.

The twin of ``scripts/{join,beat,leave,forget,cordon}.lua``; must never touch a job but to drop a node from its holders.
"""

from __future__ import annotations

from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import PAGE_BYTES, Answer, Beat, BeatReply, JoinReply
from nodeagent.store.twin.holders import release_keepers, retire
from nodeagent.store.twin.state import FORGET_MS, PAGE, State
from nodeagent.store.twin.waiting import hear
from nodeagent.store.words import NAMED, timing_differs

DEAD_KEPT = 16
FORGET_AT_ONCE = 64


def join(s: State, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing, regroup: int) -> JoinReply:
    if s.timing is None:
        s.timing = timing
        s.era = f"{s.run}@{s.now}/0"
    elif s.timing != timing:
        raise StoreRefusedError("timing", timing_differs(s.timing, timing))
    s.regroup = regroup
    hear(s, node)
    old = s.nodes.get(node)
    same = old is not None and old.incarnation.life == incarnation.life
    if (same and old is not None and old.lost) or incarnation.life in s.dead.get(node, ()):
        raise StoreRefusedError("lost", f"this life of node {node} was declared lost: it must come back with a new one")
    if old is not None and same and incarnation.start < old.incarnation.start:
        raise StoreRefusedError(
            "not_current",
            f"a newer agent of node {node} has started (start {old.incarnation.start}, "
            f"at {old.facts.address}): this one must stop",
        )
    if old is not None and not same and not s.lapsed(node) and s.lease[node] > s.served:
        left = max(s.lease[node], s.shelter) - s.served
        raise StoreRefusedError(
            "lease_held",
            f"node id {node} is held by an agent at {old.facts.address} (pid {old.facts.agent_pid}) for another "
            f"{left / 1000:.1f} s at least; this agent is at {facts.address}: give it another node id, or stop the "
            "other agent",
        )
    if old is not None and not same and (not s.lapsed(node) or s.recovering):
        wait = s.shelter - s.served
        raise StoreRefusedError(
            "recovering",
            f"node id {node} was held by an agent at {old.facts.address}, and the store has been disturbed: this one "
            f"may join in {wait / 1000:.1f} s, if the other does not come back",
        )
    _forget(s)
    s.lease[node] = s.served + s.lease_ms
    if old is None or not same or incarnation.start > old.incarnation.start:
        s.seq[node] = 0
    if old is not None and not same:
        s.dead[node] = (*s.dead.get(node, ()), old.incarnation.life)[-DEAD_KEPT:]
    s.save_node(
        NodeRecord(
            id=node,
            incarnation=incarnation,
            joined=old.joined if old is not None and same else s.served,
            facts=facts,
            cordon=s.cordons.get(node),
            readiness=old.readiness if old is not None and same else {},
            rev=old.rev if old is not None else 0,
        )
    )
    if not same:
        s.event("NodeJoined", node=node, by=node, text=f"node {node} joined from {facts.address}")
        retire(s, node, lives_on=incarnation.life)
    return JoinReply(cluster_uid=s.cluster_uid, served=s.served)


def _forget(s: State) -> None:
    """Drop nodes that have been silent for a day, and for longer than anything may run on lent time."""
    since = s.served - max(FORGET_MS, s.limit_ms)
    old = sorted((end, node) for node, end in s.lease.items() if end <= since and s.lapsed(node))
    for _, node in old[:FORGET_AT_ONCE]:
        retire(s, node)
        release_keepers(s, node)
        del s.nodes[node], s.lease[node]
        s.seq.pop(node, None)
        s.dead.pop(node, None)
        s.saved.pop(node, None)
        s.touch(f"node:{node}")


def beat(s: State, b: Beat) -> BeatReply:
    newest = max(b.rev, b.top)
    continued = b.era == s.parent and newest <= s.known  # all that it has read is in this era too
    if b.node not in s.nodes or newest > s.rev or (b.era not in ("", s.era) and not continued):
        raise StoreRefusedError(
            "behind", f"the store may have lost what node {b.node} knows: it must offer that, and join again"
        )
    record = s.current(b.node, b.incarnation)
    if b.seq <= s.seq[b.node]:
        raise StoreRefusedError("stale", f"beat {b.seq} of node {b.node} came after beat {s.seq[b.node]}")
    hear(s, b.node)
    s.seq[b.node] = b.seq
    s.lease[b.node] = s.served + b.length
    update: dict[str, object] = {}
    if b.facts is not None:
        update["facts"] = b.facts
    if b.readiness is not None:
        update["readiness"] = b.readiness
    if update:
        s.save_node(record.model_copy(update=update))
    if b.saved is not None:
        before = s.saved.get(b.node)
        s.saved[b.node] = b.saved
        if (before.rev if before is not None else 0) < s.asked <= b.saved.rev:
            s.saves += 1
    for pod in b.pods or ():
        s.pods[pod.uid, b.node] = (pod, s.now + max(10 * s.lease_ms, 30_000))
    for note in b.notes:
        s.event(note.kind, node=b.node, by=b.node, text=note.text)
    return _news(s, b)


def _news(s: State, b: Beat) -> BeatReply:
    nodes, jobs, gone = [], [], []
    rev, more, size = s.rev, False, 0
    for count, (record, value) in enumerate(() if s.recovering else s.changed_since(b.rev)):
        kind, _, key = record.partition(":")
        size += s.size(s.jobs[key]) if kind == "job" and key in s.jobs else 0
        if count == PAGE or (size > PAGE_BYTES and count):
            more = True
            break
        if kind == "node" and key in s.nodes:
            nodes.append(s.nodes[key])
        elif kind == "job" and key in s.jobs:
            jobs.append(s.jobs[key])
        else:
            gone.append(record)
        rev = value
    if not more:
        rev = b.rev if s.recovering else s.rev
    over, sheltered, first = [], [], None
    for node, end in s.lease.items():
        if end > s.served and first is not None and end >= first:
            continue  # most of them: neither over nor the next to be
        if s.lapsed(node):
            if end <= s.served:
                over.append((end, node))
        elif node != b.node:
            if end <= s.served:
                sheltered.append((end, node))
            if first is None or end < first:
                first = end
    return BeatReply(
        cluster_uid=s.cluster_uid,
        served=s.served,
        lapsed=_newest(over),
        sheltered=_newest(sheltered),
        next_lapse=None if first is None else max(first, s.shelter) - s.served,
        nodes=tuple(nodes),
        jobs=tuple(jobs),
        gone=tuple(gone),
        rev=rev,
        more=more,
        event=s.newest_event,
        era=s.era,
        recovering=s.recovering,
        recovers=max(0, s.recover - s.served),
        awaited=tuple(sorted(s.awaited)[:NAMED]) if s.recovering else (),
        awaits=len(s.awaited) if s.recovering else 0,
        asked=s.asked,
    )


def _newest(ends: list[tuple[int, str]]) -> tuple[str, ...]:
    """Whose lease ended last, first."""
    return tuple(node for _, node in sorted(ends, reverse=True)[:PAGE])


def leave(s: State, node: str, incarnation: Incarnation) -> None:
    record = s.nodes.get(node)
    if record is not None and record.incarnation == incarnation and record.left and not record.lost:
        return
    record = s.current(node, incarnation)
    s.lease[node] = s.served
    s.save_node(record.model_copy(update={"left": True}))
    s.event("NodeLeft", node=node, by=node, text=f"node {node} left")
    retire(s, node)
    release_keepers(s, node)


def forget(s: State, node: str, by: str) -> NodeRecord:
    record = s.nodes.get(node)
    if record is None:
        raise StoreRefusedError("not_found", f"there is no node {node}: list the nodes and try again")
    if not s.lapsed(node):
        raise StoreRefusedError("not_live", f"node {node} holds its lease: drain it, or stop its agent, first")
    if not record.left and not record.lost:
        record = s.save_node(record.model_copy(update={"lost": True}))
        retire(s, node)
        s.event("NodeForgotten", node=node, by=by, text=f"node {node} is off for good, says {by}")
    release_keepers(s, node)
    return record


def cordon(s: State, node: str, value: Cordon | None, request: str) -> NodeRecord:
    record = s.nodes.get(node)
    if record is None:
        raise StoreRefusedError("not_found", f"there is no node {node}: list the nodes and try again")
    if request and request in s.requests:
        return record
    s.remember(request, Answer(subject=node))
    if record.cordon == value:
        return record
    if value is None:
        s.cordons.pop(node, None)
        s.event("NodeUncordoned", node=node, text=f"node {node} takes new work again")
    else:
        s.cordons[node] = value
        s.event("NodeCordoned", node=node, by=value.by, text=value.reason)
    return s.save_node(record.model_copy(update={"cordon": value}))
