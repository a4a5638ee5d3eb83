"""The wait for systemd has an end, whatever the kernel does with the command that asks it."""

from __future__ import annotations

import subprocess

import pytest

from nodeagent.osutil import units


async def test_a_command_that_even_sigkill_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[subprocess.Popen[bytes]]()
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: left.append(process))  # noqa: PLW0108 (bound)
    monkeypatch.setattr(units, "START_LIMIT", 0.01)
    monkeypatch.setattr(units, "DIES", 0.01)
    with pytest.raises(units.UnitError, match="systemd did not start it within"):
        await units.start(["sleep", "10"])
    (process,) = left
    assert process.poll() is None
    kill(process)
    process.wait()


async def test_one_that_is_late_is_killed_and_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = list[subprocess.Popen[bytes]]()
    kill = subprocess.Popen.kill

    def kill_it(process: subprocess.Popen[bytes]) -> None:
        killed.append(process)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill_it)
    monkeypatch.setattr(units, "START_LIMIT", 0.01)
    with pytest.raises(units.UnitError, match="systemd did not start it within"):
        await units.start(["sleep", "600"])
    assert [process.returncode for process in killed] == [-9]
