"""A folder that is to be ours is, or the agent says what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.agent.identity import Identity, IdentityError, IdentityNotSavedError, NotOurFolderError, check, own
from nodeagent.ctl import client
from nodeagent.ctl.terminal import NoAgentError
from nodeagent.model.node import Incarnation

STRANGER = 4711
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a stranger")


@pytest.fixture
def common(tmp_path: Path) -> Path:
    """Like /tmp."""
    folder = tmp_path / "common"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of its own, to be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_missing_folder_is_made(common: Path) -> None:
    own(common / "nodeagent-0" / "state")
    own(common / "nodeagent-0" / "state")
    check(common / "nodeagent-0" / "not yet")
    assert (common / "nodeagent-0" / "state").is_dir()


@as_root
def test_a_strangers_folder_is_refused(common: Path) -> None:
    theirs = common / "nodeagent-0"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    for path in (theirs, theirs / "state"):
        with pytest.raises(NotOurFolderError, match=f"{theirs} belongs to uid {STRANGER}.*Remove it"):
            own(path)
    assert list(theirs.iterdir()) == []
    with pytest.raises(IdentityError, match="XDG_RUNTIME_DIR"):
        Identity(theirs, "boot", None, "n1").take()


@as_root
def test_a_strangers_link_is_refused(common: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    link = common / "nodeagent-0"
    link.symlink_to(tmp_path / "ours")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(NotOurFolderError, match=str(STRANGER)):
        own(link)
    with pytest.raises(NotOurFolderError, match=str(STRANGER)):
        own(link / "state")
    os.chown(link, 0, 0, follow_symlinks=False)
    own(link)


def test_a_folder_open_to_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotOurFolderError, match="by everybody"):
        own(tmp_path / "open")


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "agent.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityNotSavedError, match="symbolic"):
        Identity(tmp_path / "run", "boot", None, "n1").take()


@as_root
def test_a_full_folder_is_named_and_the_life_is_kept_once_there_is_room(small_disk: Path) -> None:
    identity = Identity(small_disk / "run", "boot", None, "n1")
    first = identity.take()
    identity.release()
    with (small_disk / "filled").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    for begin in (identity.take, identity.take, identity.renew):  # the lock is free for the next try
        where = rf"{small_disk}/run/life\.json: No space left on device; .*df -h"
        with pytest.raises(IdentityNotSavedError, match=where):
            begin()
    (small_disk / "filled").unlink()
    assert identity.take() == Incarnation(life=first.life, start=2)
    identity.release()


@as_root
def test_the_tool_passes_over_a_strangers_folder(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = common / "nodeagent-0"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    monkeypatch.setattr(client, "usual_sockets", lambda: [str(theirs / "api.sock")])
    monkeypatch.setattr(client, "local_clusters", dict)
    with pytest.raises(NoAgentError, match=f"belongs to uid {STRANGER}, not to you"):
        client.find()
