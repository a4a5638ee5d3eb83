"""Which snapshot a new generation goes on from: the newest that every rank can have.

Pure. Newest is the highest generation first, then the step: what a newer generation kept is the history that was gone
on with, and an older one's later step a branch that was left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SnapshotOffer(NamedTuple):
    """One sealed snapshot in the memory of some rank's node."""

    slot: int
    """Local rank whose buffers it lies in."""
    half: int
    """Which of them."""
    generation: int
    step: int
    rank: int
    """Whose state it is."""
    world: int
    replicated: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What all ranks load."""

    generation: int
    step: int
    local: Mapping[int, SnapshotOffer]
    """Rank to the snapshot on its own node that it loads. Ranks that are missing here get it from ``giver``."""
    giver: int
    """The lowest rank that has it."""


def choose(offers: Sequence[Sequence[SnapshotOffer]], since: tuple[int, int] = (0, 0)) -> Choice | None:
    """``offers[r]`` are those on the node of rank r of the new generation. What is older than ``since``
    (generation, step) does not count. The same result on every rank."""
    for generation, step in sorted({(o.generation, o.step) for found in offers for o in found}, reverse=True):
        if (generation, step) < since:
            return None
        here = [[o for o in found if (o.generation, o.step) == (generation, step)] for found in offers]
        own = {rank: mine for rank, found in enumerate(here) if (mine := _own_offer(found, rank, len(offers)))}
        if len(own) == len(offers):
            return Choice(generation, step, own, 0)
        if any(o.replicated for found in here for o in found):
            local = own | {r: _copy(found) for r, found in enumerate(here) if r not in own and _copies(found)}
            return Choice(generation, step, local, min(local))
    return None


def _own_offer(found: Sequence[SnapshotOffer], rank: int, world: int) -> SnapshotOffer | None:
    """The state that this very rank kept in a gang of the same size."""
    return next((o for o in sorted(found) if o.rank == rank and o.world == world), None)


def _copies(found: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    return sorted(o for o in found if o.replicated)


def _copy(found: Sequence[SnapshotOffer]) -> SnapshotOffer:
    return _copies(found)[0]
