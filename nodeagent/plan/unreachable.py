"""Members of a gang that cannot reach each other, in words: what agents publish of it (``agent/reach.py``) and what
reports of a generation carry. Pure; words only, nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.world import PodReport
from nodeagent.plan.membership import natural

MOST_PAIRS = 4
"""Pairs that one sentence names."""
ADVICE = "check the network between them"


@dataclass(frozen=True, slots=True)
class Cut:
    """Two members of one gang that hold their leases, of whom one gets no answer from the other."""

    node: str
    """Who asks."""
    other: str
    address: str
    """``host:port`` (UDP) at which ``other`` was asked; empty if it is not known any more."""
    since: float
    """Unix time of the first question without an answer."""
    both: bool
    """``other`` gets no answer from ``node`` either."""


def find_cuts(pods: Mapping[str, PodState], nodes: Mapping[str, NodeRecord]) -> tuple[Cut, ...]:
    """Each pair once. ``pods``: what the members of one gang publish, by node."""
    reported = {(node, other): at for node, pod in pods.items() for other, at in pod.unreachable.items()}
    return tuple(
        Cut(
            node=node,
            other=other,
            address=nodes[other].facts.peer if other in nodes else "",
            since=min(reported[pair], reported.get((other, node), reported[pair])),
            both=(other, node) in reported,
        )
        for pair in _once(reported)
        for node, other in [pair]
    )


def describe_cut(cut: Cut, now: float) -> str:
    """One sentence. ``now``: Unix time."""
    where, nor = _at(cut.address), f", nor {cut.other} {cut.node}" if cut.both else ""
    return (
        f"{cut.node} cannot reach {cut.other}{where}{nor} (no answer over UDP for {max(0.0, now - cut.since):.0f} s), "
        f"though both are alive: {ADVICE}"
    )


def describe_pairs(reports: Mapping[str, PodReport]) -> str:
    """Which members could not reach each other when they reported, to go behind another sentence; empty if none."""
    reported = {(node, other): at for node, report in reports.items() for other, at in report.unreachable.items()}
    if not reported:
        return ""
    named = [f"{node} cannot reach {other}{_at(reported[node, other])}" for node, other in _once(reported)]
    more = f", and {len(named) - MOST_PAIRS} more pairs" if len(named) > MOST_PAIRS else ""
    return f"; {', '.join(named[:MOST_PAIRS])}{more}: {ADVICE}"


def _at(address: str) -> str:
    return f" at {address}" if address else ""


def _once(reported: Mapping[tuple[str, str], object]) -> Iterator[tuple[str, str]]:
    """The pairs in order, each in one direction only."""
    for node, other in sorted(reported, key=lambda pair: (natural(pair[0]), natural(pair[1]))):
        if (other, node) not in reported or natural(node) < natural(other):
            yield node, other
