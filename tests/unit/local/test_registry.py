"""Which of the running clusters a command means."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nodeagent.local import registry
from nodeagent.local.layout import LocalFolders, NotFoundError, SeveralError


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
        with pytest.raises(SeveralError, match=r"2 local clusters run here \(mine, command\).*--name") as raised:
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
