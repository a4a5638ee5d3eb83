"""What the cluster's key signs. Of a job: its admission (the user, and the spec as submitted), each control, and each
member's acknowledgement of a generation. Also the tree of queues and the maintenance windows.

Defines the bytes that are signed. They come from the meaning of a record, not from its text: fields at their default do
not count, so that a version of nodeagent with more fields verifies the same signature. Must never decide what follows
from a bad signature, or read a clock.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Sequence

from nodeagent.model.base import Record
from nodeagent.model.job import Admission, Checkpoint, Control, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.queue import Queues
from nodeagent.model.window import Windows
from nodeagent.model.world import Ack, Token
from nodeagent.trust.key import ClusterKey

LIFETIME = 86_400
"""Seconds for which an admission is accepted by agents that have not seen its job before."""

PARTS = 8
"""Signatures are added as this many numbers of 32 bits."""

_DIGEST = "digest"
_JOB, _CONTROL, _ACK, _POINTER, _QUEUES, _WINDOWS = "job", "control", "ack", "checkpoint", "queues", "windows"
_PARTS = struct.Struct(f">{PARTS}I")


class Seal:
    """Signs and verifies for one cluster. Signatures for another cluster with the same key are not valid here."""

    def __init__(self, key: ClusterKey, cluster: str) -> None:
        self._key, self._cluster = key, cluster

    @property
    def digest(self) -> str:
        """The same text for all that have the same key, of the same cluster; it tells nothing of the key."""
        return self._key.sign(_DIGEST, self._cluster.encode())

    def admit(self, uid: str, owner: int, spec: JobSpec, now: float, node: str) -> Admission:
        """The admission of a new job. ``uid`` is random, and belongs to this job alone."""
        unsigned = Admission(by=node, issued=int(now), expires=int(now) + LIFETIME, signature="")
        signature = self._key.sign(_JOB, self._admitted(uid, spec.name, owner, spec, unsigned))
        return unsigned.model_copy(update={"signature": signature})

    def renewed(self, job: JobRecord, now: float, node: str) -> Admission:
        """The same admission for another lifetime. The caller has verified the job's present admission."""
        return self.admit(job.uid, job.owner, job.spec, now, node)

    def admits(self, job: JobRecord) -> bool:
        """Returns whether the key signed this admission for this job."""
        if job.admission is None:
            return False
        body = self._admitted(job.uid, job.name, job.owner, job.spec, job.admission)
        return self._key.verify(_JOB, body, job.admission.signature)

    def control(self, uid: str, control: Control) -> Control:
        """The control, signed for this job. Its ``rev`` must be the revision that the store will give it."""
        return control.model_copy(update={"signature": self._key.sign(_CONTROL, self._wanted(uid, control))})

    def controls(self, job: JobRecord) -> bool:
        """Returns whether the key signed this control for this job."""
        return self._key.verify(_CONTROL, self._wanted(job.uid, job.control), job.control.signature)

    def ack(self, uid: str, token: Token, node: str, ack: Ack) -> Ack:
        """An acknowledgement, signed for this node and generation. Only group rank 0's may name an address."""
        text = self._text(uid, token, node, ack.life, ack.host, ack.ports, ack.address, ack.store_hosted)
        return ack.model_copy(update={"signature": self._key.sign(_ACK, text)})

    def gang(self, job: JobRecord) -> bool:
        """Returns whether an agent of each member of the active generation has agreed to it, in this life and with this
        address, and group rank 0's has named its rendezvous. True if no generation is active.

        The store has the sum of their signatures: without the key, no one can compute the part of a missing
        signature."""
        generation = job.generation
        if generation is None or generation.state != "active":
            return True
        sums = [0] * PARTS
        for member in generation.members.values():
            rendezvous = (generation.address, generation.store_hosted) if member.group_rank == 0 else ("", False)
            host = generation.hosts.get(member.node, "")
            ports = generation.ports.get(member.node, ())
            text = self._text(job.uid, generation.token, member.node, member.life, host, ports, *rendezvous)
            signature = bytes.fromhex(self._key.sign(_ACK, text))
            sums = [total + part for total, part in zip(sums, _PARTS.unpack(signature), strict=True)]
        return hmac.compare_digest(" ".join(map(str, sums)).encode(), generation.seal.encode())

    def pointer(self, uid: str, checkpoint: Checkpoint) -> Checkpoint:
        """A committed checkpoint, signed for this job."""
        return checkpoint.model_copy(update={"signature": self._key.sign(_POINTER, self._pointed(uid, checkpoint))})

    def points(self, job: JobRecord) -> bool:
        """Returns whether an agent signed the checkpoint that the job continues from. True if the job has none."""
        found = job.checkpoint
        return found is None or self._key.verify(_POINTER, self._pointed(job.uid, found), found.signature)

    def queues(self, tree: Queues) -> Queues:
        """The tree of queues, signed. Its ``rev`` must be the revision that the store will give it."""
        return tree.model_copy(update={"signature": self._key.sign(_QUEUES, self._shared(tree))})

    def shares(self, tree: Queues) -> bool:
        """Returns whether the key signed this tree of queues."""
        return self._key.verify(_QUEUES, self._shared(tree), tree.signature)

    def windows(self, windows: Windows) -> Windows:
        """The maintenance windows, signed. Their ``rev`` must be the revision that the store will give them."""
        return windows.model_copy(update={"signature": self._key.sign(_WINDOWS, self._window_bytes(windows))})

    def windows_signed(self, windows: Windows) -> bool:
        """Returns whether the key signed these maintenance windows."""
        return self._key.verify(_WINDOWS, self._window_bytes(windows), windows.signature)

    def _window_bytes(self, windows: Windows) -> bytes:
        return _bytes(cluster=self._cluster, windows=_meaning(windows, "signature"))

    def _shared(self, tree: Queues) -> bytes:
        return _bytes(cluster=self._cluster, queues=_meaning(tree, "signature"))

    def _pointed(self, uid: str, checkpoint: Checkpoint) -> bytes:
        return _bytes(cluster=self._cluster, uid=uid, checkpoint=_meaning(checkpoint, "signature"))

    def _text(
        self, uid: str, token: Token, node: str, life: str, host: str, ports: Sequence[int], address: str,
        store_hosted: bool,
    ) -> bytes:  # fmt: skip
        return _bytes(
            cluster=self._cluster, uid=uid, number=token.number, id=token.id, node=node, life=life, host=host,
            ports=list(ports), address=address, store_hosted=store_hosted,
        )  # fmt: skip

    def _admitted(self, uid: str, name: str, owner: int, spec: JobSpec, admission: Admission) -> bytes:
        text = _meaning(admission, "signature")
        return _bytes(cluster=self._cluster, uid=uid, name=name, owner=owner, spec=_meaning(spec), admission=text)

    def _wanted(self, uid: str, control: Control) -> bytes:
        return _bytes(cluster=self._cluster, uid=uid, control=_meaning(control, "signature"))


def _meaning(record: Record, *without: str) -> dict[str, object]:
    return record.model_dump(mode="json", exclude_defaults=True, exclude=set(without))


def _bytes(**parts: object) -> bytes:
    return json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
