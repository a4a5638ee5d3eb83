"""Workers in containers, by a real podman: what they see, how they end, and that nothing outlives its fence."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from nodeagent.model.jobspec import Container, JobSpec
from nodeagent.osutil.linux import is_running
from tests.integration.podman_support import containers_of, make_image, podman_path, why_not
from tests.integration.shim_support import UID, Bench, children, make_spec, open_bench, pid_of, wait_for
from tests.processes import command_line

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
LOOP = "while :; do echo on; sleep 0.1; done"
BOUND = 60.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return podman_path(tmp_path / "bin")


def contained(command: tuple[str, ...], folder: Path, path: str, **more: Any) -> JobSpec:
    """A job in a folder as image, with the machine's /usr and nothing else of it."""
    image = folder / "image"
    if not image.exists():
        make_image(image)
    binds = ("/usr:/usr:ro", "/etc/passwd:/etc/passwd:ro")
    container = Container(image=str(image), binds=binds)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    environ = {"PATH": path, "SECRET_OF_THE_SHELL": "x"}
    spec = make_spec(command, work, environ=environ, fork_server=False, **more)
    return spec.model_copy(update={"container": container})


def below(root: int) -> list[int]:
    found = [root]
    for pid in found:
        found += children(pid)
    return found[1:]


def line(pid: int) -> str:
    return " ".join(command_line(pid))


def contained_processes(bench: Bench, word: str) -> list[int]:
    shim = bench.state().shim_pid
    assert shim is not None
    return [pid for pid in below(shim) if word in line(pid) and "podman" not in line(pid)]


async def test_a_worker_sees_its_image_its_folders_and_its_own_environment(tmp_path: Path, path: str) -> None:
    script = (
        'echo "$GREETING"; echo "shell=$SECRET_OF_THE_SHELL"; test -e /root || echo no-root; pwd; touch made; '
        "cat /proc/1/cmdline | tr '\\0' ' '; echo; test -S \"$NODEAGENT_SOCKET\" && echo socket; "
        'test -d "${TORCHELASTIC_ERROR_FILE%/*}" && echo errors; exit 7'
    )
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(contained(("sh", "-c", script), tmp_path, path))
        assert status.phase == "ready", status.reason
        status = await bench.run(1, ({"GREETING": "two\nlines", "RANK": "0"},), BOUND)
        assert status.exits[0].code == 7, bench.output(stream="stderr")
        await wait_for(lambda: len(bench.output()) >= 8)
        out = bench.output()
        assert out[:2] == ["two", "lines"]
        assert out[2:5] == ["shell=", "no-root", str(tmp_path / "work")]
        assert "podman-init" in out[5]
        assert out[6:] == ["socket", "errors"]
        assert (tmp_path / "work" / "made").stat().st_uid == os.geteuid()


async def test_the_jobs_own_environment_reaches_the_inside_as_it_is(tmp_path: Path, path: str) -> None:
    env = {"HOME": "/nowhere", "ODD": "  'a' \"b\" # c\\n$X ", "EMPTY": "", "LINES2": "1\n2"}
    script = 'printf "%s\\n" "[$HOME][$ODD][${EMPTY-unset}][$LINES2]"'
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(contained(("sh", "-c", script), tmp_path, path, env=env))
        assert status.phase == "ready", status.reason
        await bench.run(1, (env,), BOUND)
        await bench.printed(f"[/nowhere][{env['ODD']}][][1", "2]")


async def test_values_of_the_environment_are_not_in_the_command_line(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(("sh", "-c", LOOP), tmp_path, path))
        status = await bench.running(1, ({"TOKEN": "hunter2"},))
        await bench.output_line("on")
        lines = [line(pid) for pid in [pid_of(status.workers[0]), *below(status.shim_pid or 0)]]
        assert any("--env=TOKEN " in text for text in lines)
        assert not [text for text in lines if "hunter2" in text]
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited", BOUND)


async def test_a_signal_reaches_a_command_that_does_not_handle_it(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(("sleep", "600"), tmp_path, path))
        await bench.running()
        await wait_for(lambda: contained_processes(bench, "sleep"), BOUND)
        bench.host.stop(UID, 300.0)
        status = await bench.until(lambda s: s.phase == "exited", BOUND)
        assert (status.exits[0].signal, status.exits[0].stopped) == (signal.SIGTERM, True)


async def test_a_killed_command_is_reported_by_its_signal(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(("sleep", "600"), tmp_path, path))
        await bench.running()
        seen = list[int]()

        def runs() -> bool:  # not the runtime on its way there, which has the command among its own words
            seen[:] = [pid for pid in contained_processes(bench, "sleep") if line(pid) == "sleep 600"]
            return bool(seen)

        await wait_for(runs, BOUND)
        os.kill(seen[-1], signal.SIGKILL)
        status = await bench.until(lambda s: s.phase == "exited", BOUND)
        assert (status.exits[0].code, status.exits[0].signal) == (None, signal.SIGKILL)


@pytest.mark.parametrize("how", ["granted time", "kill", "the runtime is killed", "the shim is killed"])
async def test_nothing_of_a_container_outlives_its_end(tmp_path: Path, path: str, how: str) -> None:
    """Two processes that ignore SIGTERM, one of them in a session of its own with no environment."""
    script = f"trap '' TERM; env -i setsid sh -c 'trap \"\" TERM; sleep 601' & {LOOP}"
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(("sh", "-c", script), tmp_path, path))
        status = await bench.running()
        await bench.output_line("on")
        await wait_for(lambda: contained_processes(bench, "sleep 601"), BOUND)
        shim = status.shim_pid
        assert shim is not None
        inside = below(shim)
        assert len([pid for pid in inside if "conmon" in line(pid)]) == 1
        if how == "granted time":
            bench.grant(0.0)
        elif how == "kill":
            bench.host.stop(UID, None)
        elif how == "the runtime is killed":
            os.kill(pid_of(status.workers[0]), signal.SIGKILL)
        else:
            os.kill(shim, signal.SIGKILL)
        await bench.until(lambda s: s.phase == ("gone" if how == "the shim is killed" else "exited"), BOUND)
        assert [
            line(pid) for pid in inside if is_running(pid) and ("sleep" in line(pid) or "conmon" in line(pid))
        ] == []
        if how != "the shim is killed":
            bench.grant()
            await bench.run_another(2)  # the same names again


async def test_a_node_without_the_image_says_so(tmp_path: Path, path: str) -> None:
    spec = contained(("true",), tmp_path, path)
    absent = Container(image="localhost/nodeagent-has-no-such-image:1")
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(spec.model_copy(update={"container": absent}))
        assert status.phase == "unfit"
        assert status.reason.startswith(
            "container: podman has no image localhost/nodeagent-has-no-such-image:1 for user"
        )
        assert "podman pull" in status.reason


async def test_a_command_that_the_image_lacks(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained((sys.executable + "-not-there",), tmp_path, path))
        status = await bench.run(1, bound=BOUND)
        assert status.exits[0].code == 1, "catatonit's own"
        await wait_for(lambda: "no such file" in " ".join(bench.output(stream="stderr")).lower())


async def test_what_a_killed_container_left_in_podmans_store_is_removed_by_the_next_pod(
    tmp_path: Path, path: str
) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(("sleep", "600"), tmp_path, path))
        await bench.running(1, ({}, {}))
        await wait_for(lambda: len(contained_processes(bench, "sleep")) >= 2, BOUND)
        mine = containers_of(path, str(tmp_path))
        assert len(mine) == 2
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited", BOUND)
    assert containers_of(path, str(tmp_path)) == mine, "killed with all that would have removed them"
    async with open_bench(tmp_path / "another") as bench:
        await bench.ready(contained(("true",), tmp_path, path))
        await wait_for(lambda: containers_of(path, str(tmp_path)) == [], BOUND)


async def test_the_runtime_is_left_alone_when_its_command_is_to_save(tmp_path: Path, path: str) -> None:
    """podman without root ends at a SIGTERM, with 0: here every podman does, and the command still has its grace."""
    program = tmp_path / "rootless" / "podman"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntrap 'exit 0' TERM\nPATH={path} podman \"$@\" & wait $!\n", encoding="utf-8")
    program.chmod(0o755)
    script = f"trap 'sleep 1; echo saved; exit 3' TERM; {LOOP}"
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(("sh", "-c", script), tmp_path, f"{program.parent}:{path}"))
        await bench.running()
        await bench.output_line("on")
        bench.host.stop(UID, 60.0)
        status = await bench.until(lambda s: s.phase == "exited", BOUND)
        await bench.output_line("saved")
        assert (status.exits[0].code, status.exits[0].stopped) == (3, True)
