"""What an agent remembers of signed jobs, on its disk and bounded."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from nodeagent.model.job import Checkpoint
from nodeagent.model.queue import Queue, Queues
from nodeagent.model.window import Window, Windows
from nodeagent.trust.ledger import ENDED_KEPT, MOST, REMEMBERED, FileLedger, LedgerEntry, Remembered, pruned
from tests.descriptors import seen_with

DAY = 86_400


async def test_it_is_kept_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "state" / "trust.json"
    assert FileLedger(path).load() == Remembered()
    entries = {"u1": LedgerEntry(expires=5, seen=4), "u2": LedgerEntry(expires=9, seen=8, ended=True)}
    entries["u3"] = LedgerEntry(expires=5, seen=4, pointer=Checkpoint(name="é", step=1, number=2, order=3))
    entries["u4"] = LedgerEntry(expires=5, seen=4, rev=7)
    queues = Queues(rev=3, by="ann", queues=(Queue(name="a", weight=2),), signature="s")
    one = Window(id="w1", nodes=("n1",), start=0, end=1, starts=0.0, ends=1.0, by="ann", text="x")
    kept = Remembered(entries, "c1", queues, Windows(rev=2, windows=(one,), signature="t"))
    await FileLedger(path).save(kept)
    assert FileLedger(path).load() == kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["trust.json"]


class Watched(dict[str, LedgerEntry]):
    """Remembers which thread went through it."""

    thread = 0

    def items(self) -> Any:
        self.thread = threading.get_ident()
        return super().items()


async def test_the_loop_does_not_make_the_text(tmp_path: Path) -> None:
    entries = Watched(u1=LedgerEntry(expires=5, seen=4))
    await FileLedger(tmp_path / "trust.json").save(Remembered(entries))
    assert entries.thread not in (0, threading.get_ident())


def test_a_damaged_file_is_reported_and_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    wrong = '{"u1": {"seen": 4, "expires": 5, "pointer": {"name": ".."}}}'
    jobs = ("7", '{"u1": 7}', '{"u1": {"seen": 4}}', wrong)
    rest = '"cluster_uid": "c", "queues": {}, "windows": {}'
    for text in ("", "[]", '{"u1": 7}', *('{"jobs": ' + one + ", " + rest + "}" for one in jobs), '{"jobs": {}}'):
        path.write_text(text)
        with capture_logs() as logs:
            assert FileLedger(path).load() == Remembered()
        assert logs[0]["log_level"] == "error"
        assert logs[0]["file"] == str(path)
        assert Path(logs[0]["damaged_copy"]).read_text() == text
    path.unlink()
    os.mkfifo(path)
    with capture_logs() as logs:
        assert FileLedger(path).load() == Remembered()
    assert f"it is no regular file: replace it: '{path}'" in logs[0]["why"]
    assert Path(logs[0]["damaged_copy"]).is_fifo()


async def test_one_that_cannot_be_read_now_is_not_empty(tmp_path: Path) -> None:
    """It would be replaced, and what has ended could run again."""
    ledger, entries = FileLedger(tmp_path / "trust.json"), {"u1": LedgerEntry(expires=5, seen=4, ended=True)}
    await ledger.save(Remembered(entries))

    def look() -> None:
        assert ledger.load().jobs == entries

    assert seen_with(look, 2) == [False, True]


def test_jobs_not_seen_for_long_are_forgotten_unless_they_are_there() -> None:
    entries = {"old": LedgerEntry(expires=DAY, seen=0), "new": LedgerEntry(expires=DAY, seen=DAY)}
    now = REMEMBERED + 1
    assert set(pruned(entries, {}, now)) == {"new"}
    assert set(pruned(entries, {"old": 1}, now)) == {"old", "new"}


def test_an_end_is_remembered_for_longer_than_any_admission_lasts() -> None:
    entries = {"u1": LedgerEntry(expires=3 * DAY, seen=2 * DAY, ended=True)}
    assert set(pruned(entries, {}, 3 * DAY + ENDED_KEPT - 1)) == {"u1"}
    assert pruned(entries, {}, 3 * DAY + ENDED_KEPT) == {}
    assert set(pruned(entries, {"u1": 1}, 1e12)) == {"u1"}, "its record is still there"


def test_it_is_bounded() -> None:
    entries = {f"u{n}": LedgerEntry(expires=n, seen=n) for n in range(MOST + 5)}
    kept = pruned(entries, {}, 0)
    assert len(kept) == MOST
    assert "u4" not in kept
