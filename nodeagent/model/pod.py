"""A pod as its agent publishes it, and what it says of a worker that makes no progress.

A pod tells it when its workers have shown no progress for the job's limit, or when another pod of the gang did.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.facts import PodUsage

RankState = Literal["stopped", "blocked", "zombie", "busy", "idle"]
"""``stopped``: by SIGSTOP. ``blocked``: uninterruptible (D), mostly on a disk or device. ``zombie``: its
main thread has ended and others have not. All three for several looks in a row. Else ``busy`` (uses CPU), ``idle``."""

Overdue = Literal["no", "yes", "long"]


class RankFacts(Record):
    """One worker, as seen when the facts were taken; ages are seconds up to then."""

    rank: int
    state: RankState
    step: int | None = None
    """The newest it told; None: it told none (in this generation)."""
    phase: str = ""
    """The phase it told it is in, unless training."""
    age: float = Field(default=0.0, ge=0)
    """Since it told a step, or without that since it last wrote output, or started."""
    overdue: Overdue | None = None
    """Of one that tells its progress: past its limit, or (``auto`` only) past the longer one that holds while some
    worker still computes. None: it tells none."""
    silent: bool = False
    """No output for the limit."""
    quiet: bool = False
    """Next to no CPU time for the limit."""
    frozen: bool = False
    """``stopped``, ``blocked`` or ``zombie`` for the limit."""
    waits: bool | None = None
    """Its stack waits for other workers (a collective); None: it could not be read."""
    site: str = ""
    """Where its main thread is, as ``function (file:line)``."""
    stacks: str = ""
    """The file on its node with all its stacks."""


class Stall(Record):
    """The living workers of one pod."""

    limit: float = Field(gt=0)
    """Seconds without progress that were allowed."""
    suspects: bool
    """This pod has seen no progress for the limit; False: it only answers for others that do."""
    ranks: tuple[RankFacts, ...]


PodPhase = Literal[
    "unknown", "preparing", "ready", "unfit", "starting", "running", "stopping", "stuck", "exited", "gone"
]
"""``unknown``: its shim lives, and the agent, just started, has not heard yet what it runs. ``ready``: standby warm,
nothing started. ``exited``: every worker of its newest generation has ended. ``gone``: the shim died."""


class WorkerState(Record):
    """One worker process."""

    rank: int
    local_rank: int
    pid: Annotated[int, Field(gt=0)] | None
    """None until it has one: 0 would be the reader's own process group to whoever signals it."""
    state: Literal["starting", "running", "exited"]
    exit: int | None = None
    """Exit code, 128+n for signal n; None while it runs."""
    step: int | None = None
    """The newest step it told, as seen some seconds ago; None: it told none (or the job has no ``hang``)."""
    doing: str = ""
    """The phase it told (train, evaluate, ...)."""


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
    standby_pid: int | None = None
    parked: int = 0
    """Workers forked ahead, waiting for the next start."""
    parked_memory: int = 0
    """Bytes that they share with nobody."""
    workers: tuple[WorkerState, ...] = ()
    snapshot_bytes: int = 0
    """Memory that its shim keeps for snapshots."""
    unreachable: dict[str, float] = {}
    """Members of its gang that this node's agent cannot reach, though they hold their leases: node to Unix time."""
    usage: PodUsage | None = None
    """As last measured; a change of it alone is not told at once, but with the next refresh."""
