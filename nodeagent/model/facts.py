"""Facts that agents publish beside a node's state: of its machine, of the store's server, of what its pods use; and
what a look at some part of the system found.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nodeagent.model.base import Record

Severity = Literal["error", "warning", "info"]


class Finding(Record):
    """One thing that is wrong, or worth knowing."""

    severity: Severity
    """``error``: work can be lost or go wrong; ``warning``: it holds, with less room than it should; ``info``: no
    action needed, or it could not be found out."""
    what: str
    """A sentence with the numbers."""
    fix: str
    """The exact line to run or to change; empty where there is nothing to do."""


class FolderFacts(Record):
    """One folder of the config."""

    key: str
    """``dirs.run`` and so on."""
    path: str
    problem: str = ""
    """Why it cannot be used: no folder, not to be made, not to be written to."""
    others_write: bool = False
    """Anybody may put files there."""
    closed: str = ""
    """The first folder on the way there, itself included, that other users cannot pass through."""
    free: int | None = None
    """Bytes, of its file system."""
    total: int | None = None
    free_files: int | None = None
    """None where the file system does not count them."""


class HostFacts(Record):
    """One look at a machine."""

    node: str
    root: bool
    """The agent runs as root, for jobs of several users."""
    folders: tuple[FolderFacts, ...] = ()
    shm_free: int | None = None
    """Bytes free in /dev/shm."""
    shm_total: int | None = None
    memlock: int | None = None
    """Bytes that a worker may lock in memory; -1: all."""
    pins_memory: bool = False
    """It has GPUs or InfiniBand, whose drivers lock memory."""
    gpus_missed: bool = False
    """There is an NVIDIA driver, and the agent offers no GPU though it looked for them."""
    address: str = ""
    address_problem: str = ""
    """Why workers cannot listen on the address."""
    interface: str = ""
    """``node.data_interface``; empty where none is set."""
    interface_state: str | None = None
    """``up``, ``down``, ``missing``, or the kernel's other words."""
    ports: tuple[int, int] = (0, 0)
    """``ports.rendezvous``."""
    ports_problem: str = ""
    ports_right: str = ""
    """What would be right instead."""
    ports_taken: int | None = None
    """How many of them somebody listens on."""
    certificate: str = ""
    """``api.tls.cert``; empty where none is set, or nothing is served."""
    certificate_left: float | None = None
    """Seconds until it ends; None if that is not known."""
    certificate_problem: str = ""
    """Why that is not known."""
    clock_rate: float | None = None
    """By how much the kernel makes its clock run faster (or, below 0, slower) than it would: 0.083 is 8.3 %. None where
    the kernel does not say."""
    python: str = ""
    python_closed: str = ""
    """The first folder on the way to the agent's Python that other users cannot pass through."""
    missing: tuple[str, ...] = ()
    """Python modules that the agent needs and this Python does not have."""
    unknown: tuple[str, ...] = ()
    """What could not be looked at in time, and why."""


class SentinelFacts(Record):
    """What the sentinels said of one service."""

    service: str
    listed: int
    """Sentinels in the url."""
    answered: int
    known: int | None = None
    """Sentinels that watch the service, as the one that knows most says."""
    quorum: int | None = None
    down_after: float | None = None
    """Seconds without an answer after which a sentinel takes the primary for down: the least of all answers."""
    primaries: tuple[str, ...] = ()
    """The different addresses that were named, host:port."""


class StoreFacts(Record):
    """One look at the store."""

    address: str
    problem: str = ""
    """Why the server could not be asked; the rest is unknown then."""
    server: str = ""
    """``redis`` or ``valkey``."""
    version: str = ""
    role: str = ""
    """``master`` or ``slave``, in the server's own words."""
    tls: bool = False
    replicas_wanted: int = 0
    """How many replicas have to have a write before an agent believes it (``redis.replicas``)."""
    replicas: int | None = None
    """Connected now."""
    policy: str | None = None
    """maxmemory-policy."""
    memory_limit: int | None = None
    """maxmemory in bytes; 0: none."""
    memory_used: int | None = None
    appendonly: bool | None = None
    append_failed: bool | None = None
    """The last write or rewrite of the append-only file went wrong."""
    appendfsync: str | None = None
    min_replicas: int | None = None
    """min-replicas-to-write."""
    max_lag: int | None = None
    """min-replicas-max-lag, in seconds."""
    pings: tuple[float, ...] = ()
    """Seconds from each PING to its answer."""
    clock_step: float | None = None
    """By how much the server's clock went on more (or less) than ours while it was looked at, in seconds."""
    clock_offset: float | None = None
    """The server's clock less this machine's wall clock, in seconds."""
    sentinel: SentinelFacts | None = None
    """None unless the url names sentinels."""


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
