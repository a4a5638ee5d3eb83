"""The soak's own parts: it sees what grew, and a seed brings the same faults again."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.support import Cluster
from tests.soak.faults import FAULTS, Place, choose
from tests.soak.resources import ALLOWED, PER_JOB, Usage, grown

BASE = Usage(10, {"agent descriptors n1": 14, "processes": 6, "files in state": 40, "redis keys": 28})


def place(seed: int, *, small: bool = True) -> Place:
    return Place(Cluster(Path("/nowhere"), Path("/nowhere")), ("n1", "n2"), small, seed)


def test_what_grows_beyond_its_allowance_is_named_with_its_figures() -> None:
    assert grown(BASE, BASE) == []
    more = BASE.figures | {"agent descriptors n1": 14 + ALLOWED["agent descriptors"][0] + 1, "processes": 7}
    assert grown(BASE, Usage(10, more)) == [
        "agent descriptors n1: 14 -> 19, allowed 18", "processes: 6 -> 7, allowed 6",
    ]  # fmt: skip


def test_files_of_ended_jobs_are_allowed_by_their_number() -> None:
    for files, jobs, wrong in ((40 + 24 + PER_JOB, 11, 0), (41 + 24 + PER_JOB, 11, 1), (41 + 24 + PER_JOB, 12, 0)):
        assert len(grown(BASE, Usage(jobs, BASE.figures | {"files in state": files}))) == wrong


def test_a_seed_brings_the_same_faults_in_the_same_order() -> None:
    first, again = place(7), place(7)
    assert [choose(first) for _ in range(50)] == [choose(again) for _ in range(50)]
    assert {choose(first)[0] for _ in range(1000)} == set(FAULTS)
    other = place(7, small=False)
    assert "disk full" not in {choose(other)[0] for _ in range(1000)}
