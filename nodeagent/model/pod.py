"""A pod as its agent publishes it, and its report about workers that make no progress.

A pod sends that report when its workers have made no progress for the job's limit, or when another pod of the gang sent
one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nodeagent.model.base import Listed, Record, Whole
from nodeagent.model.facts import PodUsage

RankState = Literal["stopped", "blocked", "zombie", "busy", "idle"]
"""``stopped``: by SIGSTOP. ``blocked``: uninterruptible (D), mostly on a disk or device. ``zombie``: its main thread
has ended and others have not. Each of these three needs several equal samples in a row. Otherwise ``busy`` (uses CPU)
or ``idle``."""

Overdue = Literal["no", "yes", "long"]


class RankFacts(Record):
    """One worker when the facts were taken; ages are seconds up to that moment."""

    rank: Whole
    state: RankState
    step: Whole | None = None
    """The newest step that it reported; None: it reported none (in this generation)."""
    phase: str = ""
    """The phase that it reported, unless it is training."""
    age: float = Field(default=0.0, ge=0)
    """Seconds since it reported a step; without steps, since it last wrote output, or started."""
    overdue: Overdue | None = None
    """For a worker that reports its progress: past its limit, or (``auto`` only) past the longer limit that applies
    while some worker still computes. None: it reports none."""
    silent: bool = False
    """It wrote no output for the limit."""
    quiet: bool = False
    """It used almost no CPU time for the limit."""
    frozen: bool = False
    """It was ``stopped``, ``blocked`` or ``zombie`` for the limit."""
    waits: bool | None = None
    """Its stack waits for other workers (a collective); None: the stack could not be read."""
    site: str = ""
    """The place of its main thread, as ``function (file:line)``."""
    stacks: str = ""
    """The file on its node that has all its stacks."""


class Stall(Record):
    """The living workers of one pod."""

    limit: float = Field(gt=0)
    """Seconds without progress that the job allows."""
    suspects: bool
    """This pod saw no progress for the limit; False: it only answers another pod's suspicion."""
    ranks: Listed[RankFacts]


PodPhase = Literal[
    "unknown", "preparing", "ready", "unfit", "starting", "running", "stopping", "stuck", "exited", "gone"
]
"""``unknown``: its shim lives, but the agent, which has just started, does not yet know what the shim runs. ``ready``:
fork server warm, nothing started. ``exited``: every worker of its newest generation has ended. ``gone``: the shim
died."""


class WorkerState(Record):
    """One worker process."""

    rank: Whole
    local_rank: Whole
    pid: Annotated[Whole, Field(gt=0)] | None
    """None until the worker has one: with 0, a program that signals it would signal its own process group."""
    state: Literal["starting", "running", "exited"]
    exit: Whole | None = None
    """Exit code, 128+n for signal n; None while it runs."""
    step: Whole | None = None
    """The newest step that it reported some seconds ago; None: it reported none (or the job has no ``hang``)."""
    doing: str = ""
    """The phase that it reported (train, evaluate, ...)."""


class PodState(Record):
    """One pod of one job on one node."""

    uid: str
    job: str
    role: str
    node: str
    phase: PodPhase
    reason: str = ""
    generation: int = 0
    shim_pid: int | None = None
    fork_server_pid: int | None = None
    preforked: int = 0
    """Workers forked ahead, waiting for the next start."""
    preforked_memory: int = 0
    """Bytes that the pre-forked workers do not share with others."""
    workers: tuple[WorkerState, ...] = ()
    snapshot_bytes: int = 0
    """Bytes of memory that its shim keeps for snapshots."""
    unreachable: dict[str, float] = {}
    """Members and failsafe members of its gang that hold their leases but that this node's agent cannot reach: node to
    Unix time."""
    usage: PodUsage | None = None
    """The last measurement. If only this changes, the agent publishes it with the next refresh, not at once."""
