"""What the nodes say of where they stand: their labels, the topology's levels, and what of a job's constraints follows
from these. All of it is kept for as long as the labels stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nodeagent.model.constraints import Constraints, Match, value_of
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, seen

TopologyPath = tuple[str, ...]
"""A node's values of the topology's labels, the largest domain first; empty text where it has none."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What all nodes say of where they stand. The very same object for as long as that stays so."""

    levels: tuple[str, ...]
    labels: Mapping[str, Mapping[str, str]]
    """Each node's."""
    _paths: dict[tuple[str, ...], Mapping[str, TopologyPath]] = field(default_factory=dict)
    _allowed: dict[Constraints, frozenset[str]] = field(default_factory=dict)
    _scores: dict[Constraints, Mapping[str, int]] = field(default_factory=dict)
    _terms: dict[Match, Collection[str]] = field(default_factory=dict)

    def paths(self, levels: tuple[str, ...]) -> Mapping[str, TopologyPath]:
        """Each node's path by these levels."""
        found = self._paths.get(levels)
        if found is None:
            if len(self._paths) >= MOST_PATHS:
                self._paths.clear()
            found = {n: tuple(value_of(level, n, own) for level in levels) for n, own in self.labels.items()}
            self._paths[levels] = found
        return found

    def levels_for(self, within: str) -> tuple[str, ...]:
        """The levels for a gang that is to stay within one value of a label, which need not be one of the topology."""
        return (within,) if within and within not in self.levels else self.levels

    def allowed(self, constraints: Constraints) -> frozenset[str]:
        """Nodes that these constraints leave."""
        found = self._allowed.get(constraints)
        if found is None:
            if len(self._allowed) >= MOST_ALLOWED:
                self._allowed.clear()
            found = frozenset(n for n, own in self.labels.items() if not constraints.unmet(n, own))
            self._allowed[constraints] = found
        return found

    def scores(self, constraints: Constraints) -> Mapping[str, int]:
        """How preferred each node is, whether the constraints leave it or not."""
        found = self._scores.get(constraints)
        if found is None:
            if (len(self._scores) + 1) * len(self.labels) > MOST_SCORES:
                self._scores.clear()
            found = dict.fromkeys(self.labels, 0)
            for terms, more in ((constraints.prefer, 1), (constraints.avoid, -1)):
                for term in terms:
                    for node in self._having(term):
                        found[node] += more
            self._scores[constraints] = found
        return found

    def _having(self, term: Match) -> Collection[str]:
        """Nodes for which a term holds. Roles of one job have many in common: the job's own."""
        found = self._terms.get(term)
        if found is None:
            if (len(self._terms) + 1) * len(self.labels) > MOST_SCORES:
                self._terms.clear()
            found = self._terms[term] = [n for n, own in self.labels.items() if term.holds(n, own)]
        return found

    def since(self, before: Tree) -> Tree:
        """This one, with all that was worked out from another and holds still: most nodes are where they were."""
        differ = {n for n, own in self.labels.items() if before.labels.get(n) is not own}
        gone = before.labels.keys() - self.labels.keys()
        for constraints, names in before._allowed.items():
            now = {n for n in differ if not constraints.unmet(n, self.labels[n])}
            same = now == names & differ and not names & gone
            self._allowed[constraints] = names if same else (names - differ - gone) | now
        return self


MOST_ALLOWED = 1024
"""Sets of constraints whose nodes are kept at once."""
MOST_SCORES = 200_000
"""Numbers that are kept at once of how preferred nodes are: one for each set of constraints and node; and likewise of
nodes for which single terms hold."""
MOST_PATHS = 64
"""Likewise of levels."""


@dataclass(frozen=True, slots=True)
class _Scan:
    seen: SeenNodes
    tree: Tree


def tree(cluster: Cluster) -> Tree:
    """The topology of this view."""
    return cluster.once("topology", lambda before: _scan(cluster, before)).tree


def _scan(cluster: Cluster, before: _Scan | None) -> _Scan:
    news = changed(cluster, before.seen) if before is not None else None
    if before is not None and news is not None:
        old = before.seen.nodes
        if all(_same(old[n], cluster.nodes[n]) for n in news):
            return replace(before, seen=seen(cluster))
    labels: dict[str, Mapping[str, str]] = {n: record.facts.labels for n, record in cluster.nodes.items()}
    if before is not None:  # of equal labels the very same object: it is compared at once
        labels = {n: was if (was := before.tree.labels.get(n)) == own else own for n, own in labels.items()}
    found = Tree(_agreed(cluster.nodes.values()), labels)
    return _Scan(seen(cluster), found.since(before.tree) if before is not None else found)


def _same(one: NodeRecord, other: NodeRecord) -> bool:
    return one.facts.labels == other.facts.labels and one.facts.topology == other.facts.topology


def _agreed(nodes: Iterable[NodeRecord]) -> tuple[str, ...]:
    """What most of them were configured with; of several that as many were, the longest, then the first by name."""
    counts = Counter(node.facts.topology for node in nodes)
    return min(counts, key=lambda levels: (-counts[levels], -len(levels), levels), default=())
