"""Jobs that wait for other jobs: for the end of those that they come after, or for a place among the members of their
array that run at once; and for how long the records of ended jobs are kept. Pure counts over the view's jobs; which of
the others goes first is ``queue.py``'s.

The end of a job that another comes after is written into the other's control at once (``met``), so that it counts
however long the first one's record is kept. Until then its record stays in the view. Later it leaves: for the history,
or, kept long enough, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import TypeVar

from nodeagent.model.job import TERMINAL, USES_TIME, JobRecord, Outcome
from nodeagent.model.jobspec import After
from nodeagent.plan.cluster import Cluster, in_order
from nodeagent.plan.nodes.members import holding_nodes
from nodeagent.plan.steps import Decision, End, Settle

Ended = TypeVar("Ended")

NEVER_RAN = 125
"""Exit code of a job that never ran, since one that it comes after did not end well."""


@dataclass(slots=True)
class _Members:
    """Of one array."""

    known: int = 0
    bad: str = ""
    """The name of one that did not succeed."""
    ended: int = 0
    running: int = 0
    at_once: int = 0
    turn: frozenset[str] = frozenset()
    """Of those (uids) that are to run and have no nodes: those that ran last and hold, then the first in the queue, as
    many as may run at once."""


def _arrays(cluster: Cluster) -> Mapping[str, _Members]:
    """By id."""

    def look(_before: object) -> dict[str, _Members]:
        found: dict[str, _Members] = {}
        waiting: dict[str, list[JobRecord]] = {}
        for job in cluster.jobs.values():
            if job.spec.array is None:
                continue
            one = found.setdefault(job.spec.array.id, _Members())
            one.known, one.at_once = one.known + 1, job.spec.array.at_once
            one.running += job.phase in USES_TIME
            if job.phase in TERMINAL:
                one.ended += 1
                one.bad = one.bad or ("" if job.phase == "succeeded" else job.name)
            elif job.phase not in USES_TIME and job.control.desired == "run" and job.uid not in cluster.refused:
                waiting.setdefault(job.spec.array.id, []).append(job)
        for array, jobs in waiting.items():
            one = found[array]
            jobs.sort(key=lambda job: (not held_after_run(job), -job.spec.priority, job.order))
            one.turn = frozenset(job.uid for job in jobs[: max(0, one.at_once - one.running)])
        return found

    return cluster.once("arrays", look)


def _members(cluster: Cluster, array: str) -> _Members:
    """Of this id; none where the view has none."""
    return _arrays(cluster).get(array, _Members())


def held_after_run(job: JobRecord) -> bool:
    """It ran, has lost its nodes, and waits for others."""
    return job.phase == "holding" and job.active is not None


def awaited(cluster: Cluster) -> frozenset[str]:
    """Jobs (uids) and arrays (ids) whose end others have yet to take note of: their records are kept until then."""

    def look(_before: object) -> frozenset[str]:
        return frozenset(
            one.uid
            for job in cluster.jobs.values()
            if job.phase not in TERMINAL
            for one in job.spec.after
            if one.uid not in job.control.met
        )

    return cluster.once("awaited", look)


def is_awaited(cluster: Cluster, job: JobRecord) -> bool:
    """Another job has yet to take note of this one's end."""
    names = awaited(cluster)
    return bool(names) and (job.uid in names or (job.spec.array is not None and job.spec.array.id in names))


def array_lives(cluster: Cluster, job: JobRecord) -> bool:
    """Jobs of its array have not ended: until then their records stay together, to be counted and commanded as one."""
    array = job.spec.array
    return array is not None and (found := _members(cluster, array.id)).ended < found.known


DependencyState = tuple[str, str]
"""``met``, ``never`` or ``waits``, and a phrase that says of which job and why."""


def _standing(cluster: Cluster, one: After) -> DependencyState:
    if one.array:
        return _standing_of_array(cluster, one)
    other = cluster.jobs.get(one.uid)
    if other is None:
        if one.uid in cluster.unread:
            return "waits", f"job {one.name}, whose record cannot be read"
        return _gone(one, f"job {one.name} (uid {one.uid})")
    if other.phase not in TERMINAL:
        return "waits", f"job {one.name} to {'end' if one.need == 'any' else 'succeed'} ({other.phase})"
    if other.phase == "succeeded" or one.need == "any":
        return "met", f"job {one.name} has {_ended(other)}"
    return "never", f"job {one.name} has {_ended(other)}"


def _standing_of_array(cluster: Cluster, one: After) -> DependencyState:
    found = _members(cluster, one.uid)
    if one.need == "ok" and found.bad:
        return "never", f"job {found.bad} of array {one.name} has not succeeded"
    if found.ended < found.known:
        verb = "end" if one.need == "any" else "succeed"
        return "waits", f"array {one.name} to {verb} ({found.ended} of {one.array} have ended)"
    if found.known < one.array and not cluster.unread <= cluster.jobs.keys():
        return "waits", f"array {one.name}, of which a record may be one that cannot be read"
    if found.known < one.array and one.need == "ok":
        return _gone(one, f"a job of array {one.name}")
    return "met", f"all jobs of array {one.name} have {'ended' if one.need == 'any' else 'succeeded'}"


def _gone(one: After, what: str) -> DependencyState:
    if one.need == "any":
        return "met", f"{what} is no more"
    return "never", f"{what} was removed before it was known to have succeeded"


def _ended(job: JobRecord) -> str:
    return "been stopped" if job.phase == "stopped" else job.phase


def _unmet(cluster: Cluster, job: JobRecord) -> list[tuple[After, DependencyState]]:
    return [(one, _standing(cluster, one)) for one in job.spec.after if one.uid not in job.control.met]


def after_others(cluster: Cluster, job: JobRecord) -> Decision | None:
    """What the ends of those that this job comes after lead to: its own end, or that it takes note of them."""
    if job.generation is not None or len(job.control.met) >= len(job.spec.after) or cluster.partial:
        return None
    found = _unmet(cluster, job)
    for _, (standing, why) in found:
        if standing == "never":
            text = f"never ran: {why}"
            return Decision(End("failed", text, (), Outcome(code=NEVER_RAN, text=text)), (text,))
    met = [(one, why) for one, (standing, why) in found if standing == "met"]
    if not met:
        return None
    text = "; ".join(why for _, why in met)
    control = job.control.model_copy(update={"met": (*job.control.met, *(one.uid for one, _ in met))})
    return Decision(Settle(control, "JobAfterMet", text), (text,))


def blocked(cluster: Cluster, job: JobRecord) -> str:
    """What another job keeps this one from starting by, whatever nodes there are: a sentence; empty for nothing. An end
    counts once it is noted, and not before."""
    if job.spec.after and job.generation is None and (unmet := _unmet(cluster, job)):
        return f"waits for {', '.join(why for _, (_, why) in unmet)}"
    array = job.spec.array
    if array is None or not array.at_once or job.phase in USES_TIME:
        return ""
    found = _members(cluster, array.id)
    if job.uid in found.turn:
        return ""
    return f"waits for its turn: of array {array.name} {array.at_once} run at once, and {found.running} do"


AT_ONCE = 8
"""Records removed in one round at most."""
IN_VIEW = 20
"""Ended jobs that every agent keeps in its view: the newest. Older ones are in the history."""
SHELVED_AT_ONCE = 64
"""Most records that go to the history with one step."""
AFTER = 60.0
"""Seconds from a job's end until its record may go there: who waits for the end looks at the view."""

SKEW = 7200.0
"""Seconds by which a node's clock may be ahead of what the view says. As in ``store/scripts/end.lua``."""


def believed(cluster: Cluster, wall: float) -> float:
    """The Unix time by which records may be removed: this node's, unless it is more than ``SKEW`` ahead of the newest
    that the view shows. Jobs have the times of their start and end in both clocks, and served time goes on from there.
    It stands still without the store, so what the view shows is never too late."""
    served = cluster.served
    known = [job.ended + (served - job.since) / 1000 for job in cluster.jobs.values() if job.ended is not None]
    known += [
        job.started + (served - job.first_active) / 1000
        for job in cluster.jobs.values()
        if job.started is not None and job.first_active is not None
    ]
    newest = max(known, default=0.0)
    return wall if wall <= newest + SKEW else newest


ALL_OWNERS = 10
"""Times as many ended jobs are kept of all users together as of one. As in ``store/scripts/shelve.lua``."""


def surplus(first_to_go: Iterable[Ended], keep: int, owner: Callable[[Ended], int]) -> list[Ended]:
    """Those that are more than ``keep`` of one owner, whatever others have; and if all together are still more than
    ``ALL_OWNERS`` times as many, of the owners with most. ``first_to_go``: all of them, in this order."""
    left: dict[int, list[Ended]] = {}
    for one in first_to_go:
        left.setdefault(owner(one), []).append(one)
    out: list[Ended] = []
    counts: list[tuple[int, int]] = []
    for whose, own in left.items():
        over = max(0, len(own) - keep)
        out += own[:over]
        heappush(counts, (over - len(own), whose))
    for _ in range(-sum(count for count, _ in counts) - ALL_OWNERS * keep):
        count, whose = heappop(counts)
        out.append(left[whose][count])
        heappush(counts, (count + 1, whose))
    return out


def outlived(cluster: Cluster, wall: float, keep_for: float, keep: int) -> list[JobRecord]:
    """The oldest few of the ended jobs that ended more than ``keep_for`` seconds, or their own ``ttl``, before ``wall``
    (this node's Unix time, as far as it is ``believed``), or are not among the ``keep`` of their owner that ended last:
    those that never ran go before those that did. None that is still held."""
    ended = sorted(_records(cluster), key=lambda job: (job.ended or 0.0, job.order))
    never_ran_first = sorted(ended, key=lambda job: job.first_active is not None)
    over = {job.uid for job in surplus(never_ran_first, keep, lambda job: job.owner)}
    wall = believed(cluster, wall)
    old = [job for job in ended if job.uid in over or (job.ended or 0.0) < wall - _stays_for(job, keep_for)]
    return list(islice((job for job in old if not _is_needed(cluster, job)), AT_ONCE))


def history_room(keep: int) -> int:
    """How many jobs of one owner the history may have, of ``keep`` ended ones altogether."""
    return max(0, keep - IN_VIEW)


def due_for_history(cluster: Cluster, wall: float) -> list[JobRecord]:
    """The oldest ended jobs but the newest ``IN_VIEW``, a step's worth. None that is still held, nor one that somebody
    wants deleted, or that has a ``ttl``: of the history only age and number are known."""
    ended = sorted(_records(cluster), key=lambda job: (job.ended or 0.0, job.order))
    surplus, wall = ended[: max(0, len(ended) - IN_VIEW)], believed(cluster, wall)
    due = [job for job in surplus if (job.ended or 0.0) < wall - AFTER and not job.control.delete]
    due = [job for job in due if job.spec.ttl is None]
    return list(islice((job for job in due if not _is_needed(cluster, job)), SHELVED_AT_ONCE))


def _is_needed(cluster: Cluster, job: JobRecord) -> bool:
    """A node may still run workers of this ended job, or lend them time: its record has to stay."""
    return bool(job.failsafe_members or holding_nodes(cluster, job))


def keeps_history(cluster: Cluster, node: str) -> bool:
    """Whether this node is the one that moves records there: the first live one by name whose agent speaks."""
    live = (name for name in in_order(cluster) if cluster.live(name))
    return min(live, key=lambda name: cluster.nodes[name].mute, default="") == node


def _records(cluster: Cluster) -> list[JobRecord]:
    """None that another job has yet to take note of, or of whose array others live."""
    ended = [job for job in cluster.jobs.values() if job.phase in TERMINAL and job.ended is not None]
    return [job for job in ended if not is_awaited(cluster, job) and not array_lives(cluster, job)]


def _stays_for(job: JobRecord, keep_for: float) -> float:
    """For how many seconds after its end."""
    return keep_for if job.spec.ttl is None else min(keep_for, job.spec.ttl)
