"""Facts that agents publish beside a node's state: about its machine, about the store's server, about the resources
that its pods use. Also the findings of an inspection of some part of the system.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nodeagent.model.base import Record

FindingSeverity = Literal["error", "warning", "info"]


class Finding(Record):
    """One problem, or one thing worth knowing."""

    severity: FindingSeverity
    """``error``: work can be lost or go wrong; ``warning``: the part works, with less margin than it should have;
    ``info``: no action needed, or the check could not be made."""
    what: str
    """A sentence with the numbers."""
    fix: str
    """The exact line to run or to change; empty if there is nothing to do."""


class FolderFacts(Record):
    """One folder of the config."""

    key: str
    """Key in the config: ``dirs.run`` and so on."""
    path: str
    problem: str = ""
    """Why the folder cannot be used: it is no folder, cannot be made, or cannot be written to."""
    others_write: bool = False
    """Every user may put files there."""
    closed: str = ""
    """The first folder on the path, the folder itself included, that other users cannot enter."""
    free: int | None = None
    """Free bytes of its file system."""
    total: int | None = None
    free_files: int | None = None
    """Free inodes; None if the file system does not count them."""


class HostFacts(Record):
    """One inspection of a machine."""

    node: str
    root: bool
    """The agent runs as root, for jobs of several users."""
    other_name: str = ""
    """What the machine is called by now, where the running node has an older name of it; empty otherwise."""
    folders: tuple[FolderFacts, ...] = ()
    shm_free: int | None = None
    """Bytes free in /dev/shm."""
    shm_total: int | None = None
    memlock: int | None = None
    """Bytes that a worker may lock in memory; -1: all."""
    pins_memory: bool = False
    """The machine has GPUs or InfiniBand, whose drivers lock memory."""
    gpus_missed: bool = False
    """There is an NVIDIA driver, but the agent offers no GPU though it looked for GPUs."""
    undriven: tuple[str, ...] = ()
    """PCI addresses of NVIDIA's GPUs that no driver reads, where no agent reports that."""
    given_up: tuple[str, ...] = ()
    """PCI addresses of GPUs of which a person said that the node does without them."""
    hardware_missing: str = ""
    """Why nothing watches the hardware though the config has it watched; empty if it can be."""
    address: str = ""
    address_problem: str = ""
    """Why workers cannot listen on the address."""
    address_now: str = ""
    """What a look finds now; empty if somebody named the address."""
    interface: str = ""
    """``node.data_interface``; empty if it is not set."""
    interface_state: str | None = None
    """``up``, ``down``, ``missing``, or the kernel's other words."""
    ports: tuple[int, int] = (0, 0)
    """``ports.rendezvous``."""
    ports_problem: str = ""
    ports_right: str = ""
    """A port range that would be right."""
    ports_taken: int | None = None
    """How many of these ports another program listens on."""
    certificate: str = ""
    """``api.tls.cert``; empty if it is not set, or if the agent serves nothing."""
    certificate_left: float | None = None
    """Seconds until the certificate expires; None if that is not known."""
    certificate_problem: str = ""
    """Why the expiry is not known."""
    certificate_digest: str = ""
    """SHA-256 of the certificate in that file, in hex; empty if it is not known."""
    certificate_served: str = ""
    """The same of the one that the agent serves; empty if it serves none."""
    clock_rate: float | None = None
    """How much faster (or, below 0, slower) the kernel makes its clock run: 0.083 is 8.3 %. None if the kernel does not
    report it."""
    python: str = ""
    python_closed: str = ""
    """The first folder on the path to the agent's Python that other users cannot enter."""
    missing: tuple[str, ...] = ()
    """Python modules that the agent needs and this Python does not have."""
    runtimes: tuple[str, ...] | None = None
    """Programs found here that run containers; None: not looked for."""
    podman_lacks: tuple[Literal["catatonit", "subuid", "cgroups"], ...] = ()
    """What podman needs and has not: the program that passes signals on, ids for users' containers, one version of
    cgroups."""
    unknown: tuple[str, ...] = ()
    """Checks that did not finish in time, and why."""


class SentinelFacts(Record):
    """What the sentinels report about one service."""

    service: str
    listed: int
    """The number of sentinels in the url."""
    answered: int
    known: int | None = None
    """The number of sentinels that watch the service; the highest number that one of them reports."""
    down_after: float | None = None
    """Seconds without an answer after which a sentinel treats the primary as down: the least of all answers."""
    primaries: tuple[str, ...] = ()
    """The different addresses that the sentinels named, host:port."""


class StoreFacts(Record):
    """One inspection of the store."""

    address: str
    problem: str = ""
    """Why the server could not be asked; then the rest is unknown."""
    server: str = ""
    """``redis`` or ``valkey``."""
    version: str = ""
    role: str = ""
    """``master`` or ``slave``, in the server's own words."""
    tls: bool = False
    replicas_wanted: int = 0
    """How many replicas must have a write before an agent treats it as done (``redis.replicas``)."""
    replicas: int | None = None
    """Replicas that are connected now."""
    policy: str | None = None
    """maxmemory-policy."""
    memory_limit: int | None = None
    """maxmemory in bytes; 0: none."""
    memory_used: int | None = None
    evicted: int | None = None
    """Keys that the server has thrown away since its start, for want of memory."""
    appendonly: bool | None = None
    append_failed: bool | None = None
    """The last write or rewrite of the append-only file failed."""
    appendfsync: str | None = None
    min_replicas: int | None = None
    """min-replicas-to-write."""
    max_lag: int | None = None
    """min-replicas-max-lag, in seconds."""
    pings: tuple[float, ...] = ()
    """Seconds from each PING to its answer."""
    clock_step: float | None = None
    """How much more (or less) than ours the server's clock advanced during the inspection, in seconds."""
    clock_offset: float | None = None
    """The server's clock minus this machine's wall clock, in seconds."""
    sentinel: SentinelFacts | None = None
    """None unless the url names sentinels."""


class MachineUsage(Record):
    """The use of a whole machine by all its programs."""

    load: float = Field(ge=0)
    """Load average of the last minute."""
    cpus: int = Field(ge=1)
    memory_used: int = Field(ge=0)
    """Bytes that could not be given to other programs at once (total less available)."""
    memory_total: int = Field(ge=0)


class PodUsage(Record):
    """The processes of one pod: the shim, the fork server, the workers, and the children of their main threads."""

    cpu: float | None = Field(default=None, ge=0)
    """Cores used since the previous measurement; None at the first."""
    memory: int = Field(ge=0)
    """Resident bytes, summed: a shared page counts once for each process."""
    processes: int = Field(ge=0)
    machine: MachineUsage
