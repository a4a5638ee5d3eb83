"""What the judge remembers comes back from the disk as it was; what cannot be understood is said, not guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.hardware.judging.judge import JudgeMemory, Repair
from nodeagent.hardware.monitor import Kept, load_memory, save_memory
from nodeagent.hardware.readings import DeviceEvent
from nodeagent.model.health import Verdict

VERDICT = Verdict(
    rule="xid.79", device="GPU-a", severity="fatal", action="reboot", text="lost", since=1.0, seen=2.0,
    stage="probation", until=9.0, boot="b",
)  # fmt: skip


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    memory = JudgeMemory(
        (VERDICT,), (DeviceEvent("xid", 2.0, "GPU-a", 79, "line", 3),), (Repair("GPU-a", "x", "reboot", 1.0),), 5.0
    )
    kept = Kept(memory, "b", ("GPU-a",), {"GPU-a": "0000:3b:00"}, {"GPU-a": 18}, ("mlx5_0/1",), record=7)
    save_memory(tmp_path / "health.json", kept)
    assert load_memory(tmp_path / "health.json") == kept
    assert [p.name for p in tmp_path.iterdir()] == ["health.json"]


def test_without_a_file_nothing_is_remembered(tmp_path: Path) -> None:
    assert load_memory(tmp_path / "health.json") == Kept()


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', '{"version": 1, "verdicts": [{"rule": 1}]}', "[]"])
def test_what_cannot_be_understood_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "health.json"
    file.write_text(text)
    with pytest.raises((ValueError, KeyError, TypeError)):
        load_memory(file)
