"""The steps of a node's lease in the twin: join, beat, leave, forget, cordon.

The twin of ``scripts/{join,beat,leave,forget,cordon}.lua``; must never touch a job but to drop a node from its holders.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import PAGE_BYTES, Answer, Beat, BeatReply, Forgotten, JoinReply
from nodeagent.store.twin.holders import release_keepers, retire
from nodeagent.store.twin.state import FORGET_MS, LOOKED_AT, PAGE, State
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
    if old is not None and not same and not s.lapsed(node) and s.lease.get(node, 0) > s.served:
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
    """Drop nodes that have been silent for a day, and for longer than anything may run on failsafe time."""
    since = s.served - max(FORGET_MS, s.limit_ms)
    old = sorted((end, node) for node, end in s.lease.items() if end <= since and s.lapsed(node))
    for _, node in old[:FORGET_AT_ONCE]:
        _delete(s, node)


def _delete(s: State, node: str) -> None:
    """The record of a node that can run nothing any more. Its cordon stays."""
    retire(s, node)
    release_keepers(s, node)
    del s.nodes[node], s.lease[node]
    s.seq.pop(node, None)
    s.dead.pop(node, None)
    s.saved.pop(node, None)
    s.bury(f"node:{node}")


def beat(s: State, b: Beat) -> BeatReply:
    newest = max(b.rev, b.top)
    lacks = b.rev > 0 and b.era == s.era and b.node not in s.nodes and not s.buried(f"node:{b.node}")
    if s.timing is not None and lacks and not s.recovering:
        raise _distrust(s, (f"node:{b.node}",))
    continued = b.era == s.parent and newest <= s.known  # all that it has read is in this era too
    if b.node not in s.nodes or newest > s.rev or (b.era not in ("", s.era) and not continued):
        raise StoreRefusedError(
            "behind", f"the store may have lost what node {b.node} knows: it must offer that, and join again"
        )
    record = s.current(b.node, b.incarnation)
    if b.seq <= s.seq[b.node]:
        raise StoreRefusedError("stale", f"beat {b.seq} of node {b.node} came after beat {s.seq[b.node]}")
    if not s.recovering and (damaged := (*b.damaged, *_damage(s, b))):
        raise _distrust(s, damaged)
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


def _distrust(s: State, damaged: tuple[str, ...]) -> StoreRefusedError:
    s.distrust(damaged)
    return StoreRefusedError(
        "behind", f"somebody removed or damaged {damaged[0]} in the store: the agents give it back"
    )


def _damage(s: State, b: Beat) -> Iterator[str]:
    """What the steps would never leave so: the first key of it."""
    if b.node not in s.lease:
        yield "lease"
        return
    for uid in b.runs:
        record, job = f"job:{uid}", s.jobs.get(uid)
        if job is None and s.buried(record):
            break  # this beat brings it
        if job is None:
            yield record
        elif s.changes.get(record) != job.rev:
            yield "changes"
        elif s.names.get(job.name) != uid:
            yield "names"
        elif job.head is not None and s.highest.get(job.name, 0) < job.head.number:
            yield "highest"
        elif job.head is not None:
            member = job.head.members.get(b.node) if job.head.state != "ended" else None
            entry = job.head.holders.get(b.node) or member
            booked = s.alloc.get(b.node, {})
            if any(booked.get(device) != uid for device in (entry.devices if entry is not None else ())):
                yield f"alloc:{b.node}"
            else:
                continue
        else:
            continue
        return
    # And a few of all, in turn: what is missing may be nobody's who could say so.
    s.looked += LOOKED_AT
    start = s.looked % max(1, len(s.changes))
    for record in islice(s.changes, start, start + LOOKED_AT):
        kind, _, key = record.partition(":")
        if kind != "gone" and not s.has(record):
            yield record
            return
        node = s.nodes.get(key) if kind == "node" else None
        if node is not None and not node.lost and not node.left and key not in s.lease:
            yield "lease"
            return


def _news(s: State, b: Beat) -> BeatReply:
    nodes, jobs, gone = [], [], []
    rev, more, size = s.rev, False, 0
    for count, (record, value) in enumerate(() if s.recovering else s.changed_since(b.rev)):
        kind, _, key = record.partition(":")
        size += s.size(s.jobs[key]) if kind == "job" and key in s.jobs else 0
        if count == PAGE or (size > PAGE_BYTES and count):
            more = True
            break
        if kind == "gone":
            gone.append(key)
        elif kind == "node" and key in s.nodes:
            nodes.append(s.nodes[key])
        elif kind == "job" and key in s.jobs:
            jobs.append(s.jobs[key])
        else:
            gone.append(record)
        rev = value
    if not more:
        rev = b.rev if s.recovering else s.rev
    ended, first = [], None
    for node, end in s.lease.items():
        if end > s.served and first is not None and end >= first:
            continue  # most of them: neither over nor the next to be
        holder = s.nodes.get(node)
        if holder is None or holder.left or holder.lost:
            continue
        if end <= s.served:
            ended.append((end, node))
        elif node != b.node and (first is None or end < first):
            first = end
    ended.sort(reverse=True)
    names, sheltered = tuple(node for _, node in ended), s.served < s.shelter
    if sheltered and ended:
        first = s.shelter
    silent = f"{len(ended)} {ended[0][0] if ended else ''} {'sheltered ' if sheltered else ''}{s.era}"
    same = silent == b.silent
    return BeatReply(
        cluster_uid=s.cluster_uid,
        served=s.served,
        lapsed=() if same or sheltered else names,
        sheltered=names if sheltered and not same else (),
        silent=silent,
        same=same,
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


def forget(s: State, node: str, by: str) -> Forgotten:
    record = s.nodes.get(node)
    if record is None:
        raise StoreRefusedError("not_found", f"there is no node {node}: list the nodes and try again")
    if not s.lapsed(node):
        raise StoreRefusedError("not_live", f"node {node} holds its lease: drain it, or stop its agent, first")
    if record.left or record.lost:
        _delete(s, node)
        s.cordons.pop(node, None)
        s.event("NodeRemoved", node=node, by=by, text=f"the record of node {node} is removed, says {by}")
        return Forgotten(node=record.model_copy(update={"cordon": None, "rev": s.rev}), removed=True)
    record = s.save_node(record.model_copy(update={"lost": True}))
    retire(s, node)
    release_keepers(s, node)
    s.event("NodeForgotten", node=node, by=by, text=f"node {node} is permanently down, says {by}")
    return Forgotten(node=record, removed=False)


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
