"""The job as submitted: what to run, where it may run, and what to do when it fails.

Owns the meaning and the limits of each field. How a person writes it (YAML, positions, suggestions) is ``spec/``'s;
who runs it where is ``plan/``'s. All durations are seconds (float); sizes are counts of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.batch import MOST_AFTER, After, Array
from nodeagent.model.constraints import MOST_TEXT, Constraints

EventName = Literal["WorkerFailed", "WorkerHung", "PodFailed", "PodEvicted", "NodeLost", "*"]
"""What a policy can react to. ``*`` is any of them."""

ActionName = Literal["RestartJob", "FailJob"]
"""What a policy can do: re-form the gang, or end the job as failed."""

NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
"""torchrun's words for it."""

DEFAULT_ROLE = "worker"
MOST_NODES = 4096
DEFAULT_GRACE, MOST_GRACE = 30.0, 86400
"""Seconds that workers have from the request to end until they are killed."""


class Nodes(Record):
    """How many nodes a role wants. A fixed size has ``min == max == target``."""

    min: int = Field(ge=1, le=MOST_NODES)
    max: int = Field(ge=1, le=MOST_NODES)
    target: int = Field(ge=1, le=MOST_NODES)
    auto: bool = False
    """On top of the target it borrows idle nodes, up to ``max``, until a job that is entitled to them needs them."""


class Ready(Record):
    """When a place is ready: its port is listened on, or the command ends with 0. Exactly one of them."""

    port: bool = False
    """The ``NODEAGENT_PORT`` of its first worker."""
    command: tuple[str, ...] = ()
    """Run again and again on the place's node, in the environment of its first worker."""


class Policy(Record):
    """First match wins: an event (and, if given, the blamed worker's exit code) to an action."""

    on: tuple[EventName, ...] = Field(min_length=1)
    exit_code: int | None = None
    do: ActionName


class Role(Record):
    """A named part of a job with its own command and size. A place is one replica of it: ``workers_per_node`` workers
    on one node."""

    name: str = DEFAULT_ROLE
    command: tuple[str, ...] = Field(min_length=1)
    nodes: Nodes
    """One place on each of so many nodes; with ``replicas`` how many nodes their places may be spread over."""
    replicas: int | None = Field(default=None, ge=1, le=MOST_NODES)
    """So many places, several of them on one node where its devices allow it."""
    env: dict[str, str] = {}
    """Goes before the job's own."""
    after: tuple[str, ...] = ()
    """Its workers start when all places of these roles are ready."""
    ready: Ready | None = None
    """None: a place is ready when its workers have been started."""
    restart: Literal["gang", "alone"] = "gang"
    """What a worker of it that fails takes along: the gang, or nobody: it is started again by itself."""
    policies: tuple[Policy, ...] | None = None
    """For what happens to its workers, in place of the job's; None: the job's."""
    workers_per_node: int | Literal["gpu"] = "gpu"
    """Workers of a pod; ``gpu`` is one per installed GPU (and one on a node without GPUs)."""
    gpus_per_worker: int | None = Field(default=None, ge=0, le=64)
    """None: one where the node has GPUs, none where it has not."""
    uneven: bool = False
    """A node with fewer usable GPUs than its peers still takes part, with fewer workers."""
    virtual_local_rank: bool = False
    """Each worker sees its own GPUs only and has LOCAL_RANK 0, as torchrun's option of this name does."""
    placement: Constraints | None = None
    """What it asks of its nodes, the job's own constraints included; None: nothing."""
    numa_binding: NumaBinding | None = None
    """The cores that a worker is bound to: all near its GPU, or a part of them that no other GPU has."""

    @property
    def places(self) -> int:
        """How many places of it are wanted."""
        return self.replicas or self.nodes.target

    def of_places(self, count: int) -> Role:
        """It with so many places: of a job of several roles, where sizes are fixed."""
        if self.replicas is not None:
            return self.model_copy(update={"replicas": count, "nodes": Nodes(min=1, max=count, target=count)})
        return self.model_copy(update={"nodes": Nodes(min=count, max=count, target=count)})


MOST_RESTARTS = 60
"""Largest budget: its entries live in the job's record, which keeps 64."""


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
    """Before the workers of a generation; a failure counts as a failure of the pod."""
    post_stop: tuple[str, ...] = ()
    """After the workers have stopped; its failure is logged only."""
    timeout: float = Field(default=60.0, gt=0, le=3600)


class Hang(Record):
    """When a gang without progress is restarted."""

    progress: float | None = Field(default=None, gt=0)
    """Seconds without progress of any worker; None: learned from the job's own steps."""
    phases: float = Field(default=7200.0, gt=0)
    """Seconds for a phase that a worker tells it is in (evaluate, checkpoint, ...), unless it tells them with it."""


class Together(Record):
    """How the nodes of a gang must lie to each other."""

    within: str = Field(default="", max_length=MOST_TEXT)
    """All of them have one value of this label; empty: they need not."""
    segments: int = Field(default=0, ge=0, le=MOST_NODES)
    """They are groups of so many, each within one of the topology's smallest domains; 0: they are not."""


class Submitter(Record):
    """What was recorded where the job was submitted; nodeagent copies neither code nor environments."""

    user: str
    uid: int
    gid: int
    host: str
    cwd: str
    environ: dict[str, str] = {}
    """Only PATH, VIRTUAL_ENV, CONDA_PREFIX, LD_LIBRARY_PATH, PYTHONPATH, HOME, LANG and TERM-free basics."""


class JobSpec(Record):
    """One job, complete: every default is filled in."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")
    roles: tuple[Role, ...] = Field(min_length=1)
    """Several are one gang: they start together or not at all, each a world of its own."""
    completes: str = ""
    """The job has ended well when all workers of this role have; the others are stopped. Empty: when all roles have."""
    env: dict[str, str] = {}
    env_file: str | None = None
    """A file on each node, read by the shim as the job's user; its content is never stored."""
    working_dir: str
    user: str
    checkpoint_dir: str | None = None
    limits: dict[str, int | Literal["infinity"]] = {}
    """rlimit name (``nofile``, ``memlock``, ``core``, ``stack``, ``nproc``) to soft = hard value."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    queue: str = Field(default="", max_length=63)
    """As it is submitted: the queue that was asked for. In a record: the one that it is in; empty is ``default``."""
    spot: bool = False
    """It uses nodes that may be taken away at short notice also if it cannot go on with fewer."""
    placement: Together | None = None
    """How the gang's nodes must lie to each other; None: anyhow. What they must be like is the roles'."""
    preload: tuple[str, ...] = ()
    """Modules imported ahead of time in the standby interpreter."""
    standby: bool = True
    grace: float = Field(default=DEFAULT_GRACE, ge=0, le=MOST_GRACE)
    restarts: RestartLimits = RestartLimits()
    policies: tuple[Policy, ...] = ()
    hooks: Hooks = Hooks()
    hang: Hang | None = None
    """None: hangs are not looked for."""
    hold_timeout: float | None = Field(default=None, gt=0)
    """Seconds a job may hold for want of nodes before it fails; None is for ever."""
    time_limit: float | None = Field(default=None, gt=0)
    """Seconds that it may have its nodes for, from its first start on; None is for ever."""
    begin: float | None = Field(default=None, ge=0, le=253_402_300_799)
    """Unix time before which it is not started."""
    ttl: float | None = Field(default=None, ge=0)
    """Seconds after its end for which its record is kept at most; None: as long as others are."""
    after: tuple[After, ...] = Field(default=(), max_length=MOST_AFTER)
    """It starts when these have ended."""
    array: Array | None = None
    """None: it is a member of none."""
    submitter: Submitter

    @property
    def role(self) -> Role:
        """The only role, or the first of several."""
        return self.roles[0]

    @property
    def role_names(self) -> str:
        """For people: those of several roles in one text."""
        return ", ".join(role.name for role in self.roles)

    @property
    def ordered(self) -> bool:
        """Some of its roles start after others."""
        return any(role.after for role in self.roles)

    @property
    def several(self) -> bool:
        """It has several roles: their places are placed one by one."""
        return len(self.roles) > 1

    @property
    def elastic(self) -> bool:
        """It can go on with fewer nodes than it has."""
        return not self.several and self.nodes.min < self.nodes.max

    def policies_of(self, role: str) -> tuple[Policy, ...]:
        """Those for what happens to the workers of this role; of no role that it has, the job's."""
        own = next((one.policies for one in self.roles if one.name == role), None)
        return self.policies if own is None else own

    def of_sizes(self, sizes: Mapping[str, int]) -> JobSpec:
        """It with so many places of the roles that are named."""
        if not sizes:
            return self
        roles = tuple(role.of_places(sizes.get(role.name, role.places)) for role in self.roles)
        return self.model_copy(update={"roles": roles})

    @property
    def within(self) -> str:
        """Of ``Together``."""
        return self.placement.within if self.placement is not None else ""

    @property
    def segments(self) -> int:
        """Of ``Together``."""
        return self.placement.segments if self.placement is not None else 0

    @property
    def nodes(self) -> Nodes:
        """How many nodes it runs on. Several roles may share nodes: then it is as many as there are places at most,
        and which number it is depends on the devices that are free."""
        if not self.several:
            return self.role.nodes
        most = min(MOST_NODES, sum(role.places for role in self.roles))
        return Nodes(min=max(role.nodes.min for role in self.roles), max=most, target=most)
