"""Which of the running clusters a command means."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nodeagent.ctl.main import cli
from nodeagent.local import registry
from nodeagent.local.layout import LocalError, LocalFolders, NotFoundError, UsageError


@contextmanager
def registered(home: Path, **names: bool) -> Iterator[LocalFolders]:
    """Clusters without processes: name to whether it lives as long as one command."""
    folders = LocalFolders.of_user()
    with ExitStack() as stack:
        for name, temporary in names.items():
            made, lock = registry.create(folders, name, home / name, (20000, 20199), temporary=temporary)
            stack.callback(shutil.rmtree, made.run)
            stack.callback(os.close, lock)
        yield folders


def test_of_several_clusters_one_is_named(home: Path) -> None:
    """What is done by mistake to one of them, as ``down`` and ``kill``, cannot be undone."""
    with registered(home, command=True, mine=False) as folders:
        with pytest.raises(UsageError, match=r"2 local clusters run here \(mine, command\).*--name") as raised:
            registry.cluster(folders)
        assert raised.value.code == 2
        assert registry.cluster(folders, "mine").name == "mine"
        with pytest.raises(NotFoundError, match="there is mine, command"):
            registry.cluster(folders, "other")


def test_what_lives_as_long_as_a_command_is_named(home: Path) -> None:
    with registered(home, command=True) as folders:
        with pytest.raises(NotFoundError, match=r"there is only command, of a `run --local`.*--name command"):
            registry.cluster(folders)
        assert registry.cluster(folders, "command").temporary


def test_the_only_cluster_is_meant(home: Path) -> None:
    with registered(home, mine=False) as folders:
        assert registry.cluster(folders).name == "mine"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("created", "yesterday", "'created' is \"yesterday\", which is not a time in seconds"),
        ("created", None, "'created' is null"),
        ("ports", ["1", 2], "which is not two numbers"),
        ("ports", 5, "which is not two numbers"),
        ("data", "elsewhere", "which is not an absolute path"),
        ("data", ["/"], "which is not an absolute path"),
        ("temporary", "no", "which is not true or false"),
        ("uid", 12, "which is not text"),
        ("name", [], "which is not text"),
    ],
)
def test_a_file_with_wrong_kinds_is_named_with_its_key(home: Path, key: str, value: Any, says: str) -> None:
    """Of a running cluster: nothing of it is removed, and it is not said that none runs."""
    with registered(home, mine=False):
        file = home / "run/mine/cluster.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        for verb in ("local status", "local down", "get"):
            result = CliRunner().invoke(cli, verb.split())
            assert (result.exit_code, type(result.exception)) == (1, SystemExit)
            first, step = result.stderr.splitlines()
            assert first.startswith(f"nodeagentctl: {file}: ") and says in first
            assert str(home / "run/mine/lock") in step
        assert file.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 10_000, "{}"])
def test_a_file_that_is_no_cluster_is_named(home: Path, text: str) -> None:
    with registered(home, mine=False) as folders:
        (home / "run/mine/cluster.json").write_text(text)
        with pytest.raises(LocalError, match=r"run/mine/cluster\.json"):
            registry.cluster(folders)


def test_what_a_cluster_left_goes_whatever_its_file_says(home: Path) -> None:
    with registered(home, mine=False) as folders:
        pass
    (home / "run/mine").mkdir()
    (home / "run/mine/cluster.json").write_text("[]")
    assert registry.clusters(folders) == []
    assert not (home / "run/mine").exists()
