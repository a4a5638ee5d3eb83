"""The members of a generation as a list of names, from which a reader that knows the nodes makes their records.

Each node of a gang reads all members, and most of a member's text is its node's life and the names of its devices,
which every agent knows already. What is made of the list counts only if its digest is that of the texts in the store:
a reader may know another life of a node, or other devices. Must never guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter

from nodeagent.model.node import NodeRecord
from nodeagent.model.world import Member
from nodeagent.store.codec import decode_member


def shorten(members: Mapping[str, Member], nodes: Mapping[str, NodeRecord]) -> list[str]:
    """For each member, in the order of ranks, its node and an entry: its workers, and which of its node's devices it
    has; or its record, where that does not follow."""
    words: list[str] = []
    first = 0
    for rank, member in enumerate(sorted(members.values(), key=attrgetter("group_rank"))):
        node = nodes.get(member.node)
        entry = _entry(member, node)
        follows = node is not None and _member(node, entry, rank, first) == member
        words += [member.node, entry if follows else member.to_json()]
        first += member.workers
    return words


def expand(words: Sequence[str], digest: str, nodes: Mapping[str, NodeRecord]) -> dict[str, str] | None:
    """The members' texts, by node; None if they do not follow from these nodes. Raises ValueError if this is no
    list of members."""
    texts: dict[str, str] = {}
    first = 0
    for rank, (name, entry) in enumerate(zip(words[::2], words[1::2], strict=True)):
        if entry.startswith("{"):
            member, texts[name] = decode_member(entry), entry
        else:
            node = nodes.get(name)
            found = _member(node, entry, rank, first) if node is not None else None
            if found is None:
                return None
            member, texts[name] = found, found.to_json()
        first += member.workers
    return texts if _digest(texts) == digest else None


def _digest(texts: Mapping[str, str]) -> str:
    """As ``pack`` of ``_records.lua`` makes it of the record."""
    lines = "\n".join(word for pair in texts.items() for word in pair)
    return hashlib.sha1(lines.encode(), usedforsecurity=False).hexdigest()


def _entry(member: Member, node: NodeRecord | None) -> str:
    names = _devices(node) if node is not None else ()
    begin = names.index(member.devices[0]) if member.devices[0] in names else 0
    return f"{member.workers} {begin} {len(member.devices)}"


def _member(node: NodeRecord, entry: str, rank: int, first: int) -> Member | None:
    """The member that this entry stands for; None if the node does not have the devices."""
    workers, begin, count = map(int, entry.split(" "))
    devices = _devices(node)[begin : begin + count]
    if len(devices) != count:
        return None
    return Member(
        node=node.id, life=node.incarnation.life, group_rank=rank, first_rank=first, workers=workers, devices=devices
    )


def _devices(node: NodeRecord) -> tuple[str, ...]:
    """The names of all that there are, whatever their state."""
    return (*(gpu.uuid for gpu in node.facts.gpus), *(f"cpu{i}" for i in range(node.facts.cpu_slots)))
