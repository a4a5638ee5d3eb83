"""The live state of one pod, as its agent publishes it under a TTL key and as the API shows it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.usage import PodUsage

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
