"""The watch over a pod's workers where there is none that it could see; all else of it, with a real shim and real
workers, in tests/integration/test_shim_hang.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from nodeagent.shim.gang import LocalGang
from nodeagent.shim.hang.watch import HangWatch, suspicious
from nodeagent.shim.loop import Loop
from nodeagent.shim.processes import ShimChildren


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
