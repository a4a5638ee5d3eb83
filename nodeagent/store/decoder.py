"""Decodes records, a job's with what the same job's last one had in common with it: of a gang of two thousand nodes
one acknowledgement is new, and all agents read it.

Owns the texts and records decoded last, within a bound. Must never give another record than ``codec.decode_job`` would:
a part is taken over only where its text is the very same. Who compares records by identity finds those parts unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.model.base import Record
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.store.codec import HEAD_MAPS, JOB_MAPS, decode_job, decode_node, pairs

ROOM = 12_000
"""Fields kept, of all jobs together: the least recently read go first."""
PARTS = ("spec", "admission", "control", "checkpoint", "outcome")
"""Fields of a job that are records of their own."""
_KINDS = {**HEAD_MAPS, **JOB_MAPS}


@dataclass(frozen=True, slots=True)
class _Read:
    """A job as it was read last."""

    fields: Mapping[str, str]
    job: JobRecord


class Decoder:
    """One client's. ``room``: fields kept at most."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._read: dict[str, _Read] = {}
        self._size = 0

    def job(self, flat: Sequence[str]) -> JobRecord:
        """As ``codec.decode_job``, and as strict."""
        fields = pairs(flat)
        last = self._read.get(fields.get("uid", ""))
        if last is None or last.job.head is None or "head_id" not in fields:
            job = decode_job(flat)
        else:
            job = _mended(last, fields)
        self._keep(_Read(fields, job))
        return job

    def node(self, flat: Sequence[str], cordon: str) -> NodeRecord:
        """As ``codec.decode_node``."""
        return decode_node(flat, cordon)

    def _keep(self, read: _Read) -> None:
        old = self._read.pop(read.job.uid, None)
        self._size += len(read.fields) - (len(old.fields) if old is not None else 0)
        self._read[read.job.uid] = read
        while self._size > self._room:
            self._size -= len(self._read.pop(next(iter(self._read))).fields)


def _mended(last: _Read, fields: Mapping[str, str]) -> JobRecord:
    """What is new is decoded, the rest is the last record's."""
    old = last.fields
    entries = {kind: set[str]() for kind in _KINDS}
    """Keys of what is new or gone, by kind of entry."""
    news: list[str] = []
    for field, text in fields.items():
        kind, colon, key = field.partition(":")
        if colon and kind in entries:
            if old.get(field) == text:
                continue
            entries[kind].add(key)
        news += (field, text)
    for field in old.keys() - fields.keys():
        kind, colon, key = field.partition(":")
        if colon and kind in entries:
            entries[kind].add(key)
    job = decode_job(news)
    if job.head is None or last.job.head is None:
        raise ValueError("a job's record has a head that cannot be read")
    head = job.head.model_copy(update=_maps(HEAD_MAPS, entries, last.job.head, job.head))
    same = {name: getattr(last.job, name) for name in PARTS if old.get(name) == fields.get(name)}
    return job.model_copy(update={"head": head} | same | _maps(JOB_MAPS, entries, last.job, job))


def _maps(
    kinds: Mapping[str, str], entries: Mapping[str, set[str]], before: Record, news: Record
) -> dict[str, dict[str, Any]]:
    """Each map as it is now: the last one itself if nothing in it changed."""
    maps: dict[str, dict[str, Any]] = {}
    for kind, name in kinds.items():
        last, changed = getattr(before, name), entries[kind]
        if changed:
            last = {key: value for key, value in last.items() if key not in changed} | getattr(news, name)
        maps[name] = last
    return maps
