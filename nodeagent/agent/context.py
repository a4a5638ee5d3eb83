"""The context of the larger parts of one agent: its node, by what it reaches the world, and its copy of the store.

Decides nothing and does nothing. The simulation has the same parts and other worlds; a part that needs only one or two
of these takes those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nodeagent.agent.leaseprocess import LeaseProcess
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.model.timing import Timing
from nodeagent.osutil.clock import Clock
from nodeagent.pods.base import PodHost
from nodeagent.store.base import Store


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Of one agent, from its start to its end."""

    node: str
    timing: Timing
    store: Store
    host: PodHost
    clock: Clock
    random_id: Callable[[], str]
    """Another one each time, which nobody else has."""
    process: LeaseProcess
    snapshot: Snapshot
    metrics: Metrics
    undecided: Undecided
