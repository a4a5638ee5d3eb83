"""The folder of checkpoints: which count, which are whole, which are removed."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from nodeagent.train.folder import (
    MANIFEST,
    MARKER,
    CheckpointEntry,
    candidates,
    damage,
    described,
    drop,
    drop_uncommitted,
    entries,
    entry_of,
    mark_committed,
    next_order,
    prune,
    prune_snapshots,
    read_manifest,
    room,
    talk_folder,
    write_manifest,
)


def made(
    folder: Path, order: int, *, committed: bool = True, step: int = 0, generation: int = 1, snapshot: bool = False
) -> CheckpointEntry:
    entry = CheckpointEntry(order, step or order * 10, generation, snapshot)
    path = folder / entry.name
    path.mkdir()
    (path / "part").write_bytes(b"x" * 100)
    write_manifest(path, described(path, ["part"]))
    if committed:
        mark_committed(path)
    return entry


def test_names_come_back() -> None:
    entry = CheckpointEntry(12, 123456789, 7)
    assert entry.name == "ckpt-000012-step-123456789-g7"
    assert entry_of(entry.name) == entry
    assert entry_of("ckpt-1234567-step-00000001-g0") == CheckpointEntry(1234567, 1, 0)
    written_out = CheckpointEntry(3, 4, 5, True)
    assert written_out.name == "ckpt-000003-step-00000004-g5-snapshot"
    assert entry_of(written_out.name) == written_out
    for other in ("", "ckpt", "ckpt-000012-step-1", "x" + entry.name, entry.name + ".tmp"):
        assert entry_of(other) is None


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert entries(tmp_path / "none") == []
    assert next_order(tmp_path / "none") == 1


def test_without_a_pointer_the_newest_marked_one_counts(tmp_path: Path) -> None:
    one, two, _ = made(tmp_path, 1), made(tmp_path, 2), made(tmp_path, 3, committed=False)
    assert candidates(tmp_path, "") == [two, one]
    assert next_order(tmp_path) == 4


def test_with_a_pointer_nothing_newer_counts(tmp_path: Path) -> None:
    one, two, stale = made(tmp_path, 1), made(tmp_path, 2, committed=False), made(tmp_path, 3)
    assert candidates(tmp_path, two.name) == [two, one], "the pointer needs no marker: the store has said it"
    assert stale not in candidates(tmp_path, two.name)
    gone = CheckpointEntry(9, 90, 1)
    assert candidates(tmp_path, gone.name) == [gone, stale, one]


def test_whole_files_are_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / made(tmp_path, 1).name
    assert read_manifest(path) == {"part": [100, zlib.crc32(b"x" * 100)]}
    assert damage(path, read_manifest(path)) == ""


def test_every_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / made(tmp_path, 1).name
    part, manifest = path / "part", read_manifest(path)
    part.write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    assert "another checksum" in damage(path, manifest)
    part.write_bytes(b"x" * 99)
    assert "99 bytes instead of 100" in damage(path, manifest)
    part.unlink()
    assert "No such file" in damage(path, manifest)


def test_what_cannot_be_looked_at_is_not_called_damaged(tmp_path: Path) -> None:
    """A file server that was away cost the newest checkpoint: an older one was loaded, and it was removed."""
    path = tmp_path / made(tmp_path, 1).name
    part, manifest = path / "part", read_manifest(path)
    for file in (part, path / MANIFEST):
        file.unlink()
        file.symlink_to(file.name)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        damage(path, manifest)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        read_manifest(path)


def test_a_manifest_is_whole_or_none(tmp_path: Path) -> None:
    path = tmp_path / made(tmp_path, 1).name
    text = (path / MANIFEST).read_text()
    for at in range(len(text)):
        (path / MANIFEST).write_text(text[:at])
        with pytest.raises(ValueError, match="cannot be used"):
            read_manifest(path)
    (path / MANIFEST).write_text(text.replace("100", "101"))
    with pytest.raises(ValueError, match="checksum is wrong"):
        read_manifest(path)
    (path / MANIFEST).unlink()
    with pytest.raises(ValueError, match="never finished"):
        read_manifest(path)


def test_what_is_kept(tmp_path: Path) -> None:
    made(tmp_path, 1), made(tmp_path, 2), made(tmp_path, 3, committed=False)
    four, five = made(tmp_path, 4), made(tmp_path, 5)
    newer = made(tmp_path, 6, committed=False)  # another's that is being written
    prune(tmp_path, five, 2)
    assert entries(tmp_path) == [newer, five, four]
    prune(tmp_path, five, 1)
    assert entries(tmp_path) == [newer, five]
    assert (tmp_path / five.name / MARKER).exists()


def test_what_could_not_be_committed_does_not_pile_up(tmp_path: Path) -> None:
    one, two = made(tmp_path, 1), made(tmp_path, 2, committed=False)
    late, newest = made(tmp_path, 3, committed=False), made(tmp_path, 4, committed=False)
    other, newer = made(tmp_path, 2, committed=False, generation=2), made(tmp_path, 5, committed=False)
    drop_uncommitted(tmp_path, newest, {late.name, ""})
    assert entries(tmp_path) == [newer, newest, late, other, one]
    assert two not in entries(tmp_path)


def test_what_is_damaged_is_not_kept_in_case_of_need(tmp_path: Path) -> None:
    one, two, three = made(tmp_path, 1), made(tmp_path, 2), made(tmp_path, 3)
    prune(tmp_path, three, 2, {two})
    assert entries(tmp_path) == [three, one]


def test_what_was_written_out_of_memory_takes_no_checkpoints_place(tmp_path: Path) -> None:
    """Another number of ranks may not be able to load it."""
    one, two = made(tmp_path, 1), made(tmp_path, 2)
    first, lost = made(tmp_path, 3, snapshot=True), made(tmp_path, 4, snapshot=True, committed=False)
    second, third = made(tmp_path, 5, snapshot=True), made(tmp_path, 6, snapshot=True, generation=2)
    ours, other = talk_folder(tmp_path, 2, "ab"), talk_folder(tmp_path, 1, "cd")
    ours.mkdir()
    other.mkdir()
    prune_snapshots(tmp_path, third)
    assert entries(tmp_path) == [third, second, two, one]
    assert {first, lost} & set(entries(tmp_path)) == set()
    assert (ours.exists(), other.exists()) == (True, False), "what this generation may still talk over stays"
    newest = made(tmp_path, 7)
    prune(tmp_path, newest, 3)
    assert entries(tmp_path) == [newest, two, one]


def test_one_that_could_not_be_written_goes_and_no_other(tmp_path: Path) -> None:
    whole, half = made(tmp_path, 1), made(tmp_path, 2, committed=False)
    (tmp_path / half.name / MANIFEST).unlink()
    drop(tmp_path, half)
    assert entries(tmp_path) == [whole]
    drop(tmp_path, half)


def test_the_room_there_is_in_words(tmp_path: Path) -> None:
    assert re.fullmatch(rf"[0-9.]+ of [0-9.]+ MiB are free in {tmp_path}", room(tmp_path))
    assert room(tmp_path / "gone") == f"{tmp_path / 'gone'}: No such file or directory"
