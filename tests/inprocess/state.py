"""What the keys of a cluster say, decoded by the product's codec, for tests to look at. Read only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nodeagent.model.job import JobEvent, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.queue import QueuesRecord
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import WindowsRecord
from nodeagent.store import codec
from nodeagent.store.decoder import Decoder
from tests.inprocess.data import Data, Expiring, SortedSet


class State:
    """Attributes are named as the keys and the fields of ``meta``. A record that has not changed is the same object."""

    def __init__(self, data: Data, prefix: str) -> None:
        self._data, self._prefix = data, prefix
        self._decoder = Decoder()
        self._names: dict[str, tuple[int, tuple[tuple[str, str], ...]]] = {}
        """By kind of record: the keys, each with its end, as they were when there were so many changes of names."""
        self._jobs: dict[str, tuple[str, JobRecord]] = {}
        self._nodes: dict[str, tuple[str, str, NodeRecord]] = {}

    def forget(self) -> None:
        """The keys are another server's from now on."""
        self._decoder = Decoder()
        self._jobs.clear()
        self._nodes.clear()

    def _hash(self, name: str) -> Mapping[str, str]:
        found = self._data.keys.get(self._prefix + name)
        return found if isinstance(found, dict) else {}

    def _meta(self, field: str) -> int:
        return int(self._hash("meta").get(field, "0"))

    def _records(self, kind: str) -> dict[str, Mapping[str, str]]:
        """Key's end to the hash, of all that are there."""
        known, keys = self._names.get(kind), self._data.keys
        if known is None or known[0] != self._data.names:
            begin = self._prefix + kind
            names = tuple((key[len(begin) :], key) for key in keys if key.startswith(begin))
            known = self._names[kind] = (self._data.names, names)
        return {name: value for name, key in known[1] if type(value := keys[key]) is dict}

    @property
    def jobs(self) -> dict[str, JobRecord]:
        """Uid to record, of all that can be read."""
        found, records = {}, self._records("job:")
        if len(self._jobs) > len(records):  # who gives one back may give another of the same revision
            self._jobs = {uid: known for uid, known in self._jobs.items() if uid in records}
        for uid, fields in records.items():
            rev, known = fields.get("rev", ""), self._jobs.get(uid)
            if known is None or known[0] != rev:
                flat = [word for pair in fields.items() for word in pair]
                try:
                    known = self._jobs[uid] = (rev, self._decoder.job(flat))
                except (ValueError, KeyError):  # somebody has written over it
                    continue
            if known[1].uid == uid:
                found[uid] = known[1]
        return found

    def activated(self, readable: Collection[str]) -> dict[str, int]:
        """Uid to the number of the last active generation, of the jobs whose record is not ``readable``: steps go on
        with one of which another field was written over."""
        if len(readable) == len(self._records("job:")):
            return {}
        found = {uid: fields.get("active_number", "") for uid, fields in self._records("job:").items()}
        return {uid: int(text) for uid, text in found.items() if uid not in readable and text.isdecimal()}

    @property
    def uids(self) -> set[str]:
        """Of all jobs that have a record, whether it can be read or not."""
        return set(self._records("job:"))

    @property
    def past(self) -> dict[str, JobRecord]:
        """The same of the history."""
        found = self._records("past:").items()
        return {uid: codec.decode_job([word for pair in fields.items() for word in pair]) for uid, fields in found}

    @property
    def usage(self) -> dict[str, UsageDay]:
        """By day."""
        found = {day: [word for pair in of.items() for word in pair] for day, of in self._records("usage:").items()}
        return {day: codec.decode_usage(day, flat) for day, flat in found.items()}

    @property
    def nodes(self) -> dict[str, NodeRecord]:
        cordons, found = self._hash("cordons"), {}
        for name, fields in self._records("node:").items():
            rev, cordon, known = fields.get("rev", ""), cordons.get(name, ""), self._nodes.get(name)
            if known is None or known[:2] != (rev, cordon):
                flat = [word for pair in fields.items() for word in pair]
                try:
                    known = self._nodes[name] = (rev, cordon, codec.decode_node(flat, cordon))
                except (ValueError, KeyError):
                    continue
            if known[2].id == name:
                found[name] = known[2]
        return found

    @property
    def queues(self) -> QueuesRecord | None:
        fields = self._hash("queues")
        return codec.decode_queues([word for pair in fields.items() for word in pair]) if fields else None

    @property
    def windows(self) -> WindowsRecord | None:
        fields = self._hash("windows")
        return codec.decode_windows([word for pair in fields.items() for word in pair]) if fields else None

    @property
    def lease(self) -> dict[str, int]:
        """Node to the end of its lease, in served ms; also of those that left or are lost."""
        return self._scores("departed") | self._scores("lease")

    @property
    def changes(self) -> dict[str, int]:
        return self._scores("changes")

    @property
    def awaited(self) -> frozenset[str]:
        return frozenset(self._scores("awaited"))

    def _scores(self, name: str) -> dict[str, int]:
        found = self._data.keys.get(self._prefix + name)
        return {member: int(score) for member, score in found.scores.items()} if isinstance(found, SortedSet) else {}

    @property
    def alloc(self) -> dict[str, dict[str, str]]:
        """Node to device to job's uid."""
        return {node: dict(devices) for node, devices in self._records("alloc:").items()}

    @property
    def pods(self) -> dict[tuple[str, str], PodState]:
        """By job's uid and node."""
        found = {}
        for key, value in self._data.keys.items():
            if key.startswith(f"{self._prefix}pod:") and isinstance(value, Expiring):
                uid, _, node = key[len(self._prefix) + 4 :].rpartition(":")
                found[uid, node] = PodState.from_json(value.text)
        return found

    @property
    def names(self) -> dict[str, str]:
        return dict(self._hash("names"))

    @property
    def highest(self) -> dict[str, int]:
        return {name: int(number) for name, number in self._hash("highest").items()}

    @property
    def events(self) -> list[JobEvent]:
        stream: Any = self._data.keys.get(self._prefix + "events")
        return [codec.decode_event(entry) for entry in stream.entries] if stream is not None else []

    @property
    def newest_event(self) -> str:
        stream: Any = self._data.keys.get(self._prefix + "events")
        return str(stream.entries[-1][0]) if stream is not None and stream.entries else "0-0"

    @property
    def run(self) -> str:
        return self._hash("meta").get("run", "")

    @property
    def era(self) -> str:
        return self._hash("meta").get("era", "")

    @property
    def cluster_uid(self) -> str:
        return self._hash("meta").get("cluster_uid", "")

    @property
    def served(self) -> int:
        return self._meta("served")

    @property
    def amnesty(self) -> int:
        return self._meta("amnesty")

    @property
    def rev(self) -> int:
        return self._meta("rev")

    @property
    def recovering(self) -> bool:
        """As of the last step."""
        return self.served < self._meta("recover")

    def lapsed(self, node: str) -> bool:
        """By the rule of docs/protocol.md."""
        record = self.nodes.get(node)
        if record is None or record.lost or record.left:
            return True
        shelter = max(self.amnesty, self._meta("recover"))
        return self.lease.get(node, self.served + 1) <= self.served and self.served >= shelter
