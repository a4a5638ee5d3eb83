"""Redis is dead for long, and nothing listens where it was: training makes step after step all the while."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import REFERENCE_STEPS
from tests.e2e.support import Cluster, check_steps, check_undisturbed, digits_job, is_alive, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis]

NODES = 3
WORKERS = 2
PAUSE = 10.0
"""Seconds that a busy machine may take for one step; with its workers gone there would be none for much longer."""
HALF_A_MINUTE = pytest.param(30.0, marks=pytest.mark.timeout(480))
TEN_MINUTES = pytest.param(600.0, marks=[pytest.mark.endurance, pytest.mark.timeout(1200)])


@contextmanager
def dead(calm: Cluster) -> Iterator[None]:
    """Redis is killed; what would start it again is frozen meanwhile."""
    status = calm.json("local", "status")
    os.kill(status["pid"], signal.SIGSTOP)
    try:
        os.kill(status["redis"]["pid"], signal.SIGKILL)
        yield
    finally:
        os.kill(status["pid"], signal.SIGCONT)
    calm.until(lambda: calm.json("local", "status")["redis"]["pid"] not in (None, status["redis"]["pid"]), 20, "it is")


@pytest.mark.parametrize("away", [HALF_A_MINUTE, TEN_MINUTES])
def test_steps_are_made_while_redis_is_dead(calm: Cluster, reference: dict[int, float], away: float) -> None:
    name, delay = f"long{away:.0f}", max(0.1, (away + 60) / REFERENCE_STEPS)
    calm.submit(digits_job(calm.work, name, nodes="2", steps=REFERENCE_STEPS, delay=delay, workers=1))
    calm.until_running(name, 2)
    calm.until_steps(name, 5)
    before = calm.workers(name)
    with dead(calm):
        start = time.monotonic()
        time.sleep(away)
        end = time.monotonic()
        assert all(is_alive(pid) for pid in before.values())
    for rank in before:
        made = [row["mono"] for row in read_steps(calm.work, name) if row["rank"] == rank and start < row["mono"] < end]
        longest = max(later - earlier for earlier, later in zip([start, *made], [*made, end], strict=True))
        print(f"rank {rank}: {len(made)} steps in {away:g} s without Redis, {longest:.2f} s between two at the most")
        assert longest < delay + PAUSE
    calm.until(lambda: set(calm.nodes().values()) == {"ready"}, 30, "their leases are renewed")
    calm.until_steps(name, 5)
    calm.until(lambda: calm.workers(name) == before, 20, "every pod is published again")
    job = calm.job(name)
    assert (job["generation"], job["restarts"], job["budget"]["used"]) == (1, 0, 0)
    calm.until(
        lambda: calm.ctl("stop", name, check=None).returncode == 0, 20, "the recovery is over, and it takes a stop"
    )
    rows = read_steps(calm.work, name)
    check_undisturbed(rows)
    check_steps(rows, reference)
