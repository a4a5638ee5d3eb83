"""A generation of a gang: who is in it, who must still stop, who has acknowledged, and how its workers ended.

The head of a job is its newest generation. Its (number, id) is the fencing token. Maps are keyed by node id, never
lists, because the store's Lua cannot tell an empty list from an empty map.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from operator import attrgetter
from typing import Literal

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.pod import Stall

HeadState = Literal["forming", "active", "ended"]

CauseKind = Literal[
    "start", "worker_failed", "hang", "pod_failed", "node_lost", "collective", "reform", "fenced",
    "scale", "join", "share", "drain", "hardware", "resume", "restart",
]  # fmt: skip
"""Why a generation was formed. ``collective``: only victims of a broken collective seen so far, the culprit still
unknown. ``hang``: the gang made no progress. ``reform``: a worker asked for it (exit 101). ``fenced``: a node stopped
its own workers because it could not renew its lease. ``hardware``: a node or GPU that was used is unfit. ``share``:
idle nodes were borrowed, or borrowed ones given back."""


class Token(Record):
    """(number, id): numbers only grow per job name; the random id tells two histories apart."""

    number: int = Field(ge=0)
    id: str


class Place(Record):
    """One replica of a role, on the node of a member: so many workers of that role."""

    role: str
    index: int = Field(ge=0)
    """Within its role."""
    workers: int = Field(ge=1)
    devices: tuple[str, ...] = Field(min_length=1)
    """In local-rank order, as a member's."""

    @property
    def name(self) -> str:
        """``trainer.0``."""
        return f"{self.role}.{self.index}"

    @staticmethod
    def role_of(name: str) -> str:
        """Of ``trainer.0`` the role; empty of no place."""
        return name.rpartition(".")[0]

    @property
    def ports(self) -> int:
        """Ports that its node keeps for it: one for each worker, and where the role's rank 0 is, one for the role's
        rendezvous."""
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
    """Of a job of several roles: whose its workers and devices are, in their order. Ranks of roles are in the workers'
    environment only."""

    @property
    def ports(self) -> int:
        """Ports that its node keeps for its places."""
        return sum(place.ports for place in self.places)

    @property
    def role_names(self) -> str:
        """For people: whose places it holds; empty in a job of one role."""
        return ", ".join(dict.fromkeys(place.role for place in self.places))

    def ranks_of(self, role: str) -> frozenset[int]:
        """Of its workers of this role."""
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
    """A member or holder has no worker of an older generation left, and will start none. The store keeps of it what the
    others need, for all members together (``Head``)."""

    life: str
    ended: bool = False
    """It answers the generation's end, not its forming: one that comes late must not speak for what ran in between."""
    address: str = ""
    """From the node of group rank 0: host:port of the rendezvous it holds for this generation."""
    store_hosted: bool = False
    """The address is served by our store process (workers connect as clients), not by rank 0."""
    stuck: bool = False
    """SIGKILL was sent and something still has not gone (D state): its devices are not reused before a reboot."""
    lends: bool = False
    """A promise of this keeper may still lend time to workers of an older generation: it does not let go yet."""
    host: str = ""
    """The node's own address, as its agent knows it."""
    ports: tuple[int, ...] = ()
    """That it keeps for the places it holds, in the order of ``Place.ports``: those of the workers, then the
    rendezvous'."""
    signature: str = ""
    """The cluster key's, of life and addresses for this node and generation: workers are sent to no address that no
    agent named (``trust/seal.py``)."""
    stopped: float = 0.0
    """Seconds from this node's learning of the generation until nothing older ran here. For people."""
    ready: float = 0.0
    """Seconds from then to this acknowledgement. For people."""


BRIEF = 400
"""Most characters of a worker's last lines where there are many."""


class WorkerExit(Record):
    """How one worker ended."""

    rank: int
    local_rank: int
    pid: int
    code: int | None = None
    signal: int | None = None
    """Exactly one of code and signal is set."""
    stopped: bool = False
    """We stopped it (re-forming, stopping): it is never a cause."""
    order: int = 0
    """0 was the first to end on its node, then 1, 2, ..."""
    at: float = 0.0
    """Unix time on its node, for people only; never compared between nodes."""
    error: str = ""
    """Last lines of its standard error or its TORCHELASTIC_ERROR_FILE, at most 4000 characters. In a report only of
    the worker that counts on its node; of a victim the end, at most ``BRIEF``."""
    left_at: int | None = None
    """The step after which it left by itself when it was asked to."""
    saved_in: float | None = None
    """Seconds that saving its state took then; None if nothing was kept."""
    overdue: float | None = None
    """The grace, in seconds, that ran out before it had ended: then it was killed."""
    place: str = ""
    """Of a job of several roles: the name of its place."""
    missed: bool = False
    """It was to leave with the others, and died before it had begun to save; or it was killed since it waited for one
    that had."""


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
    error: str = ""
    """As of ``WorkerExit``, at most ``BRIEF``; of the newest only."""


class PodReport(Record):
    """What a member says of its pod in one generation. A later report of the same pod replaces the earlier one."""

    state: Literal["running", "succeeded", "failed", "lost", "fenced", "refused", "left"]
    """``lost``: the shim died. ``fenced``: the shim stopped the workers since nobody granted it time. ``refused``:
    could not start. ``left``: stopped as planned; ``reason`` says what became of its last steps."""
    exits: tuple[WorkerExit, ...] = ()
    reason: str = ""
    stall: Stall | None = None
    """While ``running``: what its workers do, when the gang may hang."""
    ready: tuple[str, ...] = ()
    """Names of its places that are ready, in a job whose roles start one after another."""
    completed: bool = False
    """Its workers of the role that completes the job have all ended well."""
    alone: tuple[AloneRestart, ...] = ()
    """Its workers that were started again alone in this generation, in the order they ended."""
    unreachable: dict[str, str] = {}
    """Members that its agent could not reach when it reported: node to the ``host:port`` asked. For people."""
    detected: float = 0.0
    """Failed: seconds from the first worker's end to this report. For people."""
    started: float = 0.0
    """``running``, of group rank 0 after a fault: seconds since its workers' first step, or since they run where they
    tell no steps."""
    seq: int = 0
    """Order of arrival at the store among this generation's reports (set by the store): the first fault has the
    lowest."""


class Cause(Record):
    """Why the gang was (re-)formed, stopped or held, as shown to the person."""

    kind: CauseKind
    text: str
    node: str = ""
    rank: int | None = None
    room_for: tuple[str, ...] = ()
    """Jobs (uids) that are to have the nodes that were given up."""


class Head(Record):
    """The newest generation of a job."""

    number: int = Field(ge=1)
    id: str
    state: HeadState
    members: dict[str, Member]
    holders: dict[str, Member] = {}
    """Nodes that may still run an older generation, each as it was a member of that: nothing new starts before they
    acknowledged or lapsed."""
    missing: dict[str, str] = {}
    """Node to life: members that have yet to acknowledge it."""
    hosts: dict[str, str] = {}
    """Node to its own address, as the members acknowledged it; of the others as they did before."""
    ports: dict[str, tuple[int, ...]] = {}
    """Node to the ports that it keeps for its places (``Ack.ports``)."""
    reports: dict[str, PodReport] = {}
    cause: Cause
    planned: bool = False
    """Older workers may take their grace (SIGTERM first); otherwise SIGKILL at once."""
    grace: float | None = None
    """If planned: that grace in seconds, where a scale-in set its own; None is the job's."""
    address: str = ""
    """Rendezvous host:port, by group rank 0's acknowledgement."""
    store_hosted: bool = False
    seal: str = ""
    """The sum of the signatures of all acknowledgements so far, in eight parts of 32 bits (``trust/seal.py``)."""
    released: bool = False
    """Forming only: one of the job's keepers has acknowledged it, and lends no more."""
    stopped: float = 0.0
    """The longest ``Ack.stopped`` of a member so far. For people."""
    ready: float = 0.0
    """Likewise of ``Ack.ready``."""
    since: int
    """Served time (ms) of entering the present state."""
    deadline: int = 0
    """Forming only: served time (ms) after which it is proposed again without those who did not acknowledge."""
    control_rev: int = 0
    """The control revision it was proposed under: a newer one means that an operator asked for something since."""
    keepers: dict[str, str] = {}
    """Node to life: those who keep this generation once it is active (``JobRecord.keepers``)."""
    outside: dict[str, str] = {}
    """Nodes that could have been members and are not: node to why (NODEAGENT_FAULTY)."""

    @property
    def sizes(self) -> Counter[str]:
        """Of a job of several roles: role to its places in this generation."""
        return Counter(place.role for member in self.members.values() for place in member.places)

    @property
    def token(self) -> Token:
        return _token(self.number, self.id)

    @property
    def world_size(self) -> int:
        return sum(m.workers for m in self.members.values())

    def ordered(self) -> tuple[Member, ...]:
        """Members by group rank."""
        return tuple(sorted(self.members.values(), key=_group_rank))


_group_rank = attrgetter("group_rank")


@lru_cache(maxsize=1024)
def _token(number: int, name: str) -> Token:
    """Asked for in every look at a job: the same one each time, which is compared in no time."""
    return Token(number=number, id=name)
