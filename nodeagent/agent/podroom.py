"""How much the states of a node's pods may take in its beats. A shim runs as the job's user, so how many workers it
tells of, and what they do, is whatever that user likes; the store keeps all of it, and whoever looks at the job reads
it.

What has no room is not shown, and the pod's reason says so. Must never change what a pod's phase is, nor cut one user's
pods for what another's say, as long as those have room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, islice, takewhile
from typing import TypeVar

from nodeagent.agent.readiness import shortened, size
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.store.codec import MOST_OF_LINE, MOST_PARTS

OF_POD = MOST_OF_LINE - 4096
"""Characters of a published pod's workers, reason and members that cannot be reached: other agents read as many
(``codec.decode_pod``)."""
OF_OWNER = OF_POD
"""The same of all pods of one user on a node. Pods that say little have room before those that say much."""
OF_BEAT = 2 << 20
"""The same of all pods of a node: users who say little have room before those who say much."""
REASON_MIN = 400
"""The same of a reason, for which there is room in any case."""
OF_WORKER, OF_NODE = 192, 96
"""The same of a worker apart from what it does, and of a member that cannot be reached, at most."""
ESCAPED = 6
"""Characters in JSON of one of a text that is not plain, at most."""
WORKER_PARTS, OTHER_PARTS = 7, 100
"""Values of a worker, and of a pod apart from its workers and those members."""
_Key = TypeVar("_Key", bound=Hashable)


def within_room(pods: Sequence[PodState], owner: Callable[[str], Hashable]) -> tuple[PodState, ...]:
    """The same, as far as a beat has room for them. ``owner``: whose the job of a uid is."""
    needs = {pod.uid: min(_need(pod), OF_POD) for pod in pods}
    by_owner: dict[Hashable, dict[str, int]] = defaultdict(dict)
    for uid, need in needs.items():
        by_owner[owner(uid)][uid] = need
    rooms = _shares({of: min(sum(theirs.values()), OF_OWNER) for of, theirs in by_owner.items()}, OF_BEAT)
    parts = {uid: part for of, theirs in by_owner.items() for uid, part in _shares(theirs, rooms[of]).items()}
    return tuple(_fitting(pod, parts[pod.uid]) for pod in pods)


def _shares(needs: Mapping[_Key, int], room: int) -> dict[_Key, int]:
    """What each has of the room: who needs little has all of it, the others have equal parts of the rest."""
    out: dict[_Key, int] = {}
    for key in sorted(needs, key=lambda key: (needs[key], str(key))):
        out[key] = min(needs[key], room // (len(needs) - len(out)))
        room -= out[key]
    return out


def _need(pod: PodState) -> int:
    return size(pod.reason) + OF_NODE * len(pod.unreachable) + sum(_sizes(pod.workers))


def _sizes(workers: Sequence[WorkerState]) -> list[int]:
    text = "".join(worker.doing for worker in workers)
    each = 1 if text.isprintable() and '"' not in text and "\\" not in text else ESCAPED
    return [OF_WORKER + each * len(worker.doing) for worker in workers]


def _fitting(pod: PodState, room: int) -> PodState:
    """The same, or with as many of its workers and those members as have room, and a reason that says so."""
    reason = shortened(pod.reason, most) if size(pod.reason) > (most := max(REASON_MIN, room // 2)) else pod.reason
    left = room - size(reason)
    others = min(len(pod.unreachable), max(0, left) // OF_NODE)
    sizes = accumulate(_sizes(pod.workers[: (MOST_PARTS - OTHER_PARTS - others) // WORKER_PARTS]))
    fit = sum(1 for _ in takewhile(lambda total: total <= left - OF_NODE * others, sizes))
    notes = [reason]
    if fit < len(pod.workers):
        notes.append(f"the first {fit} of its {len(pod.workers)} workers are shown")
    if others < len(pod.unreachable):
        notes.append(f"{others} of the {len(pod.unreachable)} nodes that this one cannot reach are shown")
    if notes == [pod.reason]:
        return pod
    shown = {"workers": pod.workers[:fit], "unreachable": dict(islice(pod.unreachable.items(), others))}
    return pod.model_copy(update={**shown, "reason": "; ".join(filter(None, notes))})
