"""The wait for systemd has an end, whatever the kernel does with the command that asks it; and what starts services
again by itself leaves those of jobs alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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


def test_needrestart_leaves_the_services_of_jobs_alone_and_no_others() -> None:
    """After an upgrade of libc it started each of them again, which killed the workers of node after node."""
    text = (Path(__file__).parents[3] / "systemd/nodeagent.needrestart.conf").read_text()
    (pattern,) = re.findall(r"^push @\{\$nrconf\{blacklist_rc\}\}, qr\((.*)\);$", text, re.MULTILINE)
    assert re.search(pattern, units.unit_name("0123456789ab"))
    assert not any(re.search(pattern, name) for name in ("nodeagent.service", units.lease_unit("nodeagent.service")))
