"""A node's record: its identity, its facts, whether it may take work, and the pods that it has ready.

A node's lease is not here: only the store knows it (in served time), and reports which nodes have lapsed.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal

from pydantic import Field

from nodeagent.model.base import RECORD_VERSION, Record
from nodeagent.model.health import Figure, RepairState, Verdict
from nodeagent.model.window import NodeWindow

MOST_CPU_SLOTS = 4096
"""Of one node: each of them is gone through at each decision."""
MOST_GPUS = 1024
"""Of one node that may be held."""
MOST_LEVELS = 8
"""The most levels of a topology."""


class Incarnation(Record):
    """``life`` is random and ends with the boot (or when it is declared lost); ``start`` counts the starts of the agent
    in that life."""

    life: str
    start: int = Field(ge=1)


class Gpu(Record):
    """One installed GPU. If ``healthy`` is false, placement leaves it out; ``why`` gives the reason."""

    uuid: str
    index: int = Field(ge=0)
    name: str = ""
    healthy: bool = True
    why: str = ""
    variable: str = ""
    """The environment variable that limits which of its kind a program sees; empty: ``CUDA_VISIBLE_DEVICES``."""
    visible: str = ""
    """The value that names this GPU in that variable; empty: its uuid."""
    numa: int | None = None
    """The nearest NUMA node; None: not known, or there is only one."""


class HttpsAddress(Record):
    """Where a node's agent serves other agents, and how they authenticate it."""

    url: str = Field(pattern=r"^https://.+:\d{1,5}$")
    certificate: str
    """SHA-256 of its certificate, in hex."""
    proof: str
    """The cluster key's signature of it (trust/certificate.py)."""


class Notice(Record):
    """The provider of this machine takes it away soon."""

    until: float
    """Unix time, if it is known; otherwise an estimate. By this node's clock, for people only."""
    until_served: int = Field(default=0, ge=0)
    """The same in served time (ms), by the time that was left when the notice was first seen; 0: not known yet."""
    text: str
    """From when on, and where the notice comes from: in words that follow "is", or by themselves."""


@lru_cache(maxsize=64)
def _slot_names(count: int) -> tuple[str, ...]:
    """Each job that waits asks for those of each node."""
    return tuple(f"cpu{i}" for i in range(count))


class NodeFacts(Record):
    """What an agent reports about its machine. Changes rarely; a change raises the node's revision."""

    version: int = RECORD_VERSION
    address: str
    """The address at which peers and workers reach this node."""
    hostname: str
    boot_id: str
    agent_pid: int
    agent_version: str
    """The version, with a suffix that identifies its build (``store.scripts.version``)."""
    started: float
    """Unix time the agent started (for people only)."""
    cpu_slots: int = Field(ge=0, le=MOST_CPU_SLOTS)
    """Workers without a GPU that this node takes at once; their devices are named cpu0, cpu1, ..."""
    gpus: tuple[Gpu, ...] = ()
    labels: dict[str, str] = {}
    spot: bool = False
    """Configured: the node may be taken away at short notice."""
    notice: Notice | None = None
    """The node is being taken away."""
    topology: tuple[str, ...] = Field(default=(), max_length=MOST_LEVELS)
    """Configured: the labels that give a node's place in the network, the largest domains first."""
    data_interface: str | None = None
    """Configured: the interface for gloo's and NCCL's traffic."""
    gloo_interface: str | None = None
    """Detected: the interface that holds the address, if the host's own name resolves to loopback (Debian's
    127.0.1.1)."""
    api_socket: str = ""
    """The agent's unix socket: reachable only from the same machine (same boot_id)."""
    http: str = ""
    """``http://127.0.0.1:PORT`` of health and metrics."""
    https: HttpsAddress | None = None
    """Where logs and the API are served to other machines; None: nowhere."""
    peer: str = Field(default="", pattern=r"^$|^.+:\d{1,5}$")
    """``host:port`` (UDP) at which other agents request failsafe time from this one; empty: they cannot."""
    restarting: float = Field(default=0.0, ge=0.0)
    """Unix time at which the agent was asked to restart; 0: it was not."""
    health: tuple[Verdict, ...] = Field(default=(), max_length=32)
    """Problems of the node and its GPUs, the worst first; counts and times are approximate."""
    repair_state: RepairState | None = None
    """The repairs that the agent makes by itself; None: none."""
    figures: tuple[Figure, ...] = Field(default=(), max_length=16)
    """What the node's check by work measured: its peers are compared with it."""
    held: dict[str, str] = Field(default={}, max_length=MOST_CPU_SLOTS + MOST_GPUS)
    """Device to the job (uid) whose processes may still have it, which not even root's SIGKILL has ended: nobody is
    given it before they end."""

    def devices(self, mine: Collection[str] = ()) -> tuple[str, ...]:
        """Names of all devices that a worker may be given: healthy GPUs by uuid, then cpu slots. ``mine``: the devices
        that the worker's job has now."""
        gpus = tuple(g.uuid for g in self.gpus if g.healthy or (g.uuid in mine and self._unsure(g.uuid)))
        all_of = gpus + _slot_names(self.cpu_slots)
        return all_of if not self.held else tuple(device for device in all_of if device not in self.held)

    @property
    def held_by(self) -> dict[str, list[str]]:
        """The jobs (uid) of ``held``, with the devices of each."""
        found: dict[str, list[str]] = {}
        for device, uid in self.held.items():
            found.setdefault(uid, []).append(device)
        return found

    def _unsure(self, uuid: str) -> bool:
        """Returns whether a GPU is left out only because its state cannot be determined: a job that uses it keeps
        it."""
        claim = self.repair_state.claim if self.repair_state is not None else None
        if claim is not None and claim.takes(uuid):
            return False
        about = [v for v in self.health if v.device in ("", uuid)]
        return any(v.unknown for v in about) and not any(v.bars for v in about)


ReadyState = Literal["preparing", "ready", "unfit"]


class Readiness(Record):
    """Whether a node could start a pod of one job at once: its folders were checked as the job's user, its fork server
    is warm."""

    state: ReadyState
    reason: str = ""
    """For ``unfit``: what is missing, as shown to people ("/shared/resnet is missing")."""
    error: str = ""
    """For ``unfit``: what the job's own processes printed about it, for the job's owner and operators."""
    code: int = 0
    """For ``unfit``: the exit code a shell would give (127 command not found, 126 not executable), else 0."""
    passing: bool = False
    """For ``unfit``: what is missing may come although nobody changes the job (a disk is full, a file server is
    silent). The job waits for it; whatever else is missing on every node ends it."""
    portless: bool = False
    """``unfit`` only because the node has too few free ports for the rendezvous, or for its places: while another node
    leads a gang of one role, it can take part."""
    clock: bool = False
    """``unfit`` only because the clocks of this node and of the one that signed the job are hours apart."""
    folder: str = ""
    """The random id in the job's checkpoint folder as this node sees it; empty if unknown or the job has none."""
    since: int = 0
    """Served time (ms) of the view in which the node first saw itself in this state."""
    warming: bool = False
    """``ready``, but its first workers are still being forked ahead: a gang that trains does not stop for it yet."""


class Cordon(Record):
    """No new work for this node; ``drain`` also moves its running work away."""

    reason: str
    by: str
    at: float
    """Unix time, for people only."""
    drain: bool = False
    for_stop: bool = False
    """The drain is its stopped agent's, and over when the agent starts again: without it the node is as it was."""


class NodeRecord(Record):
    """A node as the store keeps it."""

    id: str
    incarnation: Incarnation
    lost: bool = False
    """This life was declared lost: it can never renew again; the node must join with a new life."""
    left: bool = False
    """This life ended by itself (orderly shutdown); its lease ended at once."""
    joined: int
    """Served time (ms) at which this life joined."""
    facts: NodeFacts
    mute: bool = False
    """For longer than a lease its agent has been silent, or the store has answered its lease process alone: no new work
    for this node."""
    cordon: Cordon | None = None
    readiness: dict[str, Readiness] = {}
    """Job uid to readiness, for jobs this node prepares or runs."""
    window: NodeWindow | None = None
    """What a maintenance window means for the node. Set only in the views for decisions, never in the store."""
    left_out: dict[str, str] = {}
    """Job (uid) that leaves the node out for now, and why (``plan/nodes/setbacks.py``). Likewise."""
    rev: int = 0
