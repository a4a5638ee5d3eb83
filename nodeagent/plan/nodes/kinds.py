"""What of a node decides how much room it has for a job that has nothing there. Most nodes of a cluster are alike: what
is counted by kind costs as much for thousands of them as for ten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeRecord
from nodeagent.plan.nodes.candidates import fitting


class NodeKind(NamedTuple):
    """All of a node that decides whether it has room for a job that has nothing there."""

    gpus: int
    free_gpus: int
    free_slots: int


Kinds = Mapping[NodeKind, int]
"""How many nodes there are of each kind."""


def kind_of(node: NodeRecord, used: Collection[str]) -> NodeKind:
    """``used``: its devices that jobs have."""
    facts = node.facts
    slots = facts.cpu_slots
    if any(device.startswith("cpu") for device in used):
        slots = sum(f"cpu{i}" not in used for i in range(slots))
    return NodeKind(len(facts.gpus), sum(g.healthy and g.uuid not in used for g in facts.gpus), slots)


def fits(role: Role, kind: NodeKind) -> bool:
    """A node of this kind has room for a worker at least."""
    return fitting(role, kind.gpus, kind.free_gpus, kind.free_slots) > 0


def shape_of(role: Role) -> tuple[object, ...]:
    """All of a role that decides which nodes have room for it."""
    return role.workers_per_node, role.gpus_per_worker, role.uneven, role.placement
