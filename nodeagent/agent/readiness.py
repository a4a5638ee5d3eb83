"""How much of a node's record its pods may take. A shim runs as the job's user, so what it says of its pod is whatever
that user likes, and every agent of the cluster reads it with each change of the record. A record that is too long
nobody reads: nothing of the node would be known, and nothing be decided.

What has no room is said as such. Must never change what a decision is made by: a state, its code, a folder's id.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping

from nodeagent.model.node import Readiness
from nodeagent.pods.bounds import FOLDER_MAX

TEXT_MAX = 800
"""Bytes of JSON of one sentence, or of what the job's processes printed. A longer one keeps its beginning and its
end."""
OF_OWNER = 16 << 10
"""The same of all texts of one user's pods on a node."""
OF_NODE = 128 << 10
"""The same of all texts of a node: users who say little have room before those who say much."""
MOST_ENTRIES = 2000
"""Pods and verdicts in a node's record, of which the store's reader takes 20,000 values. Pods come first; of verdicts
each user has as many as another."""
NO_ROOM = "too much to say of this user's jobs on this node"
"""Stands for a text that has no room."""
GAP = " ... "
_TEXTS = {"reason": "", "error": ""}


def within_room(
    found: Mapping[str, Readiness], pods: Collection[str], owner: Callable[[str], Hashable]
) -> dict[str, Readiness]:
    """The same, by job uid, as far as a node's record has room for it. ``pods``: uids of jobs that have a pod here;
    ``owner``: whose the job of a uid is."""
    brief = {uid: _brief(found[uid]) for uid in _first(found, pods, owner)}
    by_owner: dict[Hashable, list[str]] = defaultdict(list)
    for uid in brief:
        by_owner[owner(uid)].append(uid)
    if sum(map(_size_of_texts, brief.values())) <= OF_OWNER:
        return brief
    out: dict[str, Readiness] = {}
    left, most = OF_NODE, {of: sum(_size_of_texts(brief[uid]) for uid in uids) for of, uids in by_owner.items()}
    for of in sorted(by_owner, key=lambda of: (most[of], str(of))):
        fitting, spent = _fit({uid: brief[uid] for uid in by_owner[of]}, min(left, OF_OWNER))
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
        for uid in sorted(entries, key=lambda uid: (size(getattr(entries[uid], field)), uid)):
            if (length := size(getattr(entries[uid], field))) <= room - spent:
                spent += length
            else:
                out[uid] = out[uid].model_copy(update={field: NO_ROOM})
    return out, spent


def _brief(ready: Readiness) -> Readiness:
    """The same, with texts of bounded length; the very same where none is too long."""
    cut: dict[str, object] = {
        field: shortened(text, TEXT_MAX) for field in _TEXTS if size(text := getattr(ready, field)) > TEXT_MAX
    }
    if size(ready.folder) > FOLDER_MAX:
        cut["folder"] = ""
    return ready.model_copy(update=cut) if cut else ready


def shortened(text: str, most: int) -> str:
    """The beginning and the end, in so many bytes of JSON."""
    keep = most - len(GAP)
    while size(short := text[: keep - keep // 3] + GAP + (text[-(keep // 3) :] if keep // 3 else "")) > most:
        keep = min(keep - 1, keep * most // size(short))
    return short


def _size_of_texts(ready: Readiness) -> int:
    return size(ready.reason) + size(ready.error)


def size(text: str) -> int:
    """Bytes of JSON, without its quotes."""
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2
