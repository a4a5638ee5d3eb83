"""Queues: how several teams share one cluster. All queues are one record, so an operator changes the whole tree or
nothing, and every agent reads the same tree.

Owns the meaning of each field. ``spec/queuefile.py`` checks whether a tree is valid; ``plan/`` decides by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from nodeagent.model.base import NAME, Record
from nodeagent.model.duration import MOST_DURATION
from nodeagent.model.jobspec import MOST_NODES

DEFAULT_QUEUE = "default"
"""The queue of jobs that name none. It always exists, even if none is stored."""
EVERYBODY = "*"
"""Among the users of a queue: all of them, whatever its parent says. No user has this name."""
MOST_QUEUES = 256
MOST_DEVICES = 1_000_000
MIN_RUNTIME = 60.0
"""Seconds that a job runs at least, once it has its nodes, before it is stopped for another queue; where no queue above
it has another ``min_runtime``."""
MOST_MIN_RUNTIME = 30 * 86400.0

QueueState = Literal["open", "closed"]
"""``closed``: the queue takes no new jobs; its jobs continue."""


class Amount(Record):
    """An amount of a cluster's resources. None: no limit on that resource."""

    gpus: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    nodes: int | None = Field(default=None, ge=0, le=MOST_NODES)
    """Number of pods: a node that two jobs of a queue share counts twice."""
    slots: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    """CPU slots."""

    @property
    def stated(self) -> dict[str, int]:
        """The resources that the amount limits, by name, in the order of the fields."""
        return {name: value for name in RESOURCES if (value := getattr(self, name)) is not None}


RESOURCES = tuple(Amount.model_fields)


def amount_text(count: int, resource: str) -> str:
    """``8 gpus``, ``1 slot``."""
    return f"{count} {resource.removesuffix('s') if count == 1 else resource}"


class JobLimits(Record):
    """The most that one job of a queue, or of a queue below it, may ask for. Of a queue and those above it, the
    strictest limit counts."""

    max_nodes: int | None = Field(default=None, ge=1, le=MOST_NODES)
    """The most of its ``nodes.max``; of a job of several roles, of the nodes that its places need at least."""
    max_time_limit: float | None = Field(default=None, gt=0, le=MOST_DURATION)
    """Seconds; the most of its ``time_limit``. A job without a time limit gets the default, else this."""
    default_time_limit: Annotated[float, Field(gt=0, le=MOST_DURATION)] | Literal["never"] | None = None
    """Seconds; the ``time_limit`` of a job that states none; ``never``: it has no time limit. None: as of its parent;
    at the top ``never``."""
    default_hang: Annotated[float, Field(gt=0)] | Literal["auto", "off"] | None = None
    """The ``hang`` of a job that states none: seconds without progress, ``auto`` or ``off``. None: as of its parent; at
    the top ``off``."""


class UserQuota(Amount):
    """The most that the jobs of one user in a queue and below it may ask for: an amount of resources, counted by what
    each job asks for at least, and a number of jobs. Jobs that have ended do not count."""

    jobs: int | None = Field(default=None, ge=1)


class QueueSettings(Record):
    """What may be set of a queue."""

    parent: str = ""
    """Name of the parent queue; empty: the queue is at the top."""
    weight: float = Field(default=1.0, gt=0, le=1_000_000)
    """Its part of contended resources, relative to its siblings."""
    guarantee: Amount = Amount()
    """Always available to this queue, whatever others ask for."""
    capability: Amount = Amount()
    """Its jobs never use more than this, however much is idle."""
    reclaimable: bool = True
    """Resources above its guarantee may be taken back for other queues."""
    min_runtime: float | None = Field(default=None, ge=0, le=MOST_MIN_RUNTIME)
    """Seconds that a job of this queue runs at least, once it has its nodes, before it is stopped for another queue.
    None: as of its parent; at the top ``MIN_RUNTIME``."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Jobs of a queue with a higher priority go first, whatever their own priority."""
    state: QueueState = "open"
    limits: JobLimits = JobLimits()
    users: tuple[str, ...] = Field(default=(), max_length=1000)
    groups: tuple[str, ...] = Field(default=(), max_length=1000)
    """Users who may submit: ``users`` (``EVERYBODY``: all of them), and the members of these groups. If both are empty:
    the users of the parent queue; at the top, all users."""
    default: bool = False
    """Jobs of the users in ``users`` and ``groups`` go here if they name no queue. If several such queues fit: the
    first by name."""
    user_quota: UserQuota = UserQuota()


class Queue(QueueSettings):
    """One queue. Jobs are in queues without children; a queue with children divides its share among them."""

    name: str = Field(pattern=NAME)


_DEFAULT = Queue(name=DEFAULT_QUEUE)


class Queues(Record):
    """The whole tree, as an operator wrote it. Every write raises ``rev``."""

    rev: int = Field(default=0, ge=0)
    """0: nothing is stored."""
    by: str = ""
    """The user who wrote last."""
    queues: tuple[Queue, ...] = Field(default=(), max_length=MOST_QUEUES)
    """In the order of their names. If ``default`` is missing, it has the defaults of ``Queue``."""
    signature: str = ""
    """The cluster key's signature of the whole tree: agents act on no other (``trust/seal.py``)."""

    @cached_property
    def by_name(self) -> Mapping[str, Queue]:
        """Every queue, ``default`` included."""
        found = {queue.name: queue for queue in self.queues}
        return found if DEFAULT_QUEUE in found else {DEFAULT_QUEUE: _DEFAULT, **found}

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """Name to the names of its children, sorted; ``""`` to the queues at the top. A queue without children is no
        key."""
        found: dict[str, list[str]] = {}
        for name, queue in sorted(self.by_name.items()):
            found.setdefault(queue.parent, []).append(name)
        return {name: tuple(below) for name, below in found.items()}

    @cached_property
    def paths(self) -> Mapping[str, tuple[str, ...]]:
        """Name to the names of the queue and those above it, up to the top."""
        return {name: tuple(queue.name for queue in self.path(name)) for name in self.by_name}

    def path(self, name: str) -> Iterator[Queue]:
        """The queue and those above it, up to the top; nothing if there is no such queue."""
        seen: set[str] = set()
        while (queue := self.by_name.get(name)) is not None and name not in seen:
            yield queue
            seen.add(name)
            name = queue.parent

    def too_small(self, name: str, needs: Mapping[str, int]) -> tuple[Queue, str, int] | None:
        """The first queue on the path that may never have so much, with the resource and how much of it it may have.
        ``needs``: by resource."""
        for queue in self.path(name):
            for resource, cap in queue.capability.stated.items():
                if needs[resource] > cap:
                    return queue, resource, cap
        return None

    def min_runtime(self, name: str) -> float:
        """Seconds that a job of this queue runs at least before it is stopped for another queue."""
        return next((queue.min_runtime for queue in self.path(name) if queue.min_runtime is not None), MIN_RUNTIME)

    def guaranteed(self, name: str, resource: str) -> int:
        """The resources that a queue always has: its own guarantee; if it states none, the sum of its children's."""
        own: int | None = getattr(self.by_name[name].guarantee, resource)
        if own is not None:
            return own
        return sum(self.guaranteed(child, resource) for child in self.children.get(name, ()))


class QueuesRecord(Record):
    """The tree as the store keeps it."""

    tree: Queues
    rev: int = 0
    """The store's revision of the record."""


NO_QUEUES = Queues()
"""The tree of a cluster without queues: every job is in ``default``."""


def queue_of(named: str) -> str:
    """The queue of a job whose record has this name in it."""
    return named or DEFAULT_QUEUE
