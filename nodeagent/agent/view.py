"""The API's interface to its agent. The agent's core implements it; tests may implement it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.base import Store
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import Seal

if TYPE_CHECKING:
    from nodeagent.agent.diagnosis import Diagnosis
    from nodeagent.agent.health import NodeHealth
    from nodeagent.agent.savedview import Acknowledged


@dataclass(frozen=True, slots=True)
class AgentHealth:
    """The state of the agent itself. Times are seconds."""

    joined: bool
    """The agent holds its node's id (false if it was refused or lost)."""
    reason: str
    """If not joined: the reason, for people."""
    lease_left: float
    """Time until its own fence; 0 when it has passed."""
    beat_age: float
    """Time since the last good renewal was sent."""
    store_away_since: float | None
    """Unix time of the first failure since the last good answer; None while the store answers."""
    loop_lag: float
    """How late the main loop's last timer was."""
    lent: Mapping[str, float]
    """Jobs whose workers here run on failsafe time from their failsafe members, by uid: the rest of that time."""
    not_lent: Mapping[str, str]
    """Jobs with workers here that no failsafe member lends time to, by uid: the reason."""
    unsaved: str = ""
    """Why the last write of the jobs to this node's disk failed; empty if it did not."""
    store_unusable: str = ""
    """Why the store counts as unreachable although it answers: its version, timing or key was changed, it is full, it
    lets nobody in. Empty if it does not answer."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Records in the store that cannot be read, by key: why."""
    beyond: tuple[str, ...] = ()
    """Kinds of records of which the store has more than is read."""
    store_waits: str = ""
    """The nodes that a store which has lost writes waits for before it decides anything; empty if it waits for none."""
    unreachable: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Members of the jobs' gangs that this node cannot reach though they are alive: job uid to node to Unix time."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """Jobs that are left as they are, since a decision about them failed, by uid: where in the code."""


class AgentView(Protocol):
    """The agent as the API sees it."""

    @property
    def config(self) -> AgentConfig: ...

    @property
    def node(self) -> str:
        """This node's id."""
        ...

    @property
    def key(self) -> ClusterKey:
        """The cluster's key."""
        ...

    @property
    def seal(self) -> Seal:
        """Signs the requests of operators."""
        ...

    @property
    def store(self) -> Store: ...

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Checks this node's hardware by work."""
        ...

    @property
    def node_health(self) -> NodeHealth | None:
        """Monitors this node's health; None: it is not monitored."""
        ...

    def cluster(self) -> Cluster:
        """The newest snapshot (at most a heartbeat old, plus what this agent wrote itself)."""
        ...

    def me(self) -> NodeRecord | None:
        """This node's record, if it has joined."""
        ...

    def why(self, uid: str) -> tuple[str, ...]:
        """What the job waits for right now, one sentence each ("needs 4 nodes, 2 fit"); empty if it waits for
        nothing."""
        ...

    def explain(self, uid: str) -> tuple[str, ...]:
        """The same in more words, for one job: why which nodes are unsuitable, and which jobs hold them. The cost grows
        with the number of nodes."""
        ...

    def pods(self) -> Mapping[str, PodStatus]:
        """The pods on this node, by job uid."""
        ...

    def health(self) -> AgentHealth: ...

    @property
    def era(self) -> str:
        """The store's history that this agent has read; the era of its next write."""
        ...

    @property
    def rev(self) -> int:
        """The store's revision up to which ``cluster()`` has everything."""
        ...

    async def acknowledged(self, rev: int, era: str) -> Acknowledged:
        """Wait, within a bound, until this revision of an era is on enough disks. Raises nothing."""
        ...

    async def refresh(self) -> None:
        """Read the store's changes now, so that a new write is in ``cluster()``. Raises StoreError."""
        ...
