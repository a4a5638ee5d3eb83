"""Queues: how several teams share one cluster. All of them are one record, so that a tree is changed whole or not at
all, and every agent reads the same one.

Owns the meaning of each field. Whether a tree can be is ``spec/queuecheck.py``'s, what follows from it ``plan/``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.jobspec import MOST_NODES

DEFAULT_QUEUE = "default"
"""The queue of jobs that name none. It always exists, also where none is stored."""
MOST_QUEUES = 256
MOST_DEVICES = 1_000_000
QUEUE_NAME = r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$"
"""As a job's name."""

QueueState = Literal["open", "closed"]
"""``closed``: takes no new jobs; those that it has go on."""


class Amount(Record):
    """An amount of what a cluster has. None: nothing is said of it."""

    gpus: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    nodes: int | None = Field(default=None, ge=0, le=MOST_NODES)
    """Pods: a node that two jobs of a queue share counts twice."""
    slots: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    """CPU slots."""

    @property
    def stated(self) -> dict[str, int]:
        """What something is said of, by name, in the order of the fields."""
        return {name: value for name in RESOURCES if (value := getattr(self, name)) is not None}


RESOURCES = tuple(Amount.model_fields)


class JobLimits(Record):
    """What one job of a queue may ask for."""

    max_nodes: int | None = Field(default=None, ge=1, le=MOST_NODES)
    """Of its ``nodes.max``."""
    max_time_limit: float | None = Field(default=None, gt=0)
    """Seconds; of its ``time_limit``. One without a limit gets the default, else this."""
    default_time_limit: float | None = Field(default=None, gt=0)
    """Seconds; the ``time_limit`` of a job that states none."""


class UserQuota(Record):
    """What the jobs of one user in a queue that have not ended may come to."""

    jobs: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    """By what each of them asks for at least."""


class Queue(Record):
    """One queue. Jobs are in queues without children; a queue with children shares out among these."""

    name: str = Field(pattern=QUEUE_NAME)
    parent: str = ""
    """Empty: it is at the top."""
    weight: float = Field(default=1.0, gt=0, le=1_000_000)
    """Its part of what is contended, against that of its siblings."""
    guarantee: Amount = Amount()
    """Always its own, whatever others ask for."""
    capability: Amount = Amount()
    """Its jobs never use more than this, however much is idle."""
    reclaimable: bool = True
    """What it uses above its guarantee may be taken back for others."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Jobs of a queue with a higher one go first, whatever their own priority."""
    state: QueueState = "open"
    limits: JobLimits = JobLimits()
    users: tuple[str, ...] = Field(default=(), max_length=1000)
    groups: tuple[str, ...] = Field(default=(), max_length=1000)
    """Who may submit: these users, and the members of these groups. Where neither names anybody, whoever may use its
    parent; at the top everybody."""
    default: bool = False
    """Jobs of those whom ``users`` and ``groups`` name go here if they name no queue. Of several such queues the first
    by name."""
    user_quota: UserQuota = UserQuota()


_DEFAULT = Queue(name=DEFAULT_QUEUE)


class Queues(Record):
    """The whole tree, as an operator left it. Every write raises ``rev``."""

    rev: int = Field(default=0, ge=0)
    """0: nothing is stored."""
    by: str = ""
    """Who wrote last."""
    queues: tuple[Queue, ...] = Field(default=(), max_length=MOST_QUEUES)
    """In the order of their names. ``default`` may be missing: it is as ``Queue`` has it then."""
    signature: str = ""
    """The cluster key's, of all this: agents act on no other (``trust/seal.py``)."""

    @cached_property
    def by_name(self) -> Mapping[str, Queue]:
        """Every queue, ``default`` included."""
        found = {queue.name: queue for queue in self.queues}
        return found if DEFAULT_QUEUE in found else {DEFAULT_QUEUE: _DEFAULT, **found}

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """Name to the names of its children, sorted; of ``""`` those at the top. A queue without children is not in
        it."""
        found: dict[str, list[str]] = {}
        for name, queue in sorted(self.by_name.items()):
            found.setdefault(queue.parent, []).append(name)
        return {name: tuple(below) for name, below in found.items()}

    def path(self, name: str) -> Iterator[Queue]:
        """The queue and those above it, up to the top; nothing if there is no such queue."""
        seen: set[str] = set()
        while (queue := self.by_name.get(name)) is not None and name not in seen:
            yield queue
            seen.add(name)
            name = queue.parent

    def guaranteed(self, name: str, resource: str) -> int:
        """What a queue has for itself: its own guarantee, or where it states none that of its children together."""
        own: int | None = getattr(self.by_name[name].guarantee, resource)
        if own is not None:
            return own
        return sum(self.guaranteed(child, resource) for child in self.children.get(name, ()))


class QueuesRecord(Record):
    """The tree as the store has it."""

    tree: Queues
    rev: int = 0
    """The store's revision, as of any record."""


NO_QUEUES = Queues()
"""A cluster that uses none: every job is in ``default``."""


def queue_of(named: str) -> str:
    """The queue of a job whose record names this one."""
    return named or DEFAULT_QUEUE
