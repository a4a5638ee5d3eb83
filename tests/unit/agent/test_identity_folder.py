"""A folder that is to be ours is, or the agent says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.agent.identity import Identity, IdentityError, NotOurFolderError, check, own
from nodeagent.ctl import client
from nodeagent.ctl.terminal import NoAgentError

STRANGER = 4711
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a stranger")


@pytest.fixture
def common(tmp_path: Path) -> Path:
    """Like /tmp."""
    folder = tmp_path / "common"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


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
    with pytest.raises(OSError, match="symbolic"):
        Identity(tmp_path / "run", "boot", None, "n1").take()


@as_root
def test_the_tool_passes_over_a_strangers_folder(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = common / "nodeagent-0"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    monkeypatch.setattr(client, "usual_sockets", lambda: [str(theirs / "api.sock")])
    monkeypatch.setattr(client, "local_clusters", dict)
    with pytest.raises(NoAgentError, match=f"belongs to uid {STRANGER}, not to you"):
        client.find()
