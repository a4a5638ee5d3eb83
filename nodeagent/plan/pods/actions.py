"""What a node can do for its own pods: chosen in ``pod.py``, carried out in ``agent/apply.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.pods.base import GivenUp


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have a shim with its checks done and its fork server warm."""

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Promise:
    """Durably promise never to start anything below this generation; group rank 0 also holds its rendezvous."""

    uid: str
    token: Token
    rendezvous: bool
    why: str
    ports: int = 0
    """So many are held for the node's places."""
    above: int = 0
    """Of a rendezvous: so many ports after its own are named to workers."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop what runs; ``grace`` None is SIGKILL now. ``given_up``: have the snapshots in memory written out.
    ``broken``: not all ranks will leave together."""

    uid: str
    grace: float | None
    why: str
    given_up: GivenUp | None = None
    broken: bool = False
    sooner: Mapping[str, float] = field(default_factory=dict)
    """Roles whose workers have less than ``grace``: role to seconds."""
    later: tuple[str, ...] = ()
    """Roles that workers on other nodes still come after: theirs are asked to stop when those have ended."""


@dataclass(frozen=True, slots=True)
class SendAck:
    """Tell the store that nothing older runs here any more."""

    uid: str
    token: Token
    ack: Ack
    last: PodReport | None
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start this node's workers of the active generation."""

    uid: str
    token: Token
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """Start the workers of these roles: all that they come after are ready."""

    uid: str
    token: Token
    roles: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class StopRole:
    """Kill this node's workers of a role, which is started again as a whole."""

    uid: str
    token: Token
    role: str
    number: int
    """Of the round that they are stopped for."""
    why: str


@dataclass(frozen=True, slots=True)
class StartRole:
    """Start this node's workers of a role again: all of it is down, on every node."""

    uid: str
    token: Token
    role: str
    number: int
    wait: float
    """Seconds until they start."""
    why: str


@dataclass(frozen=True, slots=True)
class ReportPod:
    """Tell the store how the pod's workers are."""

    uid: str
    token: Token
    report: PodReport
    why: str


@dataclass(frozen=True, slots=True)
class LookAtWorkers:
    """Others of the gang see no progress: have this node's shim tell what its workers do. With a limit: have it tell
    only once they have done nothing for so long."""

    uid: str
    why: str
    limit: float | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class SetFailsafeMembers:
    """Give the active generation other failsafe members."""

    uid: str
    token: Token
    expect: dict[str, str]
    failsafe_members: dict[str, str]
    why: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The pod is not needed here any more."""

    uid: str
    why: str


PodAction = (
    Prepare
    | Stop
    | Promise
    | SendAck
    | Start
    | Release
    | StopRole
    | StartRole
    | ReportPod
    | LookAtWorkers
    | SetFailsafeMembers
    | Retire
)


def asks_the_store(action: PodAction) -> bool:
    """Whether the action needs the store."""
    return isinstance(action, SendAck | ReportPod | SetFailsafeMembers)
