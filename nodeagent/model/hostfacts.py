"""What was seen of one machine, for ``doctor``. Whatever could not be looked at is None, never a guess."""

from __future__ import annotations

from nodeagent.model.base import Record


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
