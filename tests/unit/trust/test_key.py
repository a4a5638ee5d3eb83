"""The cluster's key: the file, and what is signed with it."""

from __future__ import annotations

import base64
import errno
import os
import stat
from pathlib import Path

import pytest

from nodeagent.trust.key import ClusterKey, KeyFileError, make

RAW = bytes(range(32))


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "cluster.key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_made_key_is_a_secret_file_that_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.key"
    make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["cluster.key"]
    key = ClusterKey.load(path)
    assert key.verify("job", b"x", ClusterKey.load(path).sign("job", b"x"))
    assert path.read_text().strip() not in repr(key)


def synced(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> dict[str, list[str]]:
    """What is told to the disk from now on: each file or folder, with the names that the folder has by then. The one
    with the name ``fails`` is not taken."""
    found: dict[str, list[str]] = {}

    def sync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.name == fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found[path.name] = sorted(one.name for one in path.iterdir()) if path.is_dir() else []

    monkeypatch.setattr(os, "fsync", sync)
    return found


def test_a_made_key_and_the_folders_made_for_it_outlive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = synced(monkeypatch)
    make(tmp_path / "above" / "new" / "cluster.key")
    assert (found["new"], found["above"], found[tmp_path.name]) == (["cluster.key"], ["new"], ["above"])
    assert any(name.startswith(".cluster.key.") for name in found)


def test_a_key_whose_name_the_disk_does_not_take_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced(monkeypatch, fails=tmp_path.name)
    with pytest.raises(KeyFileError, match=r"no key can be written to .*: Input/output error"):
        make(tmp_path / "cluster.key")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_key_is_never_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path, RAW.hex())
    with pytest.raises(KeyFileError, match=r"exists already.*Every node of a cluster needs the same"):
        make(path)
    assert path.read_text() == RAW.hex()
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.key"]


def test_where_no_file_can_be_made_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no key can be written to .*: File exists"):
        make(written(tmp_path, "") / "cluster.key")


@pytest.mark.parametrize(
    "text", [RAW.hex(), RAW.hex().upper() + "\n", base64.b64encode(RAW).decode() + "\n"], ids=["hex", "HEX", "base64"]
)
def test_hex_and_base64_are_the_same_key(tmp_path: Path, text: str) -> None:
    loaded = ClusterKey.load(written(tmp_path, text))
    assert loaded.sign("p", b"x") == ClusterKey(RAW).sign("p", b"x")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has 0 bytes"),
        (RAW.hex()[:-2], "it has 31 bytes, at least 32 are needed"),
        ("not a key!\n", "neither hex nor base64"),
        (RAW.hex() + "\n" + RAW.hex(), "neither hex nor base64"),
        ("\N{SNOWMAN}", "neither hex nor base64"),
        ("ab" * 3000, "more than 4096 bytes"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(KeyFileError, match=f"{why}.*nodeagent keygen"):
        ClusterKey.load(written(tmp_path, text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, RAW.hex(), mode)
    with pytest.raises(KeyFileError, match=f"has mode {mode:04o}.*chmod 0600 {path}") as error:
        ClusterKey.load(path)
    assert RAW.hex() not in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, RAW.hex())
    os.chown(path, 1234, -1)
    with pytest.raises(KeyFileError, match="belongs to uid 1234"):
        ClusterKey.load(path)


def test_without_a_file_it_says_how_to_make_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    with pytest.raises(KeyFileError, match=f"nodeagent keygen {path}` on one node, and copy it to every node"):
        ClusterKey.load(path)
    os.mkfifo(pipe := tmp_path / "pipe")
    for none in (tmp_path, pipe):
        with pytest.raises(KeyFileError, match=f"{none} cannot be read: it is no regular file: replace it"):
            ClusterKey.load(none)


def test_a_signature_counts_for_its_key_purpose_and_bytes_only() -> None:
    key = ClusterKey(RAW)
    signature = key.sign("job", b"payload")
    assert key.verify("job", b"payload", signature)
    assert not key.verify("command", b"payload", signature)
    assert not key.verify("job", b"payload.", signature)
    assert not ClusterKey(RAW[::-1]).verify("job", b"payload", signature)
    for forged in ("", signature[:-1], signature.upper(), "\N{SNOWMAN}"):
        assert not key.verify("job", b"payload", forged)
    assert key.derive("job") != key.derive("command")
    with pytest.raises(ValueError, match="at least 32 bytes"):
        ClusterKey(RAW[:-1])
