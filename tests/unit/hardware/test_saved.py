"""What a monitor remembers comes back from the disk as it was; what cannot be understood is said, not guessed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nodeagent.hardware.expected import Seen
from nodeagent.hardware.judging.judge import JudgeMemory, Repair
from nodeagent.hardware.readings import DeviceEvent
from nodeagent.hardware.saved import SavedHealth, load_memory, save_memory
from nodeagent.model.health import Verdict
from nodeagent.model.node import Gpu

VERDICT = Verdict(
    rule="xid.79", device="GPU-a", severity="fatal", action="reboot", text="lost", since=1.0, seen=2.0,
    stage="probation", until=9.0, boot="b",
)  # fmt: skip


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    memory = JudgeMemory(
        (VERDICT,), (DeviceEvent("xid", 2.0, "GPU-a", 79, "line", 3),), (Repair("GPU-a", "x", "reboot", 1.0),), 5.0
    )
    kept = SavedHealth(memory, "b", Seen(("GPU-a",), {"GPU-a": "0000:3b:00"}, {"GPU-a": 18}, ("mlx5_0/1",)), record=7)
    save_memory(tmp_path / "health.json", kept)
    assert load_memory(tmp_path / "health.json") == kept
    assert [p.name for p in tmp_path.iterdir()] == ["health.json"]


def test_without_a_file_nothing_is_remembered(tmp_path: Path) -> None:
    assert load_memory(tmp_path / "health.json") == SavedHealth()


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', '{"version": 1, "verdicts": [{"rule": 1}]}', "[]"])
def test_what_cannot_be_understood_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "health.json"
    file.write_text(text)
    with pytest.raises(ValueError):
        load_memory(file)


def test_a_whole_file_of_another_version_is_not_read(tmp_path: Path) -> None:
    save_memory(file := tmp_path / "health.json", SavedHealth())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match="it is of version 2, this agent reads 1"):
        load_memory(file)


def test_what_was_seen_is_worth_a_write_and_the_time_alone_is_not() -> None:
    assert SavedHealth(seen=Seen(ports=("mlx5_0/1",))).essence != SavedHealth().essence
    assert SavedHealth(JudgeMemory(at=5.0)).essence == SavedHealth().essence


def test_nobody_waits_for_who_writes_to_a_pipe_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "health.json")
    with pytest.raises(OSError, match="it is no regular file"):
        load_memory(file)


WRONG = ["text", 5, None, True, [1], [[]], {"a": 1}, {"a": []}]


@pytest.mark.parametrize("key", ["boot", "gpus", "buses", "links", "ports", "devices", "record", "at", "verdicts",
                                 "past", "repairs", "past.0.at", "past.0.device", "repairs.0.at", "verdicts.0.since",
                                 "devices.v.0.uuid"])  # fmt: skip
def test_values_of_wrong_kinds_are_named(key: str, tmp_path: Path) -> None:
    """None of them is taken, to fail in a judgement later."""
    file = tmp_path / "health.json"
    memory = JudgeMemory((VERDICT,), (DeviceEvent("xid", 2.0),), (Repair("GPU-a", "x", "reboot", 1.0),))
    save_memory(file, SavedHealth(memory, devices={"v": (Gpu(uuid="u", index=0, name="n"),)}))
    whole = file.read_text()
    *path, last = key.split(".")
    named = 0
    for wrong in WRONG:
        inner = data = json.loads(whole)
        for part in path:
            inner = inner[int(part) if part.isdigit() else part]
        inner[last] = wrong
        file.write_text(json.dumps(data))
        try:
            kept = load_memory(file)
        except ValueError as error:
            assert str(error).startswith(key)
            named += 1
        else:
            save_memory(tmp_path / "again", kept)
            assert json.loads((tmp_path / "again").read_text()) == data
    assert named >= len(WRONG) - 2
