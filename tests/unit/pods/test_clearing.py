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

from nodeagent.osutil.untrusted import AsideByOwner, UntrustedError, remove_tree
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("unit", ["", "nodeagent.service"])
async def test_what_is_mounted_on_it_is_detached_first(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """By systemd, where the agent's sandbox does not let it: a script is in the place of systemd-run here."""
    tool = tmp_path / "bin" / "systemd-run"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\nimport os, sys\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "command = [word.replace('$$', '$') for word in sys.argv[sys.argv.index('--') + 1 :]]\n"
        "os.execvp(command[0], command)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
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
