"""Loading what was written out of memory: whole or not at all, and by whom."""

from __future__ import annotations

import errno
import time
import zlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from nodeagent.train import snapshots  # noqa: E402
from nodeagent.train.flat import copy_into, take_apart, total  # noqa: E402
from nodeagent.train.folder import (  # noqa: E402
    CheckpointEntry,
    described,
    entries,
    mark_committed,
    next_order,
    part_name,
    write_manifest,
)
from nodeagent.train.memory import HEADER, Header, SharedBuffer, size_of  # noqa: E402
from nodeagent.train.snapshots import (  # noqa: E402
    Buffer,
    gather_seen,
    load_written,
    read_written,
    restore,
)
from nodeagent.train.writeout import WriteOrder, write_out  # noqa: E402
from tests.unit.train.helpers import memories  # noqa: E402

pytestmark = pytest.mark.torch


def kept(rank: int, world: int, shared: bool, step: int = 7) -> SharedBuffer:
    """As ``Snapshots.take`` keeps it."""
    flat = take_apart({"weights": torch.full((100,), float(rank)), "step": step})
    memory = SharedBuffer.of_size(size_of(flat.data_bytes, len(flat.rest)))
    memories.append(memory)
    buffer = Buffer(memory)
    copy_into(buffer.views(flat.places), flat.tensors)
    data = total(buffer.data[HEADER : HEADER + flat.data_bytes])
    header = Header(3, step, rank, world, shared, flat.data_bytes, len(flat.rest), data, zlib.crc32(flat.rest))
    memory.put_rest(header, flat.rest)
    memory.seal(header)
    return memory


def written(folder: Path, *kept: SharedBuffer) -> Path:
    found, ranks = [(slot, 0, memory.fd) for slot, memory in enumerate(kept)], range(len(kept))
    order = WriteOrder(str(folder), 3, "ab", 0, 1, ranks, len(kept), found, (0, 0), False, time.monotonic() + 20)
    assert write_out(order, lambda _: "")
    return folder / entries(folder)[0].name


def test_each_rank_gets_its_own_in_place(tmp_path: Path) -> None:
    path = written(tmp_path, kept(0, 2, False), kept(1, 2, False))
    with pytest.raises(ValueError, match="a part of its own for each of 2 ranks, and there are 3"):
        read_written(path, 1, 3)
    with pytest.raises(ValueError, match="and there are 1"):
        read_written(path, 0, 1)
    rest, body = read_written(path, 1, 2)
    assert (len(rest) > 0, float(body[:400].view(torch.float32)[99])) == (True, 1.0)


def test_what_all_share_serves_any_number_of_ranks(tmp_path: Path) -> None:
    path = written(tmp_path, kept(0, 1, True))
    state = {"weights": torch.zeros(100), "step": 0}
    assert load_written(state, path, 0, 1) == ""
    assert (state["step"], float(state["weights"].sum())) == (7, 0.0)
    read_written(path, 5, 8)


def test_a_changed_byte_is_found_wherever_it_was_changed(tmp_path: Path) -> None:
    path = written(tmp_path, kept(0, 1, True))
    file = path / part_name(0)
    content = bytearray(file.read_bytes())
    for at in (HEADER + 5, len(content) - 1):
        file.write_bytes(bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]]))
        state = {"weights": torch.ones(100), "step": 1}
        assert "has another checksum" in load_written(state, path, 0, 1)
        write_manifest(path, described(path, [file.name]))  # it was so in memory
        assert "damaged in memory before it was written" in load_written(state, path, 0, 1)
        assert (state["step"], float(state["weights"].sum())) == (1, 100.0)
        file.write_bytes(content)
        write_manifest(path, described(path, [file.name]))
    file.write_bytes(bytes(len(content)))
    write_manifest(path, described(path, [file.name]))
    assert "no snapshot that this nodeagent can read" in load_written({}, path, 0, 1)
    write_manifest(path, {})
    assert "no part at all" in load_written({}, path, 0, 1)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damaged_snapshots_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damaged: int
) -> None:
    paths = [written(tmp_path, kept(0, 1, True, step)) for step in (7, 9)][::-1]
    for path in paths[:damaged]:
        (path / part_name(0)).write_bytes(b"x")
    monkeypatch.setattr(snapshots, "_own", [])
    monkeypatch.setenv("NODEAGENT_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("NODEAGENT_CHECKPOINT", paths[0].name)
    state = {"weights": torch.ones(100), "step": 1}
    assert (restore(state), state["step"]) == ((9, 9), (7, 7), (None, 1))[damaged]
    assert capsys.readouterr().err.count("is passed over") == damaged


def test_a_checkpoint_that_is_newer_than_what_is_left_is_the_scripts_own_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, kept(0, 1, True, 7))
    between = CheckpointEntry(next_order(tmp_path), 8, 3)
    (tmp_path / between.name).mkdir()
    mark_committed(tmp_path / between.name)
    newest = written(tmp_path, kept(0, 1, True, 9))
    (newest / part_name(0)).write_bytes(b"x")
    monkeypatch.setattr(snapshots, "_own", [])
    monkeypatch.setenv("NODEAGENT_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("NODEAGENT_CHECKPOINT", newest.name)
    assert restore({"weights": torch.ones(100), "step": 1}) is None


def restored(monkeypatch: pytest.MonkeyPatch, folder: Path, pointer: str) -> int | None:
    monkeypatch.setattr(snapshots, "_own", [])
    monkeypatch.setenv("NODEAGENT_CHECKPOINT_DIR", str(folder))
    monkeypatch.setenv("NODEAGENT_CHECKPOINT", pointer)
    return restore({"weights": torch.ones(100), "step": 1})


def test_a_job_that_is_submitted_again_finds_what_the_one_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert restored(monkeypatch, tmp_path / "none", "") is None
    newest = [written(tmp_path, kept(0, 1, True, step)) for step in (7, 9)][-1]
    assert restored(monkeypatch, tmp_path, "") == 9
    assert restored(monkeypatch, tmp_path, "a-name-of-the-scripts-own") is None
    (newest / part_name(0)).write_bytes(b"x")
    assert restored(monkeypatch, tmp_path, "") == 7
    later = CheckpointEntry(next_order(tmp_path), 10, 1)
    (tmp_path / later.name).mkdir()
    mark_committed(tmp_path / later.name)
    assert restored(monkeypatch, tmp_path, "") is None, "the script's own is newer"


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job began anew, without a word."""
    newest = written(tmp_path, kept(0, 1, True, 7))
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        restored(monkeypatch, loop, "")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        restored(monkeypatch, loop, newest.name)


@pytest.mark.parametrize("other", [None, OSError(errno.ESTALE, "stale")])
def test_what_one_rank_cannot_look_at_is_raised_on_all(other: OSError | None) -> None:
    def look() -> str:
        if other is None:
            raise OSError(errno.EACCES, "no right")
        return "seen"

    with pytest.raises(OSError, match="no right" if other is None else "stale"):
        gather_seen(look, "", lambda mine: [mine, ("", other)])
    assert gather_seen(lambda: "seen", "", lambda mine: [mine, ("as well", None)]) == ["seen", "as well"]
