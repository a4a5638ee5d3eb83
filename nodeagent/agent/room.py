"""How much of what a node publishes its pods may take: of its record, and of its beats. A shim runs as the job's user,
so what it says of its pod, and of how many workers, is whatever that user likes; the store keeps all of it, and every
agent of the cluster reads it. A record that is too long nobody reads: nothing of the node would be known, and nothing
be decided.

What has no room is said as such. Must never change what a decision is made by: a state, its code, a folder's id, a
pod's phase; nor cut one user's pods for what another's say, as long as those have room.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import accumulate, islice, takewhile
from typing import TypeVar

from nodeagent.model.node import Readiness
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.pods.bounds import FOLDER_MAX
from nodeagent.store.codec import MOST_OF_LINE, MOST_PARTS

_Key = TypeVar("_Key", bound=Hashable)

# --- readiness

TEXT_MAX = 800
"""Bytes of JSON of one sentence, or of what the job's processes printed. A longer one keeps its beginning and its
end."""
TEXTS_OF_OWNER = 16 << 10
"""The same of all texts of one user's pods on a node."""
TEXTS_OF_NODE = 128 << 10
"""The same of all texts of a node: users who say little have room before those who say much."""
MOST_ENTRIES = 2000
"""Pods and verdicts in a node's record, of which the store's reader takes 20,000 values. Pods come first; of verdicts
each user has as many as another."""
NO_ROOM = "too much to say of this user's jobs on this node"
"""Stands for a text that has no room."""
GAP = " ... "
_TEXTS = {"reason": "", "error": ""}


def readiness_within_room(
    found: Mapping[str, Readiness], pods: Collection[str], owner: Callable[[str], Hashable]
) -> dict[str, Readiness]:
    """The same, by job uid, as far as a node's record has room for it. ``pods``: uids of jobs that have a pod here;
    ``owner``: whose the job of a uid is."""
    brief = {uid: _brief(found[uid]) for uid in _first(found, pods, owner)}
    by_owner: dict[Hashable, list[str]] = defaultdict(list)
    for uid in brief:
        by_owner[owner(uid)].append(uid)
    if sum(map(_size_of_texts, brief.values())) <= TEXTS_OF_OWNER:
        return brief
    out: dict[str, Readiness] = {}
    left, most = TEXTS_OF_NODE, {of: sum(_size_of_texts(brief[uid]) for uid in uids) for of, uids in by_owner.items()}
    for of in sorted(by_owner, key=lambda of: (most[of], str(of))):
        fitting, spent = _fit({uid: brief[uid] for uid in by_owner[of]}, min(left, TEXTS_OF_OWNER))
        left -= spent
        out |= fitting
    return {uid: out[uid] for uid in brief}


def differ_in_texts_only(one: Mapping[str, Readiness], other: Mapping[str, Readiness]) -> bool:
    """No decision could be another: the same states of the same jobs, in other words."""
    return one.keys() == other.keys() and all(
        ready == other[uid] or ready.model_copy(update=_TEXTS) == other[uid].model_copy(update=_TEXTS)
        for uid, ready in one.items()
    )


def _first(found: Mapping[str, Readiness], pods: Collection[str], owner: Callable[[str], Hashable]) -> list[str]:
    """Those that have room, in the order in which they came."""
    if len(found) <= MOST_ENTRIES:
        return list(found)
    count: dict[Hashable, int] = defaultdict(int)
    ranks = {}
    for uid in sorted(found, key=lambda uid: (uid not in pods, uid)):
        count[owner(uid)] += 1
        ranks[uid] = uid not in pods, count[owner(uid)], uid
    kept = set(sorted(ranks, key=ranks.__getitem__)[:MOST_ENTRIES])
    return [uid for uid in found if uid in kept]


def _fit(entries: Mapping[str, Readiness], room: int) -> tuple[dict[str, Readiness], int]:
    """One user's, and the room that their texts take: first the sentences, the short ones before the long ones, then
    what processes printed."""
    out, spent = dict(entries), 0
    for field in _TEXTS:
        for uid in sorted(entries, key=lambda uid: (_size(getattr(entries[uid], field)), uid)):
            if (length := _size(getattr(entries[uid], field))) <= room - spent:
                spent += length
            else:
                out[uid] = out[uid].model_copy(update={field: NO_ROOM})
    return out, spent


def _brief(ready: Readiness) -> Readiness:
    """The same, with texts of bounded length; the very same where none is too long."""
    cut: dict[str, object] = {
        field: _shortened(text, TEXT_MAX) for field in _TEXTS if _size(text := getattr(ready, field)) > TEXT_MAX
    }
    if _size(ready.folder) > FOLDER_MAX:
        cut["folder"] = ""
    return ready.model_copy(update=cut) if cut else ready


def _size_of_texts(ready: Readiness) -> int:
    return _size(ready.reason) + _size(ready.error)


# --- the states of its pods

OF_POD = MOST_OF_LINE - 4096
"""Characters of a published pod's workers, reason and members that cannot be reached: other agents read as many
(``codec.decode_pod``)."""
OF_OWNER = OF_POD
"""The same of all pods of one user on a node. Pods that say little have room before those that say much."""
OF_BEAT = 2 << 20
"""The same of all pods of a node: users who say little have room before those who say much."""
REASON_MIN = 400
"""The same of a reason, for which there is room in any case."""
OF_WORKER, OF_PEER = 192, 96
"""The same of a worker apart from what it does, and of a member that cannot be reached, at most."""
ESCAPED = 6
"""Characters in JSON of one of a text that is not plain, at most."""
WORKER_PARTS, OTHER_PARTS = 7, 100
"""Values of a worker, and of a pod apart from its workers and those members."""


def pods_within_room(pods: Sequence[PodState], owner: Callable[[str], Hashable]) -> tuple[PodState, ...]:
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
    return _size(pod.reason) + OF_PEER * len(pod.unreachable) + sum(_sizes(pod.workers))


def _sizes(workers: Sequence[WorkerState]) -> list[int]:
    text = "".join(worker.doing for worker in workers)
    each = 1 if text.isprintable() and '"' not in text and "\\" not in text else ESCAPED
    return [OF_WORKER + each * len(worker.doing) for worker in workers]


def _fitting(pod: PodState, room: int) -> PodState:
    """The same, or with as many of its workers and those members as have room, and a reason that says so."""
    reason = _shortened(pod.reason, most) if _size(pod.reason) > (most := max(REASON_MIN, room // 2)) else pod.reason
    left = room - _size(reason)
    others = min(len(pod.unreachable), max(0, left) // OF_PEER)
    sizes = accumulate(_sizes(pod.workers[: (MOST_PARTS - OTHER_PARTS - others) // WORKER_PARTS]))
    fit = sum(1 for _ in takewhile(lambda total: total <= left - OF_PEER * others, sizes))
    notes = [reason]
    if fit < len(pod.workers):
        notes.append(f"the first {fit} of its {len(pod.workers)} workers are shown")
    if others < len(pod.unreachable):
        notes.append(f"{others} of the {len(pod.unreachable)} nodes that this one cannot reach are shown")
    if notes == [pod.reason]:
        return pod
    shown = {"workers": pod.workers[:fit], "unreachable": dict(islice(pod.unreachable.items(), others))}
    return pod.model_copy(update={**shown, "reason": "; ".join(filter(None, notes))})


# --- texts


def _shortened(text: str, most: int) -> str:
    """The beginning and the end, in so many bytes of JSON."""
    keep = most - len(GAP)
    while _size(short := text[: keep - keep // 3] + GAP + (text[-(keep // 3) :] if keep // 3 else "")) > most:
        keep = min(keep - 1, keep * most // _size(short))
    return short


def _size(text: str) -> int:
    """Bytes of JSON, without its quotes."""
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2
