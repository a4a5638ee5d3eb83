"""Whether a figure is good enough: held against the node's own history, and against its peers. Pure.

A single other figure proves nothing: then nobody knows which of the two is the odd one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nodeagent.diag.crew import Outcome
from nodeagent.diag.history import median
from nodeagent.model.figure import Figure

FEWEST_OWN = 3
"""Earlier figures of the node from which on they are a history."""
FEWEST_PEERS = 2
"""Devices of the same kind, of this node or of others, from which on they are a standard."""


@dataclass(frozen=True, slots=True)
class Result:
    """One check as it is told."""

    name: str
    gpu: str
    passed: bool
    value: float | None
    unit: str
    why: str


def judge(
    outcomes: Sequence[Outcome], own: Iterable[tuple[str, str, Sequence[float]]], peers: Iterable[Figure], slower: float
) -> list[Result]:
    """``own``: kind, check and values, oldest first; ``peers``: of other nodes; below ``slower`` times the median of
    either, a figure is too low (0: none is)."""
    past = {(kind, check): values for kind, check, values in own}
    others: dict[tuple[str, str], list[float]] = {}
    for figure in peers:
        others.setdefault((figure.kind, figure.check), []).append(figure.value)
    out = []
    for outcome in outcomes:
        why = outcome.why
        if outcome.value is not None:
            key = (outcome.kind, outcome.name)
            beside = [o.value for o in outcomes if o is not outcome and (o.kind, o.name) == key and o.value is not None]
            why = "; ".join(
                (
                    *_low(outcome, past.get(key, ()), FEWEST_OWN, "this node's earlier results", slower),
                    *_low(outcome, beside + others.get(key, []), FEWEST_PEERS, "devices of the same kind", slower),
                )
            )
        out.append(Result(outcome.name, outcome.gpu, not why, outcome.value, outcome.unit, why))
    return out


def _low(outcome: Outcome, known: Sequence[float], fewest: int, whose: str, slower: float) -> Iterable[str]:
    assert outcome.value is not None
    if len(known) < fewest:
        return
    usual = median(known)
    if outcome.value < slower * usual:
        share = outcome.value / usual
        yield (
            f"{outcome.value:g} {outcome.unit} is {share:.0%} of {usual:g}, the median of {whose} "
            f"(at least {slower:.0%} is asked)"
        )
