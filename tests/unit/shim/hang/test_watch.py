"""The watch over a pod's workers where there is none that it could see; all else of it, with a real shim and real
workers, in tests/integration/test_shim_hang.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from nodeagent.osutil.linux import boottime
from nodeagent.shim.gang import LocalGang
from nodeagent.shim.hang.track import Track
from nodeagent.shim.hang.watch import HangWatch, suspicious
from nodeagent.shim.loop import Loop
from nodeagent.shim.processes import ShimChildren
from nodeagent.shim.worker import Worker


class Between:
    """A generation that runs, and of whose workers none has a process now: they are about to be started again."""

    phase, settled = "running", False
    workers: tuple[Any, ...] = ()


def test_a_pod_without_ranks_sees_no_standstill() -> None:
    assert not suspicious([])
    assert suspicious([{"overdue": None, "silent": True, "quiet": True, "frozen": False}])


def test_a_pod_without_ranks_has_nothing_to_tell_those_who_ask(tmp_path: Path) -> None:
    reported = list[object]()
    hang = {"progress": None, "phases": 7200.0}
    watch = HangWatch(Loop(), ShimChildren(), hang, tmp_path, tmp_path, lambda: reported.append(watch.stall))
    watch.watch(cast(LocalGang, Between()))
    watch.ask()
    assert (watch.stall, reported) == (None, [])
    assert not list(tmp_path.iterdir()), "no stacks are taken"
    watch.close()


def test_nothing_is_reported_while_a_worker_has_ended_and_nobody_knows_how(tmp_path: Path) -> None:
    """Who is not reported counts as one that has exited 0."""
    ended = Worker.__new__(Worker)
    ended.rank, ended.pid, ended.ended, ended.record, ended.failed = 1, 7, True, None, None
    gang = Between()
    gang.workers = (ended,)
    reported, hang = list[object](), {"progress": 1.0, "phases": 7200.0}
    watch = HangWatch(Loop(), ShimChildren(), hang, tmp_path, tmp_path, lambda: reported.append(watch.stall))
    watch.watch(cast(LocalGang, gang))
    watch._tracks[0] = Track(0, 1.0, 7200.0, boottime() - 100)
    watch._stacks_at, watch._native = boottime() + 100, True  # none are taken
    watch.ask()
    assert reported == []
    ended.record = {"code": 0}
    watch._judge()
    assert reported == [watch.stall]
    watch.close()
