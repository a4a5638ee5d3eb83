"""What differs between a view and an earlier one, so that what was worked out from that can be mended instead of being
worked out anew. Compares objects by identity, each pair of views once; judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_

from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """The nodes and leases of a view that something was worked out from."""

    nodes: Mapping[str, NodeRecord]
    lapsed: frozenset[str]


def seen(cluster: Cluster) -> SeenNodes:
    """This view's."""
    view = cluster.nodes, cluster.lapsed
    return cluster.notes.once("seen", view, lambda _before: SeenNodes(*view))


def changed(cluster: Cluster, before: SeenNodes) -> frozenset[str] | None:
    """Nodes that have another record or another standing of their lease than before; None if nodes came or went."""
    now = seen(cluster)
    if now is before:
        return _NONE
    return cluster.notes.once("changed", (now, before), lambda _before: _changed(now, before))


_NONE: frozenset[str] = frozenset()


def _changed(now: SeenNodes, before: SeenNodes) -> frozenset[str] | None:
    lapses = (now.lapsed ^ before.lapsed) & now.nodes.keys() if now.lapsed is not before.lapsed else _NONE
    if now.nodes is before.nodes:
        return lapses
    if len(now.nodes) != len(before.nodes) or list(now.nodes) != list(before.nodes):
        return None
    same = map(is_, now.nodes.values(), before.nodes.values())
    return lapses.union(name for name, is_same in zip(now.nodes, same, strict=True) if not is_same)
