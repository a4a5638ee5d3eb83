"""Decodes a job's record from what changed in it: one new acknowledgement in a gang of two thousand nodes is one
changed field, and all agents read it.

Keeps the texts and records that were read last, within a bound, with the revision up to which each is complete. The
store sends only the fields that changed since some revision; such a difference is used only if the record here is
complete up to that revision. In any doubt the record is dropped and must be read as a whole. The result must always
equal what ``codec.decode_job`` makes of the whole record; a part is reused only if its text is identical. A reused part
is the same object, so callers may compare by identity.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from nodeagent.model.base import Record
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.world import Member
from nodeagent.store import roster
from nodeagent.store.codec import (
    GENERATION_MAPS,
    JOB_MAPS,
    NAMES,
    decode_job,
    decode_member,
    decode_node,
    decode_part,
    is_number,
    pairs,
    whole,
)

ROOM = 48_000
"""Fields kept, of all jobs together. The smallest records are dropped first, since those are soon read as a whole; of
equal ones those that were read least recently."""
PARTS = ("spec", "admission", "control", "checkpoint", "outcome")
"""Fields of a job that are records of their own."""
COMPARED = ("rev", "phase", "generation_number", "generation_id", "generation_state")
"""What of a record must be as the news of a wake say: by these an agent starts, stops and ends its workers."""
DECIDED_BY = (
    "name", "owner", "phase", "control", "min", "max", "array", "at_once", "not_before", "restart_done",
    "active_number", "active_id", "checkpoint", "generation_control_rev", "generation_address", "generation_seal",
)  # fmt: skip
"""Fields by which steps decide, or agents that read the whole record. A difference brings them only where a step has
changed them."""
SHOWN = 2048
"""Characters of a text that a beat carries."""
_UNCHANGED = frozenset({"uid", "name", "owner", "spec", "admission", "control"})
"""What no step of a gang changes."""
_KINDS = {**GENERATION_MAPS, **JOB_MAPS}
_MEMBER = "member:"
_LISTED = "listed "
_HOLDER = "holder:"


class Base(NamedTuple):
    """How much of a job is decoded here: everything up to ``rev`` of ``era``."""

    rev: int
    era: str


@dataclass(slots=True)
class _Read:
    """A job as it was read last."""

    fields: dict[str, str]
    plain: dict[str, str]
    """Fields that are no entries of a map."""
    job: JobRecord
    era: str
    chain: int
    """The chain of beats that brought every change of this job; 0: a single step brought the record."""


class Decoder:
    """The decoder of one client. ``room``: the most fields that it keeps."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._read: dict[str, _Read] = {}
        self.nodes: dict[str, NodeRecord] = {}
        """As they were decoded last: members' texts follow from them."""
        self._size = 0
        self._chain = 1
        """Number of the present chain of beats: each beat asked for changes after a revision that an earlier one
        reached."""
        self._reached = Base(0, "")

    def base(self, uid: str) -> Base | None:
        """The base that a difference may be added to; None: the whole record has to come."""
        read = self._read.get(uid)
        return Base(read.job.rev, read.era) if read is not None and read.era else None

    def reached(self) -> tuple[int, Base]:
        """How far the beats have read; ``follow`` changes this."""
        return self._chain, self._reached

    def follow(self, asked: Base, reached: Base) -> None:
        """A beat asked for changes since ``asked``, and its reply brings everything up to ``reached``. Call this before
        decoding its records; ``asked.rev`` 0 begins anew."""
        before = self._reached
        if not (0 < asked.rev <= before.rev and asked.era == reached.era == before.era):
            self._chain, before = self._chain + 1, Base(0, "")
        self._reached = Base(max(before.rev, reached.rev), reached.era)

    def job(self, flat: Sequence[str], era: str = "", *, followed: bool = False) -> JobRecord:
        """A whole record, decoded as strictly as ``codec.decode_job`` does. ``followed``: the record is as new as what
        the beats have reached."""
        fields = pairs(flat)
        last = self._read.get(fields.get("uid", ""))
        if last is None:
            job = decode_job(flat)
        else:
            old = last.fields
            changes: dict[str, str | None] = {name: text for name, text in fields.items() if old.get(name) != text}
            job = _decoded(last, changes | dict.fromkeys(old.keys() - fields.keys()))
        if last is not None and last.era == era and last.job.rev > job.rev:
            return job  # a newer reply came first
        plain = {name: text for name, text in fields.items() if not _is_entry(name)}
        self._keep(_Read(fields, plain, job, era, self._chain if followed else 0))
        return job

    def news(
        self, uid: str, flat: Sequence[str | None], era: str, since: int, *, upto: int | None = None,
        followed: bool = False,
    ) -> JobRecord | None:  # fmt: skip
        """The record with these changed fields: all that changed since ``since``. None if the record here is not
        complete up to ``since``, or the members do not follow from the nodes that are known here. ``upto``: these are
        only some of the changes until then, so the record keeps its revision. ``followed``: a beat brought the
        fields."""
        last = self._read.get(uid)
        if last is None or last.era != era:
            return None
        linked = followed and last.chain == self._chain
        if last.job.rev < since and not linked:
            return None
        changes = _unpacked(last, flat, self.nodes)
        if changes is None:
            return None
        rev = int(changes.get("rev") or 0) if upto is None else upto
        if rev > last.job.rev:
            last.job = _decoded(last, changes)
            self._apply(last, changes)
        if followed:
            last.chain = self._chain
        return last.job

    def agrees(self, uid: str, flat: Sequence[str | None], record: Sequence[str | None]) -> bool:
        """Whether the job's record in the store (its fields ``COMPARED``, read at the same time) says what these news
        say, and is as new. Anybody who can write to the store can write news; a step writes the record, too."""
        last = self._read.get(uid)
        if last is None or len(record) != len(COMPARED):
            return False
        changes = dict(zip(map(str, flat[::2]), flat[1::2], strict=True))
        if any(field in changes and changes[field] != last.fields.get(field) for field in _UNCHANGED):
            return False
        (rev, *rest), (stored, *others) = (changes.get(field, last.fields.get(field)) for field in COMPARED), record
        if not is_number(rev) or not is_number(stored) or int(rev) > int(stored):
            return False
        return rest == others

    def decided_by(self, uid: str, rev: int, era: str) -> dict[str, str]:
        """Texts of the fields ``DECIDED_BY`` at this revision, but long ones; empty where there is no field. Nothing if
        the job is not known of this revision."""
        read = self._read.get(uid)
        if read is None or (read.job.rev, read.era) != (rev, era):
            return {}
        texts = {field: read.plain.get(field, "") for field in DECIDED_BY}
        return {field: text for field, text in texts.items() if len(text) <= SHOWN}

    def has(self, uid: str, flat: Sequence[str], era: str) -> bool:
        """Whether the job is known here in just these texts."""
        read = self._read.get(uid)
        return read is not None and read.era == era and read.fields == pairs(flat)

    def node(self, flat: Sequence[str], cordon: str) -> NodeRecord:
        """A node's record, decoded as ``codec.decode_node`` does."""
        found = decode_node(flat, cordon)
        self.nodes[found.id] = found
        return found

    def keep_nodes(self, names: Collection[str]) -> None:
        """These are all nodes that there are."""
        self.nodes = {name: node for name, node in self.nodes.items() if name in names}

    def forget(self, key: str) -> None:
        """The record is in the view no more."""
        kind, _, name = key.partition(":")
        if kind == "node":
            self.nodes.pop(name, None)
        read = self._read.pop(name, None) if kind == "job" else None
        self._size -= 0 if read is None else len(read.fields)

    def _apply(self, read: _Read, changes: Mapping[str, str | None]) -> None:
        self._size -= len(read.fields)
        for name, text in changes.items():
            kinds = [read.fields] if _is_entry(name) else [read.fields, read.plain]
            for fields in kinds:
                if text is None:
                    fields.pop(name, None)
                else:
                    fields[name] = text
        self._size += len(read.fields)
        self._keep(read)

    def _keep(self, read: _Read) -> None:
        old = self._read.pop(read.job.uid, None)
        self._size += len(read.fields) - (len(old.fields) if old is not None else 0)
        self._read[read.job.uid] = read
        if self._size > self._room:
            self._make_room()

    def _make_room(self) -> None:
        """For some records at once, since all are sorted."""
        for uid in sorted(self._read, key=lambda uid: len(self._read[uid].fields)):  # stable
            self._size -= len(self._read.pop(uid).fields)
            if self._size <= self._room * 7 // 8:
                return


def _unpacked(last: _Read, flat: Sequence[str | None], nodes: Mapping[str, NodeRecord]) -> dict[str, str | None] | None:
    """The fields of a difference, older ones first. The field ``holder:`` (or another kind) packs all entries of that
    kind: the first line is the revision, the second the rule for the members' entries. Then follow a line for each key
    and one for its text if the rule does not give it (an empty text where there is no entry). None if the members are
    listed, and do not follow from these nodes."""
    changes: dict[str, str | None] = {}
    news = zip(map(str, flat[::2]), flat[1::2], strict=True)
    for name, text in sorted(news, key=lambda field: not field[0].startswith(_MEMBER)):  # rules refer to members
        if not (name.endswith(":") and name[:-1] in _KINDS):
            changes[name] = text
            continue
        _, rule, *lines = (text or "").split("\n")
        if rule.startswith(_LISTED):
            members = roster.expand(lines, rule.removeprefix(_LISTED), nodes)
            if members is None:
                return None
            now = {name + key: value for key, value in members.items()}
        else:
            now = {name + key: value for key, value in _ruled(rule, last.fields, changes).items()}
            now |= {name + key: value for key, value in zip(lines[::2], lines[1::2], strict=True)}
        changes |= {field: None for field in last.fields if field.startswith(name) and not now.get(field)}
        changes |= {field: value for field, value in now.items() if value and last.fields.get(field) != value}
    return changes


def _ruled(rule: str, before: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The entries that this rule of a pack gives the members: node to text."""
    if not rule:
        return {}
    now = {**before, **changes}
    members = {name.removeprefix(_MEMBER): text for name, text in now.items() if text and name.startswith(_MEMBER)}
    if rule.startswith("="):
        return dict.fromkeys(members, rule[1:])
    if rule == "member":
        return members
    if rule != "life":
        raise ValueError(f"a job's difference has the unknown rule {rule[:20]!r}")
    return {node: _life(text) for node, text in members.items()}


@lru_cache(NAMES)
def _life(member: str) -> str:
    """A member's life as JSON, the text of entries that hold only the life."""
    return json.dumps(decode_member(member).life)


def _decoded(last: _Read, changes: Mapping[str, str | None]) -> JobRecord:
    """Calls ``_changed``. If it fails, the record here counts as incomplete: no later difference can be added."""
    try:
        return _changed(last, changes)
    except ValueError:
        last.chain = 0
        raise


def _is_entry(field: str) -> bool:
    kind, colon, _ = field.partition(":")
    return bool(colon) and kind in _KINDS


def _changed(last: _Read, changes: Mapping[str, str | None]) -> JobRecord:
    """The last record with these changes. Only new texts are decoded; the other parts are taken from the last
    record."""
    entries = {kind: set[str]() for kind in _KINDS}
    """Keys of new and removed entries, by kind."""
    plain, news = dict(last.plain), dict[str, str]()
    for field, text in changes.items():
        kind, colon, key = field.partition(":")
        if colon and kind in entries:
            entries[kind].add(key)
            if text is not None:
                news[field] = text
        elif text is None:
            plain.pop(field, None)
        else:
            plain[field] = text
    if last.job.generation is None or "generation_id" not in plain:
        fields = {name: text for name, text in last.fields.items() if name not in changes and _is_entry(name)}
        return decode_job(_flat(plain | fields | news))
    known = _known(last, changes, news)
    job = decode_part(_flat(plain | {field: text for field, text in news.items() if field not in known}))
    if job.generation is None:
        raise ValueError("a job's record has a generation that cannot be read")
    found = job.generation.model_copy(update={"holders": job.generation.holders | {m.node: m for m in known.values()}})
    generation = found.model_copy(update=_maps(GENERATION_MAPS, entries, last.job.generation, found))
    same = {name: getattr(last.job, name) for name in PARTS if last.plain.get(name) == plain.get(name)}
    return whole(job.model_copy(update={"generation": generation} | same | _maps(JOB_MAPS, entries, last.job, job)))


def _known(last: _Read, changes: Mapping[str, str | None], news: Mapping[str, str]) -> dict[str, Member]:
    """Holder fields whose text equals the member's that was decoded before: these are not decoded again."""
    assert last.job.generation is not None
    known = dict[str, Member]()
    for node, member in last.job.generation.members.items():
        field, place = f"{_HOLDER}{node}", f"{_MEMBER}{node}"
        if field in news and place not in changes and news[field] == last.fields[place] and member.node == node:
            known[field] = member
    return known


def _flat(fields: Mapping[str, str]) -> list[str]:
    return [word for field in fields.items() for word in field]


def _maps(
    kinds: Mapping[str, str], entries: Mapping[str, set[str]], before: Record, news: Record
) -> dict[str, dict[str, Any]]:
    """Each map with its changed entries; the previous object if nothing in it changed."""
    maps: dict[str, dict[str, Any]] = {}
    for kind, name in kinds.items():
        last, changed = getattr(before, name), entries[kind]
        if changed:
            last = dict(last)
            for key in changed:
                last.pop(key, None)
            last |= getattr(news, name)
        maps[name] = last
    return maps
