"""A job without a running generation: queued, holding, or paused and wanted again. Starts it when it fits, or says
what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from nodeagent.model.job import JobRecord, Outcome
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, CauseKind
from nodeagent.plan.cluster import SHOWN, Cluster, in_order, some
from nodeagent.plan.failure import budget, judgement
from nodeagent.plan.fairshare.queues import dominant, full, holdings, shared
from nodeagent.plan.fairshare.resources import NOTHING, size
from nodeagent.plan.job.proposal import awaited, place, propose
from nodeagent.plan.job.running import after_fault
from nodeagent.plan.nodes.candidates import Candidate, has_portless, ruled_out
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.nodes.health import takes_work
from nodeagent.plan.nodes.members import gone_nodes, holding_nodes
from nodeagent.plan.placing.arranging import arranged, may_move
from nodeagent.plan.placing.placement import Placement, choose, needs
from nodeagent.plan.placing.roles import soon
from nodeagent.plan.placing.topology import closer, gang_of
from nodeagent.plan.queueing import dependencies, heldback, queue
from nodeagent.plan.queueing.elastic import making_room
from nodeagent.plan.queueing.room import Room, never, room_for
from nodeagent.plan.steps import Decision, End


def decide_waiting(cluster: Cluster, job: JobRecord, wall: float) -> Decision:
    """Most jobs of a long queue are decided on by a few counts; nodes are chosen only for one that may start."""
    gone = gone_nodes(cluster, job)
    found = judgement.late_fault(cluster, job, wall)
    entry = job.budget.get(str(job.last_number)) if job.budget else None
    if job.phase == "holding" and found is not None:
        if found.fail:
            return after_fault(cluster, job, found, gone)
        # A node was lost, or it was a worker that ends no job: what was waited for was another fault.
        before = budget.without(job, job.last_number)
        wait = budget.wait_after(cluster, before, found.spend)
        step = End("holding", found.cause.text, gone, spend=found.spend, delay_ms=wait.delay_ms)
        return Decision(step, (found.cause.text,))
    if job.phase == "holding" and entry is not None and entry.fails:
        return Decision(None, (f"{entry.fails}; {judgement.judged_when(judgement.awaited(cluster, job))}",))
    again = found.spend if found is not None else entry if entry is not None and entry.fails else None
    if again is not None:  # it was paused before that was judged, and resumed by somebody
        again = again.model_copy(update={"fails": ""})
    if cluster.served < job.not_before:
        return _wait(job, job.reason if job.phase != "paused" else "its time to begin has not come", job.not_before)
    if queue.made_room(job) and holding_nodes(cluster, job):
        return _wait(job, job.reason, 0)  # until then its nodes have room for nobody else, and it would take them again
    if blocked := dependencies.blocked(cluster, job):
        return _wait(job, blocked, 0)  # not for nodes: it does not hold
    if (held := heldback.held_back(cluster, job)) is not None:
        return _held_back(cluster, job, held, gone, wall)
    room = heldback.open_room(cluster, job)
    if not room.enough:
        return _no_fit(cluster, job, room, gone, wall)
    first = queue.earlier(cluster, heldback.line(cluster), job)
    if first is not None:
        text = f"job {first.job.name} is before it in the queue ({_rank_of(cluster, first.job)})"
        return _wait(job, text, 0 if first.fits else queue.patience_with(first.job, job))
    placement = place(cluster, job)
    if not placement.fits:  # room was counted, and none of these nodes can lead
        why = placement.missing
        return _held_too_long(cluster, job, gone, lambda: why) or _wait(job, why, _hold_end(job))
    patience = queue.patience(job)
    late = awaited(cluster, job, placement)
    if late and cluster.served < patience:
        return _wait(job, f"waits for {', '.join(late)} to get ready", patience)
    # Workers may still be leaving, and saving, since the job was paused: it was resumed before they had.
    leaving = (
        job.generation if job.generation is not None and job.generation.planned and job.generation.holders else None
    )
    grace = leaving.grace if leaving is not None else None
    cause = _why_here(cluster, job, placement)
    return propose(cluster, job, cause, gone, again, placement, leaving is not None, grace)


def _rank_of(cluster: Cluster, job: JobRecord) -> str:
    """What its place rests on."""
    text = f"priority {job.spec.priority}"
    if not shared(cluster):
        return text
    name = queue_of(job.spec.queue)
    part = dominant(holdings(cluster).by_queue.get(name, NOTHING), size(cluster).total)
    return f"{text}, of queue {name}, which uses {part:.0%} of the cluster"


def explain(cluster: Cluster, job: JobRecord, wall: float) -> tuple[str, ...]:
    """What keeps a waiting job from starting, node by node, as far as a few sentences go: what is wrong with nodes that
    could run it, which jobs hold what it needs or wait for the same before it, who makes room for it or why nobody
    does, and when it starts if that is known. ``wall``: Unix time."""
    barred = room_for(cluster, job).barred
    if barred is not None and cluster.served >= job.not_before:
        return (full(cluster, job, barred()),)
    placement = place(cluster, job)
    if placement.fits or cluster.served < job.not_before or dependencies.blocked(cluster, job):
        return ()
    if (back := heldback.held_back(cluster, job)) is not None:
        return (heldback.why_held(cluster, back, wall),)
    if never_fits := never(cluster, job.sized_before):
        return never_fits, *filter(None, [placement.wrong])  # the jobs that hold nodes now are not to blame
    held = holders(cluster, job, [c for c in placement.others if c.standing == "out"])
    text = [_missing(cluster, job, room_for(cluster, job), placement)]
    text += [f"job {other.name} (priority {other.spec.priority}) holds {some(nodes)}" for other, nodes in held[:SHOWN]]
    if len(held) > SHOWN:
        text.append(f"{len(held) - SHOWN} more jobs hold other nodes")
    if makes_room := making_room(cluster, job):
        text.append(makes_room)
    if free := heldback.idle_reserved(cluster, job):
        text.append(f"{some(free)} {'is' if len(free) == 1 else 'are'} reserved for it")
    if (estimate := heldback.start_estimate(cluster, job)) is not None:
        text.append(heldback.starts_by(cluster, estimate, wall))
    return tuple(text)


def holders(cluster: Cluster, job: JobRecord, full: Iterable[Candidate]) -> list[tuple[JobRecord, list[str]]]:
    """The jobs that hold devices of these nodes, which are too full for this one, each with their names: who holds most
    of them comes first."""
    found: dict[str, list[str]] = {}
    all_booked = booked(cluster)
    for one in full:
        if takes_work(cluster, one.node) and not ruled_out(job.spec, cluster.nodes[one.node]):
            for uid in dict.fromkeys(uid for uid, _ in all_booked.get(one.node, ()) if uid != job.uid):
                found.setdefault(uid, []).append(one.node)
    jobs = [(cluster.jobs[uid], nodes) for uid, nodes in found.items() if uid in cluster.jobs]
    return sorted(jobs, key=lambda one: (-len(one[1]), one[0].order))


def _wait(job: JobRecord, why: str | Callable[[], str], until: int) -> Decision:
    """Nothing to be done before ``until`` (served time, 0 for ever) for as long as the view stays the same. When a
    pending scale of the job ends depends on the time, too."""
    scale = job.control.scale
    says = (why,) if isinstance(why, str) else lambda: (why(),)
    return Decision(None, says, until, steady=scale is None or scale.state != "pending")


def _held_back(
    cluster: Cluster, job: JobRecord, held: heldback.HeldBack, gone: tuple[str, ...], wall: float
) -> Decision:
    text = heldback.why_held(cluster, held, wall)
    if job.phase in ("paused", "pausing"):
        return Decision(End("holding", text, gone), (text,))
    until = _hold_end(job)
    return _held_too_long(cluster, job, gone, lambda: text) or _wait(job, text, _sooner(until, held.by.lapses))


def _sooner(one: int, other: int) -> int:
    """Of two served times, of which 0 is never."""
    return min(one, other) if one and other else one or other


def _no_fit(cluster: Cluster, job: JobRecord, room: Room, gone: tuple[str, ...], wall: float) -> Decision:
    if job.phase in ("paused", "pausing"):
        text = _missing(cluster, job, room, place(cluster, job))
        return Decision(End("holding", text, gone), (text,))
    if job.active is None and room.unfit and room.unfit == room.live:
        return _unfit_everywhere(cluster, job, gone)
    until = _hold_end(job)
    missing = partial(_missing_now, cluster, job, room)
    return _held_too_long(cluster, job, gone, missing) or _wait(job, partial(_lacks, cluster, job, room, wall), until)


def _missing_now(cluster: Cluster, job: JobRecord, room: Room) -> str:
    return _missing(cluster, job, room, place(cluster, job))


def _lacks(cluster: Cluster, job: JobRecord, room: Room, wall: float) -> str:
    """What a job that waits for nodes lacks, and when it starts if that is known."""
    if room.barred is not None:
        text = full(cluster, job, room.barred())
    elif not (text := never(cluster, job.sized_before)):
        target = job.sized_before.nodes.target
        if job.spec.several:
            text = _missing(cluster, job, room, choose(cluster, job, target))
        else:
            text = needs(job.spec.nodes.min, room.fit) + (f", {room.pending} could get ready" if room.pending else "")
            if has_portless(cluster, job) or any(one.kind == "runtime" for one in job.setbacks):  # a person mends it
                text += f": {place(cluster, job).wrong}"
    if (estimate := heldback.start_estimate(cluster, job)) is not None:
        text += f"; {heldback.starts_by(cluster, estimate, wall)}"
    return text


def _missing(cluster: Cluster, job: JobRecord, room: Room, placement: Placement) -> str:
    """What keeps the job from starting, and what is wrong with nodes."""
    if room.enough_soon:
        return placement.missing
    return placement.out_of_reach(soon(cluster, job).lack if job.spec.several else "")


def _unfit_everywhere(cluster: Cluster, job: JobRecord, gone: tuple[str, ...]) -> Decision:
    """No live node can run it. It fails unless that may pass, or nodes that are away have not said the same."""
    unfit = [c for c in place(cluster, job).others if c.standing == "unfit"]
    by_why: dict[str, list[str]] = {}
    for one in unfit:
        by_why.setdefault(one.why.removeprefix(f"{one.node} "), []).append(one.node)
    reasons = "; ".join(f"{some(nodes)} {why}" for why, nodes in by_why.items())
    text = f"no node can run it: {reasons}"
    if any(c.passing for c in unfit):
        return _wait(job, f"{text}; it starts when one can", 0)
    if away := [n for n in in_order(cluster) if not cluster.live(n) and not _unfit_before(cluster, job, n)]:
        waits = f"it waits for {some(away)}, which {'is' if len(away) == 1 else 'are'} away"
        return _wait(job, f"no live node can run it: {reasons}; {waits}", 0)
    code = next((c.code for c in unfit if c.code), 1)
    error = next((c.error for c in unfit if c.error), "")
    return Decision(End("failed", text, gone, Outcome(code=code, text=text, error=error)), (text,))


def _unfit_before(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """Its last word of the job was that it cannot run it, or the job is not for it."""
    record = cluster.nodes[node]
    ready = record.readiness.get(job.uid)
    return (ready is not None and ready.state == "unfit") or bool(ruled_out(job.spec, record))


def _hold_end(job: JobRecord) -> int:
    """Served time (ms) at which the job has held for too long; 0 for never. One that never ran waits like any other in
    the queue."""
    limit = job.spec.hold_timeout if dependencies.held_after_run(job) else None
    return 0 if limit is None else job.since + millis(limit)


def _held_too_long(
    cluster: Cluster, job: JobRecord, gone: tuple[str, ...], missing: Callable[[], str]
) -> Decision | None:
    until = _hold_end(job)
    if not until or cluster.served < until:
        return None
    text = f"held for longer than its hold_timeout of {job.spec.hold_timeout:g} s: {missing()}"
    return Decision(End("failed", text, gone, Outcome(code=1, text=text)), (text,))


def _why_here(cluster: Cluster, job: JobRecord, placement: Placement) -> Cause:
    """Why it starts, and that it has moved if it has."""
    cause, generation, names = _why_again(job), job.generation, [c.node for c in placement.chosen]
    if generation is None or not may_move(cluster, job) or not arranged(cluster, job.spec):
        return cause
    if not closer(names, [*generation.members], gang_of(cluster, job.spec)):
        return cause
    return cause.model_copy(update={"text": f"{cause.text}; its nodes are closer together now"})


def _why_again(job: JobRecord) -> Cause:
    if job.active is None:
        return Cause(kind="start", text="first start")
    if job.phase in ("paused", "pausing"):
        return Cause(kind="resume", text=f"resumed by {job.control.by or 'an operator'}")
    last = job.budget.get(str(job.active.number))
    if last is None:
        return Cause(kind="join", text="enough nodes are back")
    kinds: tuple[CauseKind, ...] = (
        "worker_failed",
        "hang",
        "pod_failed",
        "node_lost",
        "collective",
        "fenced",
        "port_taken",
        "crowded",
        "runtime_failed",
        "join_failed",
        "reform",
        "share",
    )
    kind = next((k for k in kinds if k == last.kind), "join")
    return Cause(kind=kind, text=last.text, node=last.node, rank=last.rank)
