"""What ended jobs left on a node goes after its time, or when it is too much; nothing else does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.agent import retention
from nodeagent.agent.retention import Retention, found
from nodeagent.agent.serve import _retention
from nodeagent.model.job import JobRecord
from nodeagent.osutil.untrusted import NotSeenError
from nodeagent.spec.agentconfig import DirsConfig, RetentionConfig
from tests.descriptors import few_files
from tests.unit.ctl.samples import job as sample
from tests.unit.plan.build import NOW as SERVED
from tests.unit.plan.build import make_cluster

NOW = 1_000_000_000.0
DAY = 86_400.0


def uid(number: int) -> str:
    return f"{number:08x}" + "0" * 24


def job(number: int, ended_days_ago: float | None) -> JobRecord:
    done: dict[str, Any] = {} if ended_days_ago is None else {"phase": "stopped", "ended": NOW - ended_days_ago * DAY}
    return sample(uid=uid(number), **done)


def leave(dirs: DirsConfig, number: int, written_days_ago: float = 0.0) -> None:
    """Output and records of a job, with something written then."""
    output, records = dirs.logs / f"train-{uid(number)[:8]}", dirs.state / "pods" / uid(number)
    (output / "g3").mkdir(parents=True)
    records.mkdir(parents=True)
    (output / "g3" / "rank0.log").touch()
    at = NOW - written_days_ago * DAY
    for path in (output / "g3" / "rank0.log", output / "g3", output, records):
        os.utime(path, (at, at))


def there(dirs: DirsConfig) -> set[int]:
    """Jobs of which anything is left."""
    return {int(one.job, 16) for one in found(dirs)}


async def after(
    dirs: DirsConfig, jobs: Collection[JobRecord], spared: Collection[str] = (), most: int = 200
) -> set[int]:
    keep = RetentionConfig(age=7 * DAY, jobs=most)
    view = {record.uid: record for record in jobs}
    await Retention(dirs, lambda: keep, lambda: (view, spared, NOW)).look()
    return there(dirs)


async def test_old_ones_go_and_others_stay(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    assert await after(dirs, []) == set()
    for number in range(1, 8):
        leave(dirs, number, written_days_ago=30)
    leave(dirs, 8, written_days_ago=6)
    (dirs.logs / "backup-00000001").mkdir()
    (dirs.logs / "backup-00000001" / "of something else").touch()
    (dirs.logs / "repairs").mkdir()
    jobs = [job(1, None), job(2, 8), job(3, 6), job(4, 8)]  # 1 runs for long; 5 to 8 are not known
    assert await after(dirs, jobs, spared=[uid(4), uid(5)]) == {1, 3, 4, 5, 8}
    assert sorted(path.name for path in dirs.logs.iterdir() if "train" not in path.name) == [
        "backup-00000001",
        "repairs",
    ]
    assert await after(dirs, [job(1, None), job(3, 6)], most=1) == {1, 3}
    assert await after(dirs, [job(1, None), job(3, 6)], most=0) == {1}


@pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of other users")
async def test_a_user_with_much_output_removes_no_others(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    for number in range(1, 9):
        leave(dirs, number, written_days_ago=1 / number)
        if number > 2:
            for folder in (dirs.logs / f"train-{uid(number)[:8]}", dirs.state / "pods" / uid(number)):
                for path in (*folder.rglob("*"), folder):
                    os.chown(path, 54321, 54321)
    keep = RetentionConfig(age=7 * DAY, jobs=3)
    retention = Retention(dirs, lambda: keep, lambda: ({}, (), NOW))
    await retention.look()
    assert there(dirs) == {1, 2, 6, 7, 8}
    assert not await retention.crowded(), "it has left what it may leave"


async def test_what_was_written_lately_stays_whatever_end_its_record_has(tmp_path: Path) -> None:
    """The node that recorded the end had a clock that was days behind."""
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    leave(dirs, 1, written_days_ago=0.001)
    leave(dirs, 2, written_days_ago=8)
    assert await after(dirs, [job(1, 8), job(2, 8)]) == {1}


async def test_a_time_in_the_future_that_its_owner_has_set_keeps_nothing(tmp_path: Path) -> None:
    """One user's output stayed for ever, 200 jobs of it, of any size."""
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    for number in (1, 2, 3):
        leave(dirs, number)
    output = dirs.logs / f"train-{uid(1)[:8]}"
    odd = output / "g3" / "rank0.log", dirs.logs / f"train-{uid(2)[:8]}" / "g3", dirs.state / "pods" / uid(3)
    for path in odd:
        os.utime(path, (4e9, 4e9))
    keep, now = RetentionConfig(age=7 * DAY, jobs=200), time.time()
    for days, left in ((6, {1, 2, 3}), (8, set[int]())):
        at = now + days * DAY
        await Retention(dirs, lambda: keep, lambda at=at: ({}, (), at)).look()  # type: ignore[misc]
        assert there(dirs) == left


async def test_much_more_than_is_kept_is_noticed_between_two_looks(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    retention = Retention(dirs, lambda: RetentionConfig(age=7 * DAY, jobs=8), lambda: ({}, (), NOW))
    assert not await retention.crowded()
    for number in range(1, 11):
        leave(dirs, number)
    assert not await retention.crowded()
    leave(dirs, 11)
    (dirs.logs / "of something else").mkdir()
    assert await retention.crowded()
    await retention.look()
    assert len(there(dirs)) == 8
    assert not await retention.crowded()


async def test_nothing_goes_while_it_is_not_certain_which_jobs_there_are(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    leave(dirs, 1, written_days_ago=30)
    await Retention(dirs, RetentionConfig, lambda: None).look()
    assert there(dirs) == {1}


async def test_a_clock_that_is_far_ahead_makes_nothing_old(tmp_path: Path) -> None:
    """It removed the output of all ended jobs; the records were protected."""
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    leave(dirs, 1, written_days_ago=1)
    view = make_cluster(["n1"], job(1, 1).model_copy(update={"since": SERVED - round(DAY * 1000)}))
    jobs = SimpleNamespace(retention=RetentionConfig(age=7 * DAY))
    agent = SimpleNamespace(
        cluster=lambda: view, pods=dict, certain=True, config=SimpleNamespace(dirs=dirs, jobs=jobs)
    )  # fmt: skip
    clock = SimpleNamespace(wall=lambda: NOW + 365 * DAY)
    await _retention(cast(Any, agent), cast(Any, clock)).look()
    assert there(dirs) == {1}


async def test_on_a_disk_that_hangs_one_look_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look left its thread, until nobody could look at a user's files any more."""
    gate, begun = threading.Event(), SimpleQueue[Path]()

    def names(folder: Path) -> list[str]:
        begun.put(folder)
        gate.wait(30)
        return []

    monkeypatch.setattr(retention, "_names", names)
    monkeypatch.setattr(retention, "LOOK_LIMIT", 0.01)
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    looks = Retention(dirs, RetentionConfig, lambda: ({}, (), NOW))
    for _ in range(10):
        assert not await looks.crowded()
        await looks.look()
    assert begun.get(timeout=30) == dirs.logs
    assert begun.empty()
    gate.set()


async def test_after_a_removal_that_hangs_no_other_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    def remove(_: Path, name: str) -> None:
        tried.append(name)
        raise NotSeenError("it hangs")

    monkeypatch.setattr(retention, "remove_tree", remove)
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    for number in (1, 2):
        leave(dirs, number, written_days_ago=30)
    assert await after(dirs, []) == {1, 2}
    assert len(tried) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root removes what is others'")
async def test_output_with_another_users_folder_in_it_is_left_once_and_keeps_no_other(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    for number in (1, 2):
        leave(dirs, number, written_days_ago=30)
    output = dirs.logs / "train-00000001"
    (output / "data").mkdir()
    (output / "data" / "model").touch()
    os.chown(output / "data", 61_019, 61_019)
    os.chown(output, 61_018, 61_018)
    os.utime(output, (NOW - 30 * DAY, NOW - 30 * DAY))
    assert await after(dirs, []) == set()
    (left,) = dirs.logs.iterdir()
    assert (left / "data" / "model").exists()
    assert await after(dirs, []) == set()
    assert list(dirs.logs.iterdir()) == [left]


async def test_links_are_not_followed(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    leave(dirs, 1, written_days_ago=30)
    kept = tmp_path / "kept"
    (kept / "g1").mkdir(parents=True)
    (dirs.logs / "train-00000001" / "link").symlink_to(kept)
    os.utime(dirs.logs / "train-00000001", (NOW - 30 * DAY, NOW - 30 * DAY))
    (dirs.logs / "train-00000002").symlink_to(kept)
    assert await after(dirs, []) == set()
    assert (kept / "g1").is_dir()
    assert (dirs.logs / "train-00000002").is_symlink()


async def test_of_a_job_that_nobody_knows_one_folder_may_be_all_that_is_left(tmp_path: Path) -> None:
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    for number, days in ((1, 30), (2, 6)):
        leave(dirs, number, written_days_ago=days)
        (dirs.state / "pods" / uid(number)).rmdir()
    assert await after(dirs, []) == {2}


async def test_nothing_seems_old_for_want_of_a_descriptor(tmp_path: Path) -> None:
    """The newest file was not seen, and what a job had just written went with what was old."""
    dirs = DirsConfig(run=tmp_path / "run", state=tmp_path / "state", logs=tmp_path / "logs")
    leave(dirs, 1, written_days_ago=30)
    os.utime(dirs.logs / f"train-{uid(1)[:8]}" / "g3" / "rank0.log", (NOW, NOW))
    whole, seen = found(dirs), list[bool]()
    for count in range(12):
        with few_files(count):
            try:
                assert found(dirs) == whole
                seen.append(True)
            except NotSeenError:
                seen.append(False)
    assert seen[0] is False and seen[-1] is True
