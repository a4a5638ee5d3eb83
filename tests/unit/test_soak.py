"""The soak's own parts: it sees what grew, and a seed brings the same faults again."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from tests.e2e.clocks import WallClock
from tests.e2e.support import Cluster
from tests.soak.faults import FAULTS, Place, choose
from tests.soak.resources import ALLOWED, PER_JOB, Usage, grown

BASE = Usage(10, {"agent descriptors n1": 14, "processes": 6, "files in state": 40, "redis keys": 28})


def place(seed: int, folder: Path | None = None) -> Place:
    """``folder``: everything can be done there."""
    able, clock = folder is not None, WallClock(folder / "clock") if folder is not None else None
    return Place(Cluster(Path("/nowhere"), Path("/nowhere")), ("n1", "n2"), able, seed, able, clock)


def test_what_grows_beyond_its_allowance_is_named_with_its_figures() -> None:
    assert grown(BASE, BASE) == []
    more = BASE.figures | {"agent descriptors n1": 14 + ALLOWED["agent descriptors"][0] + 1, "processes": 7}
    assert grown(BASE, Usage(10, more)) == [
        "agent descriptors n1: 14 -> 19, allowed 18", "processes: 6 -> 7, allowed 6",
    ]  # fmt: skip


def test_files_of_ended_jobs_are_allowed_by_their_number() -> None:
    for files, jobs, wrong in ((40 + 24 + PER_JOB, 11, 0), (41 + 24 + PER_JOB, 11, 1), (41 + 24 + PER_JOB, 12, 0)):
        assert len(grown(BASE, Usage(jobs, BASE.figures | {"files in state": files}))) == wrong


def test_a_seed_brings_the_same_faults_in_the_same_order(tmp_path: Path) -> None:
    first, again = place(7, tmp_path), place(7, tmp_path)
    assert [choose(first) for _ in range(50)] == [choose(again) for _ in range(50)]
    assert {choose(first)[0] for _ in range(1000)} == set(FAULTS)
    other = place(7)
    assert set(FAULTS) - {choose(other)[0] for _ in range(1000)} == {"disk full", "cable cut", "clock skew"}


def test_the_clock_of_redis_is_put_forth_or_back_and_back_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, shown = place(7, tmp_path), []
    monkeypatch.setattr("tests.soak.faults.time.sleep", lambda _: shown.append((tmp_path / "clock").read_text()))
    for which in (0.0, 0.75):
        assert FAULTS["clock skew"](one, {"which": which, "away": 1.0})
        shown.append((tmp_path / "clock").read_text())
    assert shown == ["-3600\n", "+0\n", "+1800\n", "+0\n"]


def test_of_two_cuts_at_the_same_time_the_end_of_one_does_not_end_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, cuts = place(7, tmp_path), set[str]()
    asleep, ends = threading.Barrier(3), {name: threading.Event() for name in ("long", "short")}

    def nft(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        for verb, _, _, table in (words[:4] for text in command[1:] for words in [text.split(";")[0].split()]):
            (cuts.add if verb == "add" else cuts.remove)(table)
        return subprocess.CompletedProcess(command, 0)

    def sleep(name: str) -> None:
        asleep.wait(10)
        ends[name].wait(10)

    monkeypatch.setattr("tests.soak.faults.subprocess.run", nft)
    monkeypatch.setattr("tests.soak.faults.time.sleep", sleep)
    draws = {name: dict[str, object](which=0.5, away=name) for name in ends}
    both = {name: threading.Thread(target=FAULTS["cable cut"], args=(one, draw)) for name, draw in draws.items()}
    for thread in both.values():
        thread.start()
    asleep.wait(10)
    left = [len(cuts)]
    for name in ("short", "long"):
        ends[name].set()
        both[name].join(10)
        left.append(len(cuts))
    assert left == [2, 1, 0]
