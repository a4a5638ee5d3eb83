"""Several roles in one pod: their commands, their ports, and who starts after whom."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Ready
from tests.integration.roles_support import begin, spec
from tests.integration.shim_support import UID, open_bench, token


@pytest.mark.parametrize("fork_server", [True, False], ids=["fork_server", "plain"])
async def test_a_role_starts_when_it_is_released(tmp_path: Path, fork_server: bool) -> None:
    async with open_bench(tmp_path) as bench:
        status = await begin(bench, spec(tmp_path, Ready(port=True), fork_server))
        server, trainer = status.workers
        assert (server.state, trainer.state, trainer.pid) == ("running", "starting", None)
        assert (status.waiting, status.ready) == (("trainer",), ())
        (tmp_path / "listen").touch()
        await bench.until(lambda s: s.ready == ("server.0",))
        bench.host.release(UID, token(7), ("trainer",))  # of another generation
        bench.host.release(UID, token(1), ("trainer",))
        status = await bench.until(lambda s: len(s.exits) == 1)
        assert (status.exits[0].rank, status.exits[0].code, status.waiting) == (1, 0, ())
        await bench.until(lambda s: s.ready == ("server.0", "trainer.0"))
        await bench.printed("['server']", rank=1)
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_place_that_ended_well_is_ready_though_it_never_listened(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        job = spec(tmp_path, Ready(port=True))
        (tmp_path / "server.py").write_text("print('nothing to serve')")
        await begin(bench, job)
        status = await bench.until(lambda s: s.ready == ("server.0",))
        assert (status.phase, status.waiting) == ("running", ("trainer",))
        bench.host.release(UID, token(1), ("trainer",))
        await bench.until(lambda s: s.phase == "exited" and len(s.exits) == 2)


async def test_what_waits_never_starts_after_a_stop(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await begin(bench, spec(tmp_path, Ready(port=True)))
        bench.host.stop(UID, 5.0)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [e.rank for e in status.exits] == [0]
        bench.host.release(UID, token(1), ("trainer",))
        status = await begin(bench, spec(tmp_path, Ready(port=True)), 2)
        assert [w.state for w in status.workers] == ["running", "starting"]
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_command_says_when_a_place_is_ready(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        command = ("sh", "-c", "test -e listen || { echo no database yet >&2; exit 3; }")
        await begin(bench, spec(tmp_path, Ready(command=command)))
        answer = "ready server.0 failed with exit code 3: no database yet"
        await bench.logged(answer)
        status = await bench.until(lambda s: s.reason == answer)
        assert status.ready == ()
        (tmp_path / "listen").touch()
        status = await bench.until(lambda s: s.ready == ("server.0",))
        assert status.reason == ""
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_without_a_condition_a_place_is_ready_once_it_runs(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await begin(bench, spec(tmp_path, None))
        await bench.until(lambda s: s.ready == ("server.0",))
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_the_fork_server_starts_no_other_program_than_its_own(tmp_path: Path) -> None:
    """Each role has its command: it may be no Python, or another one, or nothing that the server can run."""
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to(sys.executable)
    (tmp_path / "say.py").write_text("import sys; print('by', sys.executable, *sys.argv[1:])")
    (tmp_path / "say.sh").write_text("echo by sh $1\n")
    job = spec(tmp_path, None, fork_server=True)
    commands = {
        "server": (sys.executable, "say.py", "one"),
        "same": (sys.executable, "-u", "say.py", "two"),
        "other": (str(other), "say.py"),
        "shell": ("sh", "say.sh", "three"),
        "code": (sys.executable, "-c", "print('by -c')"),
    }
    roles = tuple(job.roles[0].model_copy(update={"name": n, "command": c}) for n, c in commands.items())
    job = job.model_copy(update={"roles": roles, "completes": ""})
    async with open_bench(tmp_path) as bench:
        await bench.ready(job)
        await begin(bench, job, places=tuple(f"{name}.0" for name in commands))
        status = await bench.until(lambda s: len(s.exits) == len(commands))
        assert [e.code for e in status.exits] == [0] * len(commands)
        by = (f"{sys.executable} one", f"{sys.executable} two", str(other), "sh three", "-c")
        for rank, words in enumerate(by):
            await bench.printed(f"by {words}", rank=rank)


async def test_ports_are_kept_until_the_start(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(spec(tmp_path, None))
        bench.host.promise(UID, token(1), False, 3)
        first = (await bench.until(lambda s: len(s.ports) == 3)).ports
        assert len(set(first)) == 3
        for port in first:
            with pytest.raises(OSError), socket.create_server(("127.0.0.1", port)):
                pass
