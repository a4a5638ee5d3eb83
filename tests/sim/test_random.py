"""Random schedules: production agents under random faults; invariants after every step, liveness once faults stop.

A few here; ``make sim`` runs 10,000. Replay one with ``NODEAGENT_SIM_SEED=<seed> pytest tests/sim/test_random.py``.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.groups import seeds
from tests.sim import schedule

REPLAY = "NODEAGENT_SIM_SEED"
LARGEST = 12
"""Nodes of a schedule that is run with every change."""
FOUND = 7010, 7056, 9071, 9133
"""With which the store once lost a job."""
SEEDS = (
    [int(os.environ[REPLAY])]
    if REPLAY in os.environ
    else [seed for seed in (*range(1, 16), *FOUND) if schedule.shape(seed).nodes <= LARGEST]
)


@pytest.mark.parametrize("seed", seeds(SEEDS[:1], SEEDS[1:]))
def test_random_schedule(seed: int) -> None:
    assert schedule.run(seed) > 100


@pytest.mark.parametrize("seed", seeds(SEEDS[:1], SEEDS[1:4]))
def test_random_schedule_of_two_teams(seed: int) -> None:
    """In the end no node with room is idle while a job may have more."""
    assert schedule.run(seed, teams=True) > 100


def test_the_sizes_of_all_schedules() -> None:
    """All 10,000 of ``make sim``: mostly small, some of 50 to 200 nodes, up to ten jobs, and enough nodes for all."""
    shapes = [schedule.shape(seed) for seed in range(1, 10_001)]
    large = [s for s in shapes if s.nodes >= 50]
    assert 0.005 < len(large) / len(shapes) < 0.02
    assert {min(s.nodes for s in shapes), max(s.nodes for s in shapes)} <= {*range(3, 4), *range(190, 201)}
    jobs = Counter(len(s.jobs) for s in shapes)
    assert (min(jobs), max(jobs)) == (1, 10)
    for s in shapes:
        together = s.slots // schedule.WORKERS
        assert together >= len(s.jobs) or sum(job.high for job in s.jobs) <= s.nodes
        assert all(1 <= job.low <= job.target <= job.high <= s.nodes for job in s.jobs)
