"""What pods that have ended left is removed, in the end; what a pod has is not."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.osutil import untrusted
from nodeagent.osutil.untrusted import AsideByOwner, PutAsideError, UntrustedError, remove_tree
from nodeagent.pods import clearing
from nodeagent.pods.clearing import TRIES, Clearing
from nodeagent.pods.folder import put_away

BOUND = 20.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - a thread does it
            await asyncio.sleep(0.01)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that is not empty."""
    made = tmp_path / "pods" / "key"
    made.mkdir(parents=True)
    (made / "file").touch()
    return made


@pytest.mark.parametrize("passes", [True, False])
async def test_a_removal_that_fails_is_tried_again_some_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, passes: bool
) -> None:
    tries = list[str]()

    def remove(trusted: Path, name: str) -> None:
        tries.append(name)
        if not passes or len(tries) < TRIES:
            raise UntrustedError("it is another mount")
        remove_tree(trusted, name)

    monkeypatch.setattr(clearing, "remove_tree", remove)
    monkeypatch.setattr(clearing, "TRY_AGAIN", 0.001)
    cleared = Clearing("", AsideByOwner(), lambda _: False)
    cleared.remove(folder)
    assert "key" not in names(folder.parent), "its name is free at once"
    await until(lambda: "see what is mounted there" in caplog.text or not names(folder.parent))
    assert len(tries) == TRIES
    assert len(names(folder.parent)) == (not passes)
    await cleared.close()


async def test_what_was_put_aside_is_not_removed_again_and_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = list[str]()

    def remove(trusted: Path, name: str) -> None:
        tries.append(name)
        raise PutAsideError(f"{trusted / name} holds what is uid 8's")

    monkeypatch.setattr(clearing, "remove_tree", remove)
    monkeypatch.setattr(clearing, "TRY_AGAIN", 0.001)
    cleared = Clearing("nodeagent.service", AsideByOwner(), lambda _: False)
    cleared.remove(folder)
    await until(lambda: not cleared._tasks)
    assert len(tries) == 1
    assert [record.getMessage() for record in caplog.records] == [f"{folder.parent / tries[0]} holds what is uid 8's"]


@pytest.mark.parametrize("in_use", [True, False])
async def test_a_name_that_a_new_pod_has_by_now_is_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    """The former folder could not be renamed."""
    asked = list[Path]()

    def busy(path: Path) -> Path | None:
        if not asked:
            raise OSError(errno.EBUSY, "something is mounted there")
        return put_away(path)

    def used(path: Path) -> bool:
        asked.append(path)
        return in_use

    monkeypatch.setattr(clearing, "put_away", busy)
    cleared = Clearing("", AsideByOwner(), used)
    cleared.remove(folder)
    await until(lambda: asked and not cleared._tasks)
    assert names(folder.parent) == (["key"] if in_use else [])


def mounts_in(folder: Path) -> list[str]:
    """Where something is mounted below it; what lies deeper comes later."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted(one.replace("\\040", " ") for one in places if one.startswith(str(folder)))


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script in the place of systemd-run: it notes that it ran, and runs the command itself."""
    tool = tmp_path / "bin" / "systemd-run"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\nimport os, sys\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "os.environ.update(word[9:].split('=', 1) for word in sys.argv if word.startswith('--setenv='))\n"
        "command = [word.replace('$$', '$') for word in sys.argv[sys.argv.index('--') + 1 :]]\n"
        "os.execvp(command[0], command)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("unit", ["", "nodeagent.service"])
async def test_what_is_mounted_on_it_is_detached_first(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """By systemd, where the agent's sandbox does not let it."""
    stand_in(tmp_path, monkeypatch)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    for _ in range(2):
        subprocess.run(["mount", "--bind", tmp_path / "kept", folder], check=True)  # noqa: ASYNC221
    cleared = Clearing(unit, AsideByOwner(), lambda _: False)
    cleared.remove(folder)
    try:
        await until(lambda: not names(folder.parent))
    finally:
        await cleared.close()
        for _ in range(2):
            subprocess.run(["umount", "-q", folder], check=False)  # noqa: ASYNC221
    assert (tmp_path / "kept" / "file").exists()
    assert (tmp_path / "ran").exists() == bool(unit)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
async def test_what_is_mounted_deeper_is_detached_by_systemd_where_the_agent_may_not(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A link leads nobody to another mount: the one elsewhere stays."""
    stand_in(tmp_path, monkeypatch)
    elsewhere = [tmp_path / "elsewhere" / name for name in ("data", "a")]
    deeper = [folder / "a b" / "data", folder / "a b" / "data" / "sub", folder / "c"]
    (tmp_path / "kept" / "sub").mkdir(parents=True)
    (tmp_path / "kept" / "file").touch()
    for at in (*elsewhere, *deeper):
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", tmp_path / "kept", at], check=True)  # noqa: ASYNC221
    (folder / "link").symlink_to(tmp_path / "elsewhere")

    def refused(_path: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(untrusted, "detach_mount", refused)
    monkeypatch.setattr(clearing, "TRY_AGAIN", 0.01)
    cleared = Clearing("nodeagent.service", AsideByOwner(), lambda _: False)
    cleared.remove(folder)
    try:
        await until(lambda: not names(folder.parent) or "see what is mounted there" in caplog.text)
        assert names(folder.parent) == []
        assert mounts_in(tmp_path) == sorted(map(str, elsewhere))
        assert (tmp_path / "kept" / "file").exists()
    finally:
        await cleared.close()
        for place in reversed(mounts_in(tmp_path)):
            subprocess.run(["umount", "-l", place], check=False)  # noqa: ASYNC221
