"""What is known of a node: its identity, its facts, whether it may take work, and the pods it has ready.

A node's lease is not here: the store alone knows it (served time), and reports who has lapsed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from nodeagent.model.base import RECORD_VERSION, Record
from nodeagent.model.health import Figure, RepairState, Verdict
from nodeagent.model.window import ReservedNode

MOST_LEVELS = 8
"""Of a topology."""


class Incarnation(Record):
    """``life`` is random and ends with the boot (or with being declared lost); ``start`` counts the agent's starts
    in it."""

    life: str
    start: int = Field(ge=1)


class Gpu(Record):
    """One installed GPU. ``healthy`` false takes it out of placement; ``why`` says the reason."""

    uuid: str
    index: int = Field(ge=0)
    name: str = ""
    healthy: bool = True
    why: str = ""
    variable: str = ""
    """The environment variable that hides the others of its kind from a program; empty: ``CUDA_VISIBLE_DEVICES``."""
    visible: str = ""
    """What stands for it in there; empty: its uuid."""
    numa: int | None = None
    """The NUMA node that it is near to; None: not known, or there is only one."""


class HttpsAddress(Record):
    """Where a node's agent serves others, and how it is known there."""

    url: str = Field(pattern=r"^https://.+:\d{1,5}$")
    certificate: str
    """SHA-256 of its certificate, in hex."""
    proof: str
    """The cluster key's word for it (trust/certificate.py)."""


class Notice(Record):
    """Whoever lends this machine takes it back soon."""

    until: float
    """Unix time, as far as it is known."""
    text: str
    """From when on, and where that comes from: as what follows "is", or by itself."""


class NodeFacts(Record):
    """What an agent tells about its machine. Changes rarely; a change bumps the node's revision."""

    version: int = RECORD_VERSION
    address: str
    """The address that peers and workers reach this node by."""
    hostname: str
    boot_id: str
    agent_pid: int
    agent_version: str
    """With what tells its build apart (``store.scripts.version``)."""
    started: float
    """Unix time the agent started (for people only)."""
    cpu_slots: int = Field(ge=0)
    """Workers without a GPU that this node takes at once; their devices are named cpu0, cpu1, ..."""
    gpus: tuple[Gpu, ...] = ()
    labels: dict[str, str] = {}
    spot: bool = False
    """Configured: it may be taken away at short notice."""
    notice: Notice | None = None
    """It is being taken away."""
    topology: tuple[str, ...] = Field(default=(), max_length=MOST_LEVELS)
    """Configured: which labels say where a node stands in the network, the largest domains first."""
    data_interface: str | None = None
    """Configured: of gloo's and NCCL's traffic."""
    gloo_interface: str | None = None
    """Found: the one that holds the address, where the host's own name leads to loopback (Debian's 127.0.1.1)."""
    api_socket: str = ""
    """The agent's unix socket: reachable only from the same machine (same boot_id)."""
    http: str = ""
    """``http://127.0.0.1:PORT`` of health and metrics."""
    https: HttpsAddress | None = None
    """Where logs and the API are served beyond this machine; None: nowhere."""
    peer: str = Field(default="", pattern=r"^$|^.+:\d{1,5}$")
    """``host:port`` (UDP) at which other agents ask this one for failsafe time; empty: it cannot be asked."""
    restarting: float = Field(default=0.0, ge=0.0)
    """Unix time at which the agent was asked to end and be back soon; 0: it was not."""
    health: tuple[Verdict, ...] = Field(default=(), max_length=32)
    """What is wrong with the node and its GPUs, the worst first; counts and times are rough."""
    repair_state: RepairState | None = None
    """What the agent repairs by itself; None: nothing."""
    figures: tuple[Figure, ...] = Field(default=(), max_length=16)
    """What the node's checks by work measured: the standard of its peers."""

    def devices(self, mine: Collection[str] = ()) -> tuple[str, ...]:
        """Names of all devices a worker may be given: healthy GPUs by uuid, then cpu slots. ``mine``: those that its
        job has now."""
        gpus = tuple(g.uuid for g in self.gpus if g.healthy or (g.uuid in mine and self._unsure(g.uuid)))
        return gpus + tuple(f"cpu{i}" for i in range(self.cpu_slots))

    def _unsure(self, uuid: str) -> bool:
        """It is left out only because nobody can tell whether it is sound: who uses it keeps it."""
        claim = self.repair_state.claim if self.repair_state is not None else None
        if claim is not None and claim.takes(uuid):
            return False
        about = [v for v in self.health if v.device in ("", uuid)]
        return any(v.unknown for v in about) and not any(v.bars for v in about)


ReadyState = Literal["preparing", "ready", "unfit"]


class Readiness(Record):
    """Whether a node could start a pod of one job at once: folders checked as the job's user, standby warm."""

    state: ReadyState
    reason: str = ""
    """For ``unfit``: what is missing, as told to the person ("/shared/resnet is missing")."""
    code: int = 0
    """For ``unfit``: the exit code a shell would give (127 command not found, 126 not executable), else 0."""
    folder: str = ""
    """The random id in the job's checkpoint folder as this node sees it; empty if unknown or the job has none."""
    warming: bool = False
    """``ready``, and its first workers are still being forked ahead: a gang that trains does not stop for it yet."""


class Cordon(Record):
    """No new work for this node; ``drain`` also moves its running work away."""

    reason: str
    by: str
    at: float
    """Unix time, for people only."""
    drain: bool = False


class NodeRecord(Record):
    """A node as the store has it."""

    id: str
    incarnation: Incarnation
    lost: bool = False
    """This life was declared lost: it can never renew again; the node must come back with a new one."""
    left: bool = False
    """This life ended by itself (orderly shutdown); its lease ended at once."""
    joined: int
    """Served time (ms) at which this life joined."""
    facts: NodeFacts
    cordon: Cordon | None = None
    readiness: dict[str, Readiness] = {}
    """Job uid to readiness, for jobs this node prepares or runs."""
    reserved: ReservedNode | None = None
    """What a maintenance window means for it: only in the views that decisions are made on, never in the store."""
    rev: int = 0
