"""A shim that somebody else starts: a script in the place of systemd-run does it here; the real one, in tests/nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nodeagent.osutil.units import UnitError, start, start_command
from nodeagent.pods.host import ShimStart
from tests.integration.shim_support import UID, Bench, make_spec, wait_for

UNIT = "nodeagent.service"
OBEYS = r"""
import os, sys
words = sys.argv[1:]
command = words[words.index("--") + 1:]
environ = dict(w.removeprefix("--setenv=").split("=", 1) for w in words if w.startswith("--setenv="))
if os.fork() == 0:
    os.setsid()
    os.execvpe(command[0], command, environ)
"""


def systemd_run(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "bin" / "systemd-run"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\n{script}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


async def test_a_shim_that_is_started_as_a_unit_works_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd_run(tmp_path, monkeypatch, OBEYS)
    bench = Bench(tmp_path)
    bench.host = bench.new_host(how=ShimStart(unit=UNIT))
    bench.grant()
    bench.host.prepare(UID, make_spec(("true",), tmp_path, fork_server=False))
    status = await bench.until(lambda s: s.phase == "ready")
    assert status.shim_pid is not None and os.getsid(status.shim_pid) == status.shim_pid
    bench.host.retire(UID)
    await wait_for(lambda: not bench.host.status())
    assert (bench.logs / "shim.log").exists()
    await bench.host.close()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('Job for x failed.\\nSee journal')", "Job for x failed."),
        ("import sys; sys.exit(3)", "systemd-run ended with 3"),
    ],
)
async def test_one_that_does_not_start_makes_the_pod_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    systemd_run(tmp_path, monkeypatch, script)
    bench = Bench(tmp_path)
    bench.host = bench.new_host(how=ShimStart(unit=UNIT))
    bench.host.prepare(UID, make_spec(("true",), tmp_path, fork_server=False))
    status = await bench.until(lambda s: s.phase == "unfit")
    assert status.reason.startswith(f"the shim could not start: {message}; more in: journalctl -u nodeagent-pod-")
    assert not bench.host.connected(UID)
    await bench.host.close()


async def test_no_systemd_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnitError, match="systemd-run"):
        await start(start_command("u.service", UNIT, "job", "nobody", {}, ["true"]))


def test_the_settings_of_a_unit() -> None:
    words = start_command("u.service", UNIT, "resnet", "train1", {"A": "b"}, ["/opt/$x/python", "-m", "shim"])
    assert words[words.index("--") + 1 :] == ["/opt/$$x/python", "-m", "shim"]
    reported = set(words)
    assert {"--unit=u.service", "--slice=nodeagent.slice", "--setenv=A=b", "--property=User=train1"} <= reported
    assert {"--property=Before=nodeagent.service", "--property=OOMPolicy=continue"} <= reported
