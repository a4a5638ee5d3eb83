"""A generation of a gang: its members, the nodes that must still stop, the acknowledgements, and how its workers ended.

The current generation of a job is its newest one. Its (number, id) is the fencing token. Maps are keyed by node id, and
are never lists, because the store's Lua cannot tell an empty list from an empty map.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from operator import attrgetter
from signal import Signals
from typing import Annotated, Literal

from pydantic import Field, field_validator

from nodeagent.model.base import Listed, Port, Record, Whole
from nodeagent.model.pod import Stall

GenerationState = Literal["forming", "active", "ended"]

CauseKind = Literal[
    "start", "worker_failed", "hang", "pod_failed", "node_lost", "collective", "reform", "fenced", "port_taken",
    "crowded", "runtime_failed", "join_failed", "scale", "join", "share", "drain", "hardware", "resume",
    "restart",
]  # fmt: skip
"""Why a generation was formed. ``collective``: workers failed and all of them speak of lost peers, so who failed first
is unknown. ``hang``: the gang made no progress. ``reform``: a worker requested it (exit 101). ``fenced``: a node
stopped its own workers because it could not renew its lease, or has let go of the job. ``port_taken``: another user's
process has a port that was kept for the workers. ``crowded``: the kernel killed a worker since the machine's memory was
full, of which its pod had no more than its share. ``runtime_failed``: podman could not start a container.
``join_failed``: workers of a newcomer failed at a start. ``hardware``: a node or GPU in use is unfit.
``share``: idle nodes were borrowed, or borrowed ones returned."""


class Token(Record):
    """(number, id): numbers only grow for each job name; the random id distinguishes two histories."""

    number: int = Field(ge=0, lt=1 << 63)
    id: str


class Place(Record):
    """One replica of a role, on the node of a member, with its workers of that role."""

    role: str
    index: int = Field(ge=0)
    """Index within its role."""
    workers: int = Field(ge=1)
    devices: tuple[str, ...] = Field(min_length=1)
    """Devices in local-rank order, a part of the member's devices."""

    @property
    def name(self) -> str:
        """The place's name: ``trainer.0``."""
        return f"{self.role}.{self.index}"

    @staticmethod
    def role_of(name: str) -> str:
        """Of ``trainer.0`` the role; empty of no place."""
        return name.rpartition(".")[0]

    @property
    def ports(self) -> int:
        """Number of ports that its node keeps for it: one for each worker, and on the place of the role's rank 0 one
        more for the role's rendezvous."""
        return self.workers + (self.index == 0)


class Member(Record):
    """One node's place in a world. Its workers have ranks first_rank .. first_rank + workers - 1."""

    node: str
    life: str
    group_rank: int = Field(ge=0)
    first_rank: int = Field(ge=0)
    workers: int = Field(ge=1)
    devices: tuple[str, ...] = Field(min_length=1)
    """Devices in local-rank order: gpus_per_worker GPUs per worker, or one cpu slot per worker."""
    places: tuple[Place, ...] = ()
    """In a job of several roles: the places that its workers and devices belong to, in their order. Only the workers'
    environment has ranks within roles."""
    down: tuple[str, ...] = ()
    """Of a holder: roles of which no worker runs there any more, while others still stop (``Ack.down``)."""
    joined: int = 0
    """Of a newcomer: served time (ms) of the proposal with which it joined a gang that had run before. 0: it is none,
    or no more (``plan/nodes/setbacks.py``)."""

    @property
    def ports(self) -> int:
        """Number of ports that its node keeps for its places."""
        return sum(place.ports for place in self.places)

    @property
    def role_names(self) -> str:
        """For people: the roles whose places it holds; empty in a job of one role."""
        return ", ".join(dict.fromkeys(place.role for place in self.places))

    def ranks_of(self, role: str) -> frozenset[int]:
        """The ranks of its workers of this role."""
        first, found = self.first_rank, set[int]()
        for place in self.places:
            if place.role == role:
                found.update(range(first, first + place.workers))
            first += place.workers
        return frozenset(found)

    def place_of(self, rank: int) -> Place | None:
        """The place of the worker of this rank; None in a job of one role."""
        first = self.first_rank
        for place in self.places:
            if first <= rank < first + place.workers:
                return place
            first += place.workers
        return None


class Ack(Record):
    """A member or holder has no worker of an older generation left, and will start none. The store keeps the parts that
    other agents need, for all members together (``Generation``)."""

    life: str
    ended: bool = False
    """The ack answers the generation's end, not its forming: a late ack must not cover workers that ran in between."""
    address: str = ""
    """From the node of group rank 0: host:port of the rendezvous that it holds for this generation."""
    store_hosted: bool = False
    """Our store process serves the address (workers connect as clients), not rank 0."""
    stuck: bool = False
    """SIGKILL was sent and some process still exists (D state): its devices are given to nobody before it ends
    (``NodeFacts.held``)."""
    lends: bool = False
    """A promise of this failsafe member may still lend time to workers of an older generation: it has not let go
    yet."""
    host: str = ""
    """The node's own address, as its agent knows it."""
    ports: tuple[Port, ...] = ()
    """Ports that the node keeps for its places, in the order of ``Place.ports``: those of the workers, then the
    rendezvous'."""
    signature: str = ""
    """The cluster key's signature of life and addresses for this node and generation: workers are sent only to an
    address that an agent named (``trust/seal.py``)."""
    down: tuple[str, ...] = ()
    """Nothing is acknowledged yet, but that no worker of these roles runs here any more: they came after workers on
    other nodes, which may stop now."""
    stopped: float = 0.0
    """Seconds from when this node received the generation until nothing older ran here. For people."""
    ready: float = 0.0
    """Seconds from then to this acknowledgement. For people."""


BRIEF = 400
"""The most characters of a worker's last lines if there are many workers."""


class Starved(Record):
    """What a pod held when the kernel killed one of its workers, since memory was full that is not the pod's alone."""

    held: Annotated[Whole, Field(ge=0)]
    """Bytes, swapped ones included, that the pod had lately and that nobody could take from it."""
    total: Annotated[Whole, Field(gt=0)]
    """Bytes of memory and swap that there are for all pods of the node, or for the whole machine."""


def signal_words(number: int) -> str:
    """``SIGKILL (9)``; of one without a name ``signal 35``."""
    try:
        return f"{Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


class WorkerExit(Record):
    """How one worker ended."""

    rank: Whole
    local_rank: Whole
    pid: Whole
    code: Whole | None = None
    signal: Whole | None = None
    """Exactly one of code and signal is set."""
    stopped: bool = False
    """The agent stopped it (re-forming, stopping): it is never a cause."""
    order: Whole = 0
    """0 for the first worker to end on its node, then 1, 2, ..."""
    at: float = 0.0
    """Unix time on its node, for people only; never compared between nodes."""
    error: str = ""
    """Last lines of its standard error or its TORCHELASTIC_ERROR_FILE, at most 4000 characters. A report has it only
    for the worker that counts on its node, at most ``BRIEF`` characters if that is a victim; for each other victim it
    has the words that make it one."""
    left_at: Whole | None = None
    """The step after which it left by itself when it was asked to leave."""
    saved_in: float | None = None
    """Seconds that it took to save its state then; None if nothing was saved."""
    overdue: float | None = None
    """The grace, in seconds, that ran out before it had ended: then it was killed."""
    place: str = ""
    """Of a job of several roles: the name of its place."""
    round: Whole = 0
    """It was started again with its whole role, for this round of it (``PodReport.rounds``); 0: it was not."""
    starved: Starved | None = None
    """It was killed for want of memory, not by a limit of its own pod."""
    missed: bool = False
    """It was to leave with the others and died before it began to save; or it was killed because it waited for a worker
    that did so."""


MOST_ALONE = 64
"""Restarts of workers alone that a report, or an entry of the budget, names: the newest. A budget allows fewer."""


class AloneRestart(Record):
    """A worker failed, and was started again by itself while its gang went on."""

    rank: int
    order: int
    """As of ``WorkerExit``."""
    at: int
    """Served time (ms) at which its agent learned of it."""
    exit: int
    """Its exit code, 128+n for signal n."""
    text: str
    """For people: which worker it was, and how it ended."""
    round: int = 0
    """As of ``WorkerExit``: workers of a role that failed in one round cost one restart together."""
    error: str = ""
    """As of ``WorkerExit``, at most ``BRIEF``; of the newest only."""
    crowded: bool = False
    """It costs nothing: as ``PodReport.crowded``."""


class PodReport(Record):
    """What a member reports about its pod in one generation. A later report of the same pod replaces the earlier
    one."""

    state: Literal["running", "succeeded", "failed", "lost", "fenced", "refused", "left"]
    """``lost``: the shim died. ``fenced``: the shim stopped the workers because no agent granted it time, or the
    node has let go of the job. ``refused``: the workers could not start. ``left``: stopped as planned; ``reason`` says
    whether the last steps were saved."""
    exits: Listed[WorkerExit] = ()
    """None if ``succeeded``: all workers have exited 0."""
    reason: str = ""
    """For everybody."""
    error: str = ""
    """If ``refused`` because of a hook: what it printed last, for the job's owner and operators."""
    runtime_failed: bool = False
    """If ``refused``: since podman could not start the container of a worker, whose command never ran. What ``reason``
    says before its first colon is to be followed by "on" and the node."""
    taken: str = ""
    """If ``failed``: as of ``PodStatus``."""
    crowded: str = ""
    """If ``failed``, and the machine's memory was full when the worker that counts on its node was killed, but its pod
    held no more than its share: the amounts, in words."""
    stall: Stall | None = None
    """While ``running`` and if the gang may hang: what its workers do."""
    ready: tuple[str, ...] = ()
    """Names of its ready places, in a job whose roles start one after another."""
    completed: bool = False
    """Its workers of the role that completes the job have all ended well."""
    tasks: tuple[str, ...] = ()
    """Roles for whose completion a policy waits, and whose workers here have all ended well."""
    alone: Listed[AloneRestart] = ()
    """Its workers that were started again alone in this generation, in the order they ended."""
    rounds: dict[str, int] = {}
    """Of roles that are started again as a whole: role to a round of it, of which this is a promise: no worker of an
    earlier round runs here, and none will. The gang's own start is round 0."""
    unreachable: dict[str, str] = {}
    """Members that its agent could not reach when it reported: node to the ``host:port`` that it tried. For people."""
    detected: float = 0.0
    """If failed: seconds from the first worker's end to this report. For people."""
    started: float = 0.0
    """If ``running``, from group rank 0 after a fault: seconds since its workers' first step; if they report no steps,
    since they run."""
    seq: int = 0
    """Order of arrival at the store among this generation's reports (the store sets it): the first fault has the
    lowest."""


class Cause(Record):
    """Why the gang was (re-)formed, stopped or held, as people see it."""

    kind: CauseKind
    text: str
    node: str = ""
    rank: int | None = None
    room_for: tuple[str, ...] = ()
    """Jobs (uids) that the freed nodes are meant for."""


class Generation(Record):
    """The newest generation of a job."""

    number: int = Field(ge=1)
    id: str
    state: GenerationState
    members: dict[str, Member]
    holders: dict[str, Member] = {}
    """Nodes that may still run an older generation, each with its member entry of that generation: nothing new starts
    before they acknowledged or lapsed."""
    missing: dict[str, str] = {}
    """Node to life: members that have yet to acknowledge this generation."""
    hosts: dict[str, str] = {}
    """Node to its own address, from the members' acknowledgements; of members that have not acknowledged, the address
    from before."""
    ports: dict[str, tuple[int, ...]] = {}
    """Node to the ports that it keeps for its places (``Ack.ports``)."""
    reports: dict[str, PodReport] = {}
    cause: Cause
    planned: bool = False
    """Older workers may take their grace (SIGTERM first); otherwise SIGKILL at once."""
    grace: float | None = None
    """If planned: that grace in seconds, if a scale-in set its own; None: the job's grace."""
    address: str = ""
    """Rendezvous host:port, from group rank 0's acknowledgement."""
    store_hosted: bool = False
    seal: str = ""
    """The sum of the signatures of all acknowledgements so far, in eight parts of 32 bits (``trust/seal.py``)."""
    released: bool = False
    """Forming only: one of the job's failsafe members has acknowledged this generation, and lends no more."""
    stopped: float = 0.0
    """The longest ``Ack.stopped`` of a member so far. For people."""
    ready: float = 0.0
    """The longest ``Ack.ready`` of a member so far. For people."""
    since: int
    """Served time (ms) of entering the present state."""
    deadline: int = 0
    """Forming only: served time (ms) after which it is proposed again without the nodes that did not acknowledge."""
    control_rev: int = 0
    """The control revision it was proposed under: a newer one means that an operator has requested something since."""
    failsafe_members: dict[str, str] = {}
    """Node to life: the nodes that keep this generation once it is active (``JobRecord.failsafe_members``)."""
    outside: dict[str, str] = {}
    """Nodes of the generation before, and some that have a fault, that are no members: node to reason
    (NODEAGENT_FAULTY)."""

    @field_validator("members", "holders")
    @classmethod
    def _keyed_by_node(cls, found: dict[str, Member]) -> dict[str, Member]:
        for node, member in found.items():
            if member.node != node:
                raise ValueError(f"node {node} has the place of node {member.node}")
        return found

    @property
    def sizes(self) -> Counter[str]:
        """Of a job of several roles: role to its places in this generation."""
        return Counter(place.role for member in self.members.values() for place in member.places)

    @property
    def token(self) -> Token:
        return _token(self.number, self.id)

    @property
    def occupied(self) -> tuple[str, ...]:
        """Nodes that run workers of this or an older generation, or are about to: members first, each once."""
        return tuple(dict.fromkeys([*(self.members if self.state != "ended" else ()), *self.holders]))

    @property
    def world_size(self) -> int:
        return sum(m.workers for m in self.members.values())

    def ordered(self) -> tuple[Member, ...]:
        """Members by group rank."""
        return tuple(sorted(self.members.values(), key=_group_rank))


_group_rank = attrgetter("group_rank")


@lru_cache(maxsize=1024)
def _token(number: int, name: str) -> Token:
    """The token, cached: every view of a job needs it, and comparing the same object is fast."""
    return Token(number=number, id=name)
