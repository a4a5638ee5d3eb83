"""A job's record in the store: its control, its generations, and its events."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from nodeagent.model.base import RECORD_VERSION, Listed, Record
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.usage import Held, UsedTime
from nodeagent.model.world import Generation, PodReport, Token

RETENTION = "retention"
"""In events: who deletes jobs that have been kept for long enough."""


class JobEvent(Record):
    """One line of the capped stream."""

    id: str
    """The stream's id (milliseconds-sequence); orders events."""
    kind: str
    """e.g. JobSubmitted, GenerationForming, GenerationActive, GenerationStarted, WorkerFailed, NodeLost,
    NodeJoined, JobScaled, NodeCordoned."""
    job: str = ""
    """Name of the job."""
    uid: str = ""
    node: str = ""
    generation: int = 0
    by: str = ""
    """Node or user that caused the event, or ``RETENTION``."""
    text: str = ""


Phase = Literal["queued", "forming", "running", "holding", "pausing", "paused", "succeeded", "failed", "stopped"]
TERMINAL: frozenset[Phase] = frozenset({"succeeded", "failed", "stopped"})
USES_TIME: frozenset[Phase] = frozenset({"forming", "running", "pausing"})
"""Phases in which a job that has run has nodes, and uses up its time limit."""
Desired = Literal["run", "pause", "stop"]
Ends = Literal["failed", "stopped", "succeeded", "paused"]
"""What a fault, or a policy, makes of a job; ``paused``: until somebody resumes it."""


ScaleState = Literal["pending", "met", "rolled_back", "set"]
"""``set``: the job was paused, so the request waited for nothing: the target counts when the job runs again."""


class Scale(Record):
    """The newest change of the target. It is kept after its end, for people and for callers that wait for the end."""

    request: str
    """The request id that asked for it."""
    want: int = Field(ge=1)
    before: int = Field(ge=1)
    """The target to go back to: a number, never a list of members."""
    role: str = ""
    """Of a job of several roles: whose places ``want`` and ``before`` count. Empty: nodes."""
    timeout: float = Field(default=0.0, ge=0)
    """Scale-out: the seconds that it may take, for people."""
    deadline: int = 0
    """Scale-out: served time (ms) at which it is rolled back unless met. 0: no deadline."""
    grace: float | None = Field(default=None, ge=0)
    """Scale-in: seconds from SIGTERM to SIGKILL; None is the job's grace."""
    leaving: tuple[str, ...] = ()
    """Scale-in by name: these nodes leave the gang, and are the last to be chosen until the next scale."""
    state: ScaleState = "pending"
    reason: str = ""
    """How the scale ended, in a sentence for people."""


class Control(Record):
    """What operators want of a job. Every write raises ``rev``. Agents act on it; they write it only to settle a scale,
    to note that a job has ended that this one comes after, and to pause the job where a policy says so."""

    rev: int = Field(ge=1)
    desired: Desired = "run"
    target: int = Field(ge=1)
    """Nodes; of a job of several roles its places, all together."""
    sizes: dict[str, int] = {}
    """Role to how many places of it are wanted, of those that have been scaled."""
    restart: int = 0
    """Raised by ``restart``: the gang is re-formed once for each value."""
    delete: bool = False
    """The record is to be removed as soon as the job has ended and no node may still run its workers."""
    by: str = ""
    """The user or node that wrote last."""
    scale: Scale | None = None
    met: tuple[str, ...] = ()
    """Jobs and arrays (uids and ids) that this job comes after, and that have ended as required."""
    signature: str = ""
    """The cluster key's signature of this whole control for this job: agents act on no other (``trust/seal.py``)."""

    @property
    def growing(self) -> Scale | None:
        """The scale-out that is neither met nor rolled back yet."""
        return self.scale if self.scale is not None and self.scale.state == "pending" and self.scale.deadline else None

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that a scale-in named, until the next scale."""
        return frozenset(self.scale.leaving) if self.scale is not None else frozenset()


Number = Annotated[str, Field(pattern=r"^[0-9]{1,310}$")]
"""A generation's number as the key of a map: as many digits as a number of the store's scripts can have."""
Day = Annotated[str, Field(pattern=r"^-?[0-9]{1,6}$")]
"""A day since 1970-01-01 as the key of a map, for as long as calendars reach. Negative where the store's machine had
its clock at the beginning."""


class BudgetEntry(Record):
    """One entry of the restart budget, keyed by the number of the generation that ended. Also the job's fault
    history."""

    at: int
    """Served time (ms)."""
    wall: float
    """Unix time, for people only."""
    kind: str
    counts: bool
    """Whether the entry spends the budget: faults of the job do, membership changes and hardware do not."""
    node: str = ""
    rank: int | None = None
    text: str = ""
    error: str = ""
    """The blamed worker's last lines."""
    exit: int | None = None
    """The blamed worker's exit code, 128+n for signal n."""
    step: int | None = None
    """If it is a hang: the newest step that any worker reported."""
    progressed: bool = False
    """If it is a hang: the job had advanced further since the previous hang, or had run for long. If a worker asked to
    be re-formed, or somebody else had a port: its generation had run for ``Timing.early`` or longer."""
    stalled: float = Field(default=0.0, ge=0)
    """If it is a hang: seconds without progress until it was detected."""
    counted_by: str = ""
    """Node of group rank 0 of the generation that ended: its agent counts that generation's start."""
    room_for: tuple[str, ...] = ()
    """As the cause's: these jobs are first in line, for as long as they wait."""
    alone: tuple[int, ...] = ()
    """Served times (ms) at which workers of that generation were started again alone: each counts like an entry."""
    fails: str = ""
    """Not empty: the job ends for this reason, once no lost node can have been the cause."""
    ends: Ends = "failed"
    """What the job becomes then."""
    roles: tuple[str, ...] = ()
    """Of a job of several roles: those whose places the fault concerns."""


SetbackKind = Literal["unanswered", "crowded", "runtime", "failed", "lost", "unfit"]
"""How a node was no good to a job: it did not acknowledge a generation in time; others had filled its memory, so that
the kernel killed workers of the job; podman could start no container there; it was a newcomer, and its workers
failed at a start; it was lost, or its hardware turned unfit, soon after it had joined."""


class Setback(Record):
    """How a node was no good to a job (``plan/nodes/setbacks.py``)."""

    node: str
    kind: SetbackKind
    life: str = ""
    """Of a kind that another life of the node has no part in; else empty."""
    times: int = Field(ge=1)
    """How often, with nothing good in between."""
    at: int
    """Served time (ms) of the last time."""


class Outcome(Record):
    """How a job ended: its exit code (the blamed worker's; 128+n for a signal; 0 for success) and a sentence."""

    code: int
    text: str
    error: str = ""


SKEW = 2 * 3600
"""Seconds by which the clock that an admission was issued by may be ahead of that of who believes it: one issued later
than that is not believed, since it would convince for longer than its lifetime."""


class Admission(Record):
    """The cluster key's signature of this job's spec: it shows that the job was submitted through an agent
    (``trust/seal.py``). Renewed while the job lives."""

    by: str
    """The node that signed it."""
    issued: int
    """Unix time."""
    expires: int
    """Unix time after which an agent that has not seen the job before rejects the admission."""
    signature: str


LONGEST_NAME = 255
"""The most bytes of a folder's name."""


class Checkpoint(Record):
    """The checkpoint from which a job continues: the pointer, which only the newest active generation moves."""

    name: str
    """Name of its folder in checkpoint_dir."""
    step: int = Field(ge=0)
    number: int = Field(ge=0)
    """The generation that committed it."""
    order: int = Field(ge=0)
    """Grows with each commit of one generation."""
    signature: str = ""
    """Signature by the agent that carried the commit: workers are sent to no other checkpoint."""

    @property
    def from_memory(self) -> bool:
        """It is the newest snapshots of its generation, written out when the whole gang was given up."""
        return self.name.endswith("-snapshot")

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
            raise ValueError("a checkpoint's name is that of one folder, printable, of at most 255 bytes")
        return name


class Quota(Record):
    """The most that the jobs of one owner may use (``limits`` in the agent's config)."""

    jobs: int = Field(ge=1)
    """The most jobs that have not ended."""
    bytes: int = Field(ge=1)
    """The most bytes of the specs of all stored jobs, as JSON in UTF-8."""


class Owned(NamedTuple):
    """What the jobs of one owner use of a quota."""

    jobs: int
    """Those that have not ended."""
    bytes: int
    """As in the quota, of all stored jobs: those of the history, too."""


class Filled(NamedTuple):
    """What jobs take of what agents read."""

    jobs: int
    """Those that have ended too, until they are in the history."""
    bytes: int
    """Of their specs."""


class JobRecord(Record):
    """Everything about one job."""

    version: int = RECORD_VERSION
    uid: str
    name: str
    owner: int
    """uid of the submitter, from the agent's socket."""
    spec: JobSpec
    admission: Admission | None = None
    """None: no agent signed the job, and no agent will run it."""
    control: Control
    phase: Phase
    reason: str
    """Why the job is in this phase: one sentence, with the next step if there is one."""
    submitted: float
    """Unix time, for people only."""
    ended: float | None = None
    """Unix time of reaching a terminal phase: by the clock of the node that recorded it or, if that is far off, by the
    store's."""
    since: int = 0
    """Served time (ms) of entering the phase."""
    order: int = 0
    """Submit order, for the queue."""
    generation: Generation | None = None
    active: Token | None = None
    """The newest generation that was ever active."""
    failsafe_members: dict[str, str] = {}
    """Node to life: the failsafe members of ``active``. While the store is unreachable they lend its members time, all
    of them together, so nothing newer starts before one of them has let go. Empty: no node can lend."""
    first_active: int | None = None
    """Served time (ms) at which the first generation became active."""
    running_since: int | None = None
    """Served time (ms) at which a generation became active for the first time since the job last waited or was paused:
    however often its gang was formed anew since."""
    stands_since: int | None = None
    """Served time (ms) since which the job is to run again and does not: since it last ran, was resumed, or began to
    form for the first time, however often that failed since. None in every other phase than forming and holding."""
    started: float | None = None
    """Unix time at which the first generation became active, for people only."""
    ran: int = 0
    """Time (ms of served time) that the job had used of its time limit when it entered its phase."""
    restart_done: int = 0
    """The value of ``control.restart`` that the newest generation satisfies."""
    not_before: int = 0
    """Served time (ms) before which no new generation is proposed (backoff)."""
    budget: dict[Number, BudgetEntry] = {}
    """Number of each ended generation to how it ended. 64 entries are kept; those that count are kept
    longest."""
    last_reports: dict[str, PodReport] = {}
    """Node to its report about the generation that ended last: for ``describe`` and late blame."""
    last_number: int = 0
    """Number of the generation of ``last_reports`` (0: none yet)."""
    silent: dict[str, str] = {}
    """Node to life: members of generation ``last_number`` that have not answered since a fault that counts ended it.
    The fault is not judged while there are some: if one of them proves to be lost, it was the cause."""
    setbacks: Listed[Setback] = ()
    """What it remembers of nodes that were no good to it, the last few: for how long it goes on without them is
    ``plan/nodes/setbacks.py``'s."""
    restarts: int = 0
    """Generations that became active after the first."""
    outcome: Outcome | None = None
    checkpoint: Checkpoint | None = None
    held: Held | None = None
    """None: the job has not held a device yet."""
    used: dict[Day, UsedTime] = {}
    """Day to the job's use on that day, up to ``held.at``."""
    rev: int = 0

    @property
    def sized(self) -> JobSpec:
        """The spec with as many places of its roles as are wanted by now; of a role that is being scaled out all or
        none."""
        growing = self.control.growing
        return self.spec.of_sizes(self.control.sizes, growing.role if growing is not None else "")

    @property
    def sized_before(self) -> JobSpec:
        """Likewise without a scale-out that is neither met nor rolled back: what the job can run with."""
        growing = self.control.growing
        if growing is None or not growing.role:
            return self.sized
        return self.spec.of_sizes(self.control.sizes | {growing.role: growing.before})

    def time_used(self, served: int) -> int:
        """Milliseconds, at this served time, in which the job had its nodes, since its first start. Waiting and paused
        times do not count: other jobs may have the nodes then."""
        if self.first_active is None or self.phase not in USES_TIME:
            return self.ran
        return self.ran + max(0, served - max(self.since, self.first_active))

    def time_left(self, served: int) -> float | None:
        """Seconds of its time limit that are left; None without one."""
        limit = self.spec.time_limit
        return None if limit is None else max(0.0, limit - self.time_used(served) / 1000)

    def role_names_on(self, node: str) -> str:
        """For people: the roles whose places the node holds in the current generation; of any other node all roles."""
        member = self.generation.members.get(node) if self.generation is not None else None
        return (member.role_names if member is not None else "") or self.spec.role_names

    @property
    def outside_failsafe_members(self) -> tuple[str, ...]:
        """Those that are no members of the generation."""
        members = self.generation.members if self.generation is not None else {}
        return tuple(node for node in self.failsafe_members if node not in members)

    def concerns(self, node: str) -> bool:
        """Returns whether the node is, was or will be a member, holder or failsafe member, and so may have to act on
        the job."""
        generation = self.generation
        named = generation is not None and (
            node in generation.members or node in generation.holders or node in generation.failsafe_members
        )
        return named or node in self.failsafe_members or node in self.silent
