"""What a pod and its machine use, as its agent measures it each time that it tells its pods' states. For people only:
nothing is ever decided by it."""

from __future__ import annotations

from pydantic import Field

from nodeagent.model.base import Record


class MachineUsage(Record):
    """A whole machine, whoever uses it."""

    load: float = Field(ge=0)
    """Load average of the last minute."""
    cpus: int = Field(ge=1)
    memory_used: int = Field(ge=0)
    """Bytes that could not be given to others at once (total less available)."""
    memory_total: int = Field(ge=0)


class PodUsage(Record):
    """The processes of one pod: shim, standby, workers, and what the main threads of those started."""

    cpu: float | None = Field(default=None, ge=0)
    """Cores used since the measurement before; None at the first."""
    memory: int = Field(ge=0)
    """Resident bytes, summed: pages that processes share count once for each."""
    processes: int = Field(ge=0)
    machine: MachineUsage
