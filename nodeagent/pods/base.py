"""What the agent's core asks of the pods on its node: the seam between decisions and processes.

The real host (``pods/host.py``) speaks to shims over unix sockets; the simulation has its own. Commands return at
once and are idempotent: what they did shows in ``status()``; asking again while it is under way, or done, does
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from nodeagent.lease.grants import Grant
from nodeagent.model.base import Listed, Record, Whole
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.pod import PodPhase, Stall, WorkerState
from nodeagent.model.world import Token, WorkerExit

NOBODY: Mapping[str, float] = MappingProxyType({})


class Rendezvous(Record):
    """An address held for one generation on this node."""

    token: Token
    address: str
    store_hosted: bool


class CommitRequest(Record):
    """A checkpoint that a worker wants committed, and by which generation."""

    token: Token
    name: str
    step: Whole
    order: Whole


class GivenUp(Record):
    """A planned stop after which not all of the gang goes on where it was: what its nodes have in memory would be
    lost, or be of no use."""

    stays: bool
    """Some of its nodes go on, with their memory."""
    world: int
    """Ranks of the gang that goes on; 0 if none is being formed."""
    since: tuple[int, int] = (0, 0)
    """(generation, step) of the checkpoint that is committed: nothing older need be kept."""


class PodStatus(Record):
    """The last status of one shim that the host received."""

    uid: str
    phase: PodPhase
    reason: str = ""
    """For unfit, gone, stuck, and a start that failed: the sentence for the person."""
    code: Whole = 0
    """For unfit: 127, 126 or 0, as in Readiness."""
    passing: bool = False
    """For unfit, as in Readiness."""
    folder: str = ""
    """The id of the job's checkpoint folder, as in Readiness."""
    shim_pid: Whole | None = None
    fork_server_pid: Whole | None = None
    preforked: dict[Whole, Whole] = {}
    """Workers forked ahead, waiting for work: pid to bytes of memory that are its alone."""
    warming: bool = False
    """More are on their way, and nothing has been started here yet."""
    highest: Token | None = None
    """The newest generation this node promised to (fsynced); nothing lower ever starts."""
    generation: Token | None = None
    """The newest generation whose start was ordered here."""
    lost: Token | None = None
    """The generation that an earlier shim of this pod started last, while this one has started none: how its workers
    ended is not known."""
    workers: Listed[WorkerState] = ()
    exits: Listed[WorkerExit] = ()
    """Of ``generation``, in the order they ended."""
    restarted: Listed[WorkerExit] = ()
    """Likewise of workers of roles that restart alone, each of which was, or is about to be, started again: the
    newest."""
    fenced: bool = False
    """Workers of ``generation`` were stopped by the shim itself, since nobody granted it time."""
    suspended: float = 0.0
    """If ``fenced``: seconds for which the machine was suspended while that time passed."""
    refused: str = ""
    """Why ``generation`` could not start here (hook failed, deadline passed, fork failed); empty if it did."""
    runtime_failed: bool = False
    """As of ``PodReport``."""
    taken: str = ""
    """Which port that was kept for workers of ``generation`` somebody else had when one failed, or all were killed, in
    words that "of" and the node follow; empty: none."""
    rendezvous: Rendezvous | None = None
    ports: Listed[Whole] = ()
    """Held for the places of the generation that was promised last."""
    portless: str = ""
    """Why the node had too few free ports when some were asked for last; empty: it had them, or nobody has asked."""
    snapshot_bytes: Whole = 0
    """Memory that the shim keeps for its workers' snapshots."""
    written: str = ""
    """What became of the snapshots of ``generation`` when the pod was given up; empty if there was nothing to do."""
    waiting: Listed[str] = ()
    """Roles of ``generation`` whose workers here wait for others to be ready."""
    ready: Listed[str] = ()
    """Names of the places of ``generation`` here that are ready, in a job whose roles start one after another."""
    rounds: dict[str, Whole] = {}
    """As of ``PodReport``: role to the newest round for which all its workers here were dead."""
    down: Listed[str] = ()
    """Those of these roles whose workers here wait for the order to start that round."""
    commit: CommitRequest | None = None
    stepped: float | None = None
    """When (CLOCK_BOOTTIME) the last worker of ``generation`` reported its first step; None: not all have."""
    watched: bool | None = None
    """The shim watches whether the workers of ``generation`` get on; None: an older shim, which does not tell."""
    stall: Stall | None = None
    """What the workers of ``generation`` do, while they or others of their gang make no progress."""
    held: Listed[str] = ()
    """Of a ``stuck`` pod, in the words of the host, not of the shim: devices that what does not end may have."""

    def starting(self, token: Token) -> PodStatus:
        """As long as an order to start this generation may still be on its way to the shim."""
        of_generation: dict[str, object] = {
            "workers": (), "exits": (), "restarted": (), "fenced": False, "suspended": 0.0, "refused": "",
            "runtime_failed": False, "taken": "", "written": "", "stepped": None, "stall": None, "lost": None,
            "waiting": (), "ready": (), "rounds": {}, "down": (),
        }  # fmt: skip
        return self.model_copy(update={"phase": "starting", "generation": token, **of_generation})

    @property
    def quiet(self) -> bool:
        """No worker of any generation is alive, as far as it is known."""
        return self.phase in ("preparing", "ready", "unfit", "exited", "gone")

    @property
    def pids(self) -> list[int]:
        """The processes that the shim tells of; they may have started more."""
        workers = [worker.pid for worker in self.workers if worker.state != "exited"]
        return [pid for pid in (self.shim_pid, self.fork_server_pid, *workers) if pid]


class StartOrder(Record):
    """Start the workers of one generation: one environment per local rank, complete but for the fork server's own."""

    token: Token
    environments: tuple[dict[str, str], ...]
    ranks: tuple[int, ...]
    places: tuple[str, ...] = ()
    """Of a job of several roles: the name of each worker's place."""
    roles_file: str = ""
    """Of a job of several roles: the content of NODEAGENT_ROLES_FILE."""
    not_after: float
    """CLOCK_BOOTTIME seconds; refused by the shim when this has passed."""
    devices: tuple[str, ...] = ()
    """The node's devices that the workers have. The host keeps them for as long as something of the pod lives."""


class PodHost(Protocol):
    """All pods of one node."""

    changed: asyncio.Event
    """Set at each change of any status; the core clears it, and sets it itself where it wants another look."""

    def status(self) -> Mapping[str, PodStatus]:
        """Every pod that has a shim (or whose shim is gone and not retired yet), by job uid."""
        ...

    async def adopt(self) -> None:
        """Find the shims that outlived an earlier agent of this node and take them over. Called once, before
        anything else."""
        ...

    async def promised(self, uids: Iterable[str]) -> Mapping[str, int]:
        """The highest generation that was ever promised here, by uid, as the disk knows it: also of pods that are long
        gone. It only saves tries at numbers that are taken, which the pod's shim refuses: what the disk does not show
        in time counts as nothing."""
        ...

    def prepare(self, uid: str, spec: JobSpec) -> None:
        """Have a shim with its checks done and its fork server warm. A ``gone`` pod is swept (every process of it
        killed) and prepared anew."""
        ...

    def promise(self, uid: str, token: Token, rendezvous: bool, ports: int = 0, above: int = 0) -> None:
        """Write ``highest`` = token durably and, if asked, hold an address for that generation, and ``ports`` for the
        places here. ``above``: so many ports after the address' belong to workers, and are to be in the config's range.
        Only for a quiet pod, or one whose workers have all been sent SIGKILL."""
        ...

    def start(self, uid: str, order: StartOrder) -> None:
        """Start a generation. The shim refuses when not_after has passed, number < highest, it was started before,
        or something older lives."""
        ...

    def release(self, uid: str, token: Token, roles: tuple[str, ...]) -> None:
        """Start the workers of these roles in this generation: those that they waited for are ready."""
        ...

    def stop_role(self, uid: str, token: Token, role: str, number: int) -> None:
        """Kill the role's workers of this generation, for a new round of it with this number: ``rounds`` says when all
        of them are dead. Nothing if that round, or a later one, was stopped for before."""
        ...

    def start_role(self, uid: str, token: Token, role: str, number: int, wait: float) -> None:
        """Start the role's workers, which are ``down`` for this round, after ``wait`` seconds."""
        ...

    def stop(
        self,
        uid: str,
        grace: float | None,
        given_up: GivenUp | None = None,
        broken: bool = False,
        sooner: Mapping[str, float] = NOBODY,
        later: tuple[str, ...] = (),
    ) -> None:
        """Stop whatever runs: SIGTERM, then SIGKILL after ``grace`` seconds; None is SIGKILL now. A shorter grace
        overrides a longer one. ``given_up``: the snapshots in memory are written out, within the grace. ``broken``: a
        rank is missing that was to leave with the others, so those that wait for it are killed. ``sooner``: roles whose
        workers are killed after fewer seconds. Workers that come after others get their SIGTERM first (``shim/grace``);
        ``later``: roles that wait for workers on other nodes, too, until another stop does not name them."""
        ...

    def look(self, uid: str, limit: float | None = None) -> None:
        """Have ``stall`` reported for what runs: others of its gang see no progress. Nothing where nobody watches the
        workers (``watched``). With a ``limit`` (seconds): watch them from now on, and tell only once they do nothing
        for it."""
        ...

    def retire(self, uid: str) -> None:
        """Kill what runs, end the shim, remove its runtime files (logs stay). Afterwards the pod has no
        status."""
        ...

    def committed(self, uid: str, request: CommitRequest, refused: str) -> None:
        """Answer a request to commit: it is committed, or ``refused`` says why not."""
        ...

    def granted(self, uid: str) -> Grant:
        """What the lease process lets this pod do; ``NOTHING`` if there is no such pod."""
        ...

    def ping(self) -> None:
        """Have every shim answer. One that does not has hung, and is killed."""
        ...

    async def close(self) -> None:
        """Let go of the shims, leaving them running."""
        ...
