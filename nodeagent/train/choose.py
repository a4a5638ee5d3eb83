"""Chooses the snapshot from which a new generation continues: the newest that every rank can get.

Pure. Newest means the highest generation first, then the highest step: the newer generation's snapshots are the history
that training continued; a later step of an older generation belongs to an abandoned branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SnapshotOffer(NamedTuple):
    """One sealed snapshot in the memory of some rank's node."""

    slot: int
    """Local rank whose buffers hold it."""
    half: int
    """Which of the two buffers."""
    generation: int
    step: int
    rank: int
    """The rank whose state it is."""
    world: int
    replicated: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The snapshot that all ranks load."""

    generation: int
    step: int
    local: Mapping[int, SnapshotOffer]
    """Rank to the snapshot on its own node that it loads. A rank that is missing here gets it from ``giver``."""
    giver: int
    """The lowest rank that has it."""


def choose(offers: Sequence[Sequence[SnapshotOffer]], since: tuple[int, int] = (0, 0)) -> Choice | None:
    """``offers[r]`` are the snapshots on the node of rank r of the new generation. Snapshots older than ``since``
    (generation, step) do not count. The result is the same on every rank."""
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
    """The state that this rank itself kept in a gang of the same size."""
    return next((o for o in sorted(found) if o.rank == rank and o.world == world), None)


def _copies(found: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    return sorted(o for o in found if o.replicated)


def _copy(found: Sequence[SnapshotOffer]) -> SnapshotOffer:
    return _copies(found)[0]
