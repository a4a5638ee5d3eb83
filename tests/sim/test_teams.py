"""Random schedules of teams: what must hold of their queues, under faults and after them (``teams.py``).

A few here; ``python -m tests.sim.many --teams`` runs more. Replay one with ``NODEAGENT_SIM_SEED=<seed> pytest
tests/sim/test_teams.py``.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from nodeagent.model.job import TERMINAL
from nodeagent.model.queue import Queues
from nodeagent.spec.queuefile import tree_mistakes
from tests.groups import seeds
from tests.sim import teams
from tests.sim.test_random import REPLAY

SEEDS = [int(os.environ[REPLAY])] if REPLAY in os.environ else [2, 7, 26, 30, 177, 395, *range(101, 111)]


@pytest.mark.parametrize("seed", seeds(SEEDS[:1], SEEDS[1:]))
def test_teams(seed: int) -> None:
    seen = teams.run(seed)
    assert seen.checks > 100
    assert seen.alike > 50
    assert sum(seen.ended[phase] for phase in TERMINAL) == len(teams.drawn(seed).jobs)
    assert seen.fair == teams.drawn(seed).endless


def test_what_seeds_stand_for() -> None:
    """Trees that an operator could make, jobs that fit, and enough of each kind."""
    kinds, rare = Counter[str](), Counter[str]()
    for seed in range(1, 301):
        drawn = teams.drawn(seed)
        tree = Queues(queues=drawn.queues)
        assert tree_mistakes(tree) == []
        kinds["equals"] += drawn.equals
        kinds["guarantee"] += any(queue.guarantee.nodes for queue in drawn.queues)
        kinds["capability"] += any(queue.capability.nodes for queue in drawn.queues)
        rare["wide"] += drawn.wide > 1
        rare["kept beside a guarantee"] += drawn.promised and not all(queue.reclaimable for queue in drawn.queues)
        kinds["inner"] += any(queue.parent for queue in drawn.queues)
        kinds["inner capability"] += any(
            queue.capability.nodes and tree.children.get(queue.name) for queue in tree.queues
        )
        for job in drawn.jobs:
            caps = [queue.capability.nodes for queue in tree.path(job.queue) if queue.capability.nodes is not None]
            assert 1 <= job.low <= min([drawn.nodes, *caps])
            assert job.low <= job.high
            assert job.queue not in tree.children
        if drawn.wide > 1:
            assert {job.low for job in drawn.jobs} == {job.high for job in drawn.jobs} == {drawn.wide}
    assert min(kinds.values()) > 50, kinds
    assert min(rare.values()) > 20, rare
