"""Which jobs make room for one that waits, or why none does, in words: for ``describe`` and ``queue describe``. By the
rules of ``reclaim.py``; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import RESOURCES, queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import Resources, least, size
from nodeagent.plan.elastic import sharing
from nodeagent.plan.membership import natural
from nodeagent.plan.reclaim import Reclaim, stops_at
from nodeagent.plan.room import room_for
from nodeagent.plan.share import NO_PART, entitlements, owned, shared

SHOWN = 3
"""Names that a sentence gives before it only counts."""

_WHY = {
    "kept": ("is not reclaimable", "are not reclaimable"),
    "owned": ("has no more than its guarantee", "have no more than their guarantees"),
    "part": ("has no more than its part by weight", "have no more than their parts by weight"),
    "": ("can give too little", "can give too little"),
}


def making_room(cluster: Cluster, job: JobRecord) -> str:
    """Who gives nodes to a job that waits and lacks some, or why nobody does. Empty if it lacks none or its queue may
    use no more, and in a cluster of one queue: there no job makes room for another."""
    room = room_for(cluster, job)
    if not shared(cluster) or room.enough_soon or room.barred is not None:
        return ""
    now, found = sharing(cluster), list[str]()
    for uid, nodes in now.gives.items():
        if mine := sorted((node for node, to in nodes.items() if to == job.uid), key=natural):
            found.append(f"job {cluster.jobs[uid].name} gives {some(mine)} back for it")
    found += [_stops(cluster, cluster.jobs[uid]) for uid, to in now.stops.items() if to == job.uid]
    if found:
        return some(found)
    name, needs = queue_of(job.spec.queue), least(cluster, job.sized_before)
    return cluster.once(f"noroom:{name}:{needs}", lambda _before: _nobody(cluster, name, needs))


def _stops(cluster: Cluster, donor: JobRecord) -> str:
    at, least = stops_at(cluster, donor)
    return f"job {donor.name} makes room for it" + f" when it has run for {least:g} s" * (cluster.served < at)


def _nobody(cluster: Cluster, name: str, needs: Resources) -> str:
    """Why no job makes room for one of this queue that needs so much."""
    plan, found = Reclaim(cluster), dict[str, dict[str, None]]()
    run = (job for job in cluster.jobs.values() if job.head is not None and job.head.state == "active")
    for giver in sorted({queue_of(job.spec.queue) for job in run}, key=natural):
        if (obstacle := plan.obstacle(giver, name, needs)) is not None:
            found.setdefault(obstacle.why, {})[obstacle.queue] = None
    texts = [_too_much(cluster, plan, over, needs) for over in [*found.pop("over", ())][:SHOWN]]
    for why, queues in found.items():
        one, more = _WHY[why]
        texts.append(f"queue {next(iter(queues))} {one}" if len(queues) == 1 else f"queues {some([*queues])} {more}")
    return f"nobody makes room for it: {'; '.join(texts) or f'what runs is of its own queue, {name}'}"


def _too_much(cluster: Cluster, plan: Reclaim, name: str, needs: Resources) -> str:
    """What the queue would have with the job, of the resource of which that is most, and what it is entitled to."""
    then, due, total = plan.use(name).and_(needs), entitlements(cluster).get(name, NO_PART), size(cluster).total
    over = [(mine - part) / all_ if all_ else -1.0 for mine, part, all_ in zip(then, due, total, strict=True)]
    at = over.index(max(over))
    own = owned(cluster.queues, name).get(RESOURCES[at])
    guarantee = f", its guarantee {own}" if own is not None else ""
    part = round(due[at], 1)
    return f"with it queue {name} would have {then[at]} {RESOURCES[at]}, its part by weight is {part:g}{guarantee}"


def some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
