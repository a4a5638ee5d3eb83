"""The job as submitted: what to run, where it may run, and what to do when it fails.

Owns the meaning and the limits of each field. ``spec/`` parses what people write (YAML, positions, suggestions);
``plan/`` decides which nodes run the job. All durations are seconds (float); sizes are counts of nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from nodeagent.model.base import NAME, Record
from nodeagent.model.constraints import MOST_TEXT, Constraints
from nodeagent.model.duration import MOST_DURATION

Need = Literal["ok", "any"]
"""How the other job has to end: ``ok``: it has succeeded; ``any``: it has ended in any way."""
MOST_AFTER = 64
"""The most jobs that one job can wait for."""
MOST_MEMBERS = 1000
"""The most members of one array."""
MOST_JOBS = 256
"""The most jobs in one file."""
MOST_ROLES, MOST_ROLE_NAME = 16, 40
"""The most roles of a job, and characters of a role's name, with which each sentence about the role begins."""
MOST_INDEX = 9_999_999


def most_places(roles: int) -> int:
    """How many places a job of so many roles may have, all of them together."""
    return min(MOST_NODES, MOST_LAID // roles)


class After(Record):
    """A job, or a whole array, that has to end before this one starts."""

    uid: str = Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")
    """Uid of the job, or id of the array: a later job of the same name does not count."""
    name: str
    """The name, for people."""
    need: Need = "ok"
    array: int = Field(default=0, ge=0, le=MOST_MEMBERS)
    """Number of members if this is an array; else 0."""


class Array(Record):
    """The array that a job is a member of."""

    name: str
    id: str = Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")
    index: int = Field(ge=0, le=MOST_INDEX)
    """Index of this job in the array."""
    count: int = Field(ge=1, le=MOST_MEMBERS)
    first: int = Field(ge=0, le=MOST_INDEX)
    last: int = Field(ge=0, le=MOST_INDEX)
    at_once: int = Field(default=0, ge=0)
    """The most members that may have nodes at a time; 0: any number."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is submitted: its spec, the jobs that it comes after (by name), its array as the user wrote it, and
    what is counted from when the agent takes it."""

    spec: JobSpec
    after: Mapping[str, Need] = field(default_factory=dict)
    array: str = ""
    guess: bool = False
    """The user says nothing of what to preload, and leaves it to be found."""
    begin_in: float | None = None
    """Seconds before which it is not started; None: what the spec says of it."""


EventName = Literal[
    "WorkerFailed", "WorkerHung", "PodFailed", "PodEvicted", "NodeLost", "PodPending", "PodRunning", "TaskCompleted",
    "Unknown", "*",
]  # fmt: skip
"""What a policy can react to. ``*`` is any of ``FAULTS``."""
FAULTS: frozenset[EventName] = frozenset({"WorkerFailed", "WorkerHung", "PodFailed", "PodEvicted", "NodeLost"})
"""Events that end a generation. The others are what the job, or one of its roles, has come to."""
LASTING: frozenset[EventName] = frozenset({"PodPending", "PodRunning", "Unknown"})
"""States that are of interest once they have lasted."""
MOST_TIMEOUT = 31_536_000.0
"""Seconds that a policy may wait: a year."""

ActionName = Literal[
    "RestartJob", "RestartTask", "RestartPod", "AbortJob", "TerminateJob", "CompleteJob", "FailJob"
]  # fmt: skip
"""What a policy can do: re-form the gang; start a whole role, or one place of it, again while the others go on; pause
the job until somebody resumes it; or end it as stopped, succeeded or failed."""
RestartScope = Literal["gang", "worker", "place", "role"]
"""What is started again when a worker fails: all, itself alone, the workers of its place, or those of its role on all
nodes."""

NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
"""The values of torchrun's option."""

DEFAULT_ROLE = "worker"
MOST_NODES = 4096
"""The most nodes of a job, and the most places of one with two roles."""
MOST_LAID = 8192
"""The most places of a job of several roles, times its roles: for each place, each role is looked at."""
LATEST = 253_402_300_799
"""Unix time of the last second of the year 9999."""
DEFAULT_GRACE, MOST_GRACE = 30.0, 3600
"""Seconds that workers have to end after they are asked to; then they are killed. All others who are to leave the node
by a certain time leave so much earlier, too: with a day, a worker of one slot would empty it a day before a window."""
DEFAULT_FINISH = 300.0
"""Seconds that workers may do nothing once others have ended well."""


class Nodes(Record):
    """How many nodes a role wants. A fixed size has ``min == max == target``."""

    min: int = Field(ge=1, le=MOST_NODES)
    max: int = Field(ge=1, le=MOST_NODES)
    target: int = Field(ge=1, le=MOST_NODES)
    auto: bool = False
    """The role borrows idle nodes beyond its target, up to ``max``, until a job that is entitled to them needs them."""


class Ready(Record):
    """When a place is ready: its port accepts connections, or the command exits with 0. Exactly one of them."""

    port: bool = False
    """The ``NODEAGENT_PORT`` of its first worker."""
    command: tuple[str, ...] = ()
    """Run repeatedly on the place's node, in the environment of its first worker."""


class Policy(Record):
    """First match wins: an event (and, if given, the blamed worker's exit code) to an action."""

    on: tuple[EventName, ...] = Field(min_length=1)
    exit_code: int | None = None
    do: ActionName
    timeout: float | None = Field(default=None, gt=0, le=MOST_TIMEOUT)
    """Seconds for which what the event tells of has to last before the action is taken; None: it is taken at once."""

    def names(self, event: EventName, exit_code: int | None) -> bool:
        """Returns whether it is for this event and, if it names a code, for this exit code."""
        named = event in self.on or (event in FAULTS and "*" in self.on)
        return named and self.exit_code in (None, exit_code)


class Role(Record):
    """A named part of a job with its own command and size. A place is one replica of it: ``workers_per_node`` workers
    on one node."""

    name: str = Field(default=DEFAULT_ROLE, max_length=MOST_ROLE_NAME)
    command: tuple[str, ...] = Field(min_length=1)
    nodes: Nodes
    """The number of nodes, with one place on each; with ``replicas``, the number of nodes over which its places may be
    spread."""
    replicas: Nodes | None = None
    """The number of places; several are on one node if its devices allow it."""
    env: dict[str, str] = {}
    """Overrides the job's own environment."""
    after: tuple[str, ...] = ()
    """The workers start when all places of these roles are ready."""
    ready: Ready | None = None
    """None: a place is ready when its workers have been started."""
    restart: Literal["gang", "alone"] = "gang"
    """What a worker of it that fails takes along: the gang, or nobody: it is started again by itself."""
    policies: tuple[Policy, ...] | None = None
    """For what happens to its workers, in place of the job's; None: the job's."""
    grace: float | None = Field(default=None, ge=0, le=MOST_GRACE)
    """As the job's, for its workers; None: the job's."""
    workers_per_node: int | Literal["gpu"] = "gpu"
    """Workers of a pod; ``gpu`` is one per installed GPU (and one on a node without GPUs)."""
    gpus_per_worker: int | None = Field(default=None, ge=0, le=64)
    """None: one if the node has GPUs, else none."""
    uneven: bool = False
    """A node with fewer usable GPUs than its peers still takes part, with fewer workers."""
    virtual_local_rank: bool = False
    """Each worker sees only its own GPUs and has LOCAL_RANK 0, as with torchrun's option of this name."""
    placement: Constraints | None = None
    """What the role asks of its nodes, the job's own constraints included; None: nothing."""
    numa_binding: NumaBinding | None = None
    """The cores that a worker is bound to: all cores near its GPU, or a part of them that no other GPU has."""

    @property
    def size(self) -> Nodes:
        """The numbers of places: the fewest with which the role may start and go on, the most that it may be scaled to,
        and what it wants."""
        return self.replicas or self.nodes

    @property
    def places(self) -> int:
        """The number of places that the role wants."""
        return self.size.target

    @property
    def least(self) -> int:
        """The fewest places with which it may start and go on."""
        return self.size.min

    @property
    def alone(self) -> tuple[tuple[int | None, RestartScope], ...]:
        """What is started again when one of its workers fails, by exit code (None: any): the first that fits. Only what
        its own policies say, and then its ``restart``: the end of a job is not its shim's to decide."""
        says: dict[ActionName, RestartScope] = {"RestartJob": "gang", "RestartTask": "role", "RestartPod": "place"}
        rules = [
            (policy.exit_code, says[policy.do])
            for policy in self.policies or ()
            if policy.do in says and policy.timeout is None and policy.names("WorkerFailed", policy.exit_code)
        ]
        return (*rules, (None, "worker" if self.restart == "alone" else "gang"))

    def of_places(self, count: int, whole: bool = False) -> Role:
        """It with so many places, beside other roles. What was of a fixed size is so still; what was elastic may go on
        with as few as before, unless it has to be ``whole``."""
        fixed = self.size.min == self.size.max
        low, high = (count, count) if fixed else (min(self.size.min, count), max(self.size.max, count))
        size = Nodes(min=count if whole else low, max=high, target=count)
        if self.replicas is None:
            return self.model_copy(update={"nodes": size})
        return self.model_copy(update={"replicas": size, "nodes": Nodes(min=1, max=high, target=count)})


MOST_RESTARTS = 60
"""Largest budget: its entries are stored in the job's record, which keeps 64."""


class RestartLimits(Record):
    """The job's restart budget: at most ``max`` spent restarts within any ``window`` seconds."""

    max: int = Field(default=10, ge=0, le=MOST_RESTARTS)
    window: float = Field(default=3600.0, gt=0)
    backoff_min: float = Field(default=0.0, ge=0)
    backoff_max: float = Field(default=30.0, ge=0)
    """The n-th spent restart in the window waits min(backoff_max, max(backoff_min, 0.5) * 2**(n-3)) s from the third
    on; the first two wait ``backoff_min``."""


class Hooks(Record):
    """Commands run on each node, as the job's user, in the job's environment, once per pod and generation."""

    pre_start: tuple[str, ...] = ()
    """Runs before the workers of a generation; a failure counts as a failure of the pod."""
    post_stop: tuple[str, ...] = ()
    """Runs after the workers have stopped; its failure is only logged."""
    timeout: float = Field(default=60.0, gt=0, le=3600)


class Hang(Record):
    """When a gang that makes no progress is restarted."""

    progress: float | None = Field(default=None, gt=0)
    """Seconds without progress of any worker; None: learned from the job's own steps."""
    phases: float = Field(default=7200.0, gt=0)
    """Seconds allowed for a phase that a worker reports (evaluate, checkpoint, ...), unless it reports its own
    limit."""


class Container(Record):
    """What the workers of a job see as their file system."""

    runtime: Literal["podman", "apptainer"] = "podman"
    image: str = Field(min_length=1, max_length=4096)
    """A name in the user's image store (podman), a file (Apptainer), or the absolute path of a folder (both)."""
    binds: tuple[str, ...] = Field(default=(), max_length=64)
    """``FROM:TO`` or ``FROM:TO:ro``: what of the node is seen there besides the job's own folders."""


class Together(Record):
    """How close together the nodes of a gang must be."""

    within: str = Field(default="", max_length=MOST_TEXT)
    """All nodes must have one value of this label; empty: no such rule."""
    segments: int = Field(default=0, ge=0, le=MOST_NODES)
    """The nodes are groups of this size, each within one of the topology's smallest domains; 0: no groups."""


class Submitter(Record):
    """The submitter's environment, recorded at submission; nodeagent copies neither code nor environments."""

    user: str
    uid: int
    gid: int
    host: str
    cwd: str
    environ: dict[str, str] = {}
    """Only PATH, VIRTUAL_ENV, CONDA_PREFIX, LD_LIBRARY_PATH, PYTHONPATH, HOME, LANG and other basics without TERM."""


class JobSpec(Record):
    """One job, complete: every default is filled in."""

    name: str = Field(pattern=NAME)
    roles: tuple[Role, ...] = Field(min_length=1)
    """Several roles are one gang: they start together or not at all, each as a world of its own."""
    completes: str = ""
    """The job succeeds when all workers of this role have succeeded; the others are then stopped. Empty: when the
    workers of all roles have."""
    env: dict[str, str] = {}
    env_file: str | None = None
    """A file on each node, which the shim reads as the job's user; its content is never stored."""
    working_dir: str
    user: str
    checkpoint_dir: str | None = None
    container: Container | None = None
    """None: the workers see the node's own file system."""
    modules: tuple[str, ...] = Field(default=(), max_length=32)
    """Environment modules of the site, loaded in this order before anything of the job runs on a node."""
    limits: dict[str, int | Literal["infinity"]] = {}
    """rlimit name (``nofile``, ``memlock``, ``core``, ``stack``, ``nproc``) to soft = hard value."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    queue: str = Field(default="", max_length=63)
    """At submission: the queue that the user asked for. In a record: the queue that the job is in; empty means
    ``default``."""
    spot: bool = False
    """The job uses nodes that may be taken away at short notice even if it cannot continue with fewer nodes."""
    placement: Together | None = None
    """How close together the gang's nodes must be; None: no rule. Each role says which nodes it may use."""
    preload: tuple[str, ...] = ()
    """Modules imported ahead of time in the fork server."""
    guessed: tuple[str, ...] = Field(default=(), max_length=16)
    """Modules that the script was seen to import: imported likewise, if they are there and leave forking safe."""
    fork_server: bool = True
    grace: float = Field(default=DEFAULT_GRACE, ge=0, le=MOST_GRACE)
    restarts: RestartLimits = RestartLimits()
    policies: tuple[Policy, ...] = ()
    hooks: Hooks = Hooks()
    hang: Hang | Literal["off"] | None = None
    """``off``: hangs are not detected, but for those of ``finish``. None: at submission as the queue says; in a record,
    where no queue says anything, as ``off``."""
    finish: float | None = Field(default=DEFAULT_FINISH, gt=0)
    """Seconds that workers may do nothing once others have exited 0, in a job of one role without ``hang``; None: for
    ever."""
    hold_timeout: float | None = Field(default=None, gt=0, le=MOST_DURATION)
    """Seconds that a job may hold when nodes are missing before it fails; None: for ever."""
    time_limit: float | None = Field(default=None, gt=0, le=MOST_DURATION)
    """Seconds for which the job may have its nodes, from its first start on; None: for ever."""
    begin: float | None = Field(default=None, ge=0, le=LATEST)
    """Unix time before which the job does not start."""
    ttl: float | None = Field(default=None, ge=0, le=MOST_DURATION)
    """The most seconds for which its record is kept after its end; None: as long as the records of other jobs."""
    after: tuple[After, ...] = Field(default=(), max_length=MOST_AFTER)
    """The job starts when these jobs have ended."""
    array: Array | None = None
    """None: the job is not a member of an array."""
    submitter: Submitter

    @property
    def role(self) -> Role:
        """The only role, or the first of several."""
        return self.roles[0]

    @property
    def role_names(self) -> str:
        """The roles' names in one text, for people."""
        return ", ".join(role.name for role in self.roles)

    @property
    def ordered(self) -> bool:
        """Returns whether some of its roles start after others."""
        return any(role.after for role in self.roles)

    @property
    def several(self) -> bool:
        """Returns whether the job has several roles: then each place is placed by itself."""
        return len(self.roles) > 1

    @property
    def watched_by(self) -> Hang | None:
        """The limits by which a gang without progress hangs; None: it may be without, but for ``finish``."""
        return self.hang if isinstance(self.hang, Hang) else None

    @property
    def elastic(self) -> bool:
        """Returns whether the job can continue with fewer nodes than it has. Of several roles that depends on what is
        on the node."""
        return not self.several and self.nodes.min < self.nodes.max

    def policies_of(self, roles: Collection[str]) -> tuple[tuple[Policy, ...], ...]:
        """The lists for what happens to places of these roles, of none in a job of one role, in the order in which they
        are asked: those of the roles' own, as the roles stand in the file, then the job's, unless each of these roles
        has one of its own."""
        concerned = [one for one in self.roles if one.name in roles] or ([] if self.several else [self.role])
        own = tuple(one.policies for one in concerned if one.policies is not None)
        return own if concerned and len(own) == len(concerned) else (*own, self.policies)

    def graces(self, roles: Collection[str] = (), asked: float | None = None) -> tuple[float, dict[str, float]]:
        """Seconds that workers of these roles (none: of all) have to end at a planned stop, and which have less.
        ``asked``: what this stop gives instead of the job's grace; a role's own stays the most that its workers
        get."""
        found = dict[str, float]()
        for role in self.roles:
            if not roles or role.name in roles:
                own = role.grace if role.grace is not None else self.grace if asked is None else asked
                found[role.name] = own if asked is None else min(own, asked)
        longest = max(found.values(), default=self.grace if asked is None else asked)
        return longest, {name: seconds for name, seconds in found.items() if seconds < longest}

    @property
    def longest_grace(self) -> float:
        """Seconds after which a planned stop of the job is over."""
        return max([self.grace if role.grace is None else role.grace for role in self.roles], default=self.grace)

    def of_sizes(self, sizes: Mapping[str, int], whole: str = "") -> JobSpec:
        """It with so many places of the roles that are named. ``whole``: a role that has all of them, or the job does
        not start."""
        if not sizes:
            return self
        roles = tuple(role.of_places(sizes.get(role.name, role.places), role.name == whole) for role in self.roles)
        return self.model_copy(update={"roles": roles})

    @property
    def within(self) -> str:
        """``Together.within``; empty without a rule."""
        return self.placement.within if self.placement is not None else ""

    @property
    def segments(self) -> int:
        """``Together.segments``; 0 without a rule."""
        return self.placement.segments if self.placement is not None else 0

    @property
    def nodes(self) -> Nodes:
        """The numbers of nodes that the job may run on. Several roles may share nodes: then the maximum is the number
        of places, and the actual number depends on the devices that are free."""
        if not self.several:
            return self.role.nodes
        most = min(MOST_NODES, sum(role.places for role in self.roles))
        return Nodes(min=max(role.nodes.min for role in self.roles), max=most, target=most)
