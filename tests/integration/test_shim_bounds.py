"""What a shim does when things take for ever: its loop is blocked, a process cannot be killed, no agent comes.

The shim under test is the real one, run by a small program that first changes the one thing that cannot be had
otherwise (a constant, a signal without effect).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.osutil.linux import is_running
from nodeagent.pods.pod import NO_ROOT, NOT_ENDED
from nodeagent.shim.checks import MARKER, folder_id
from tests.integration.shim_support import UID, make_spec, open_bench, pid_of, run_folders, shim_with, token, wait_for


async def test_the_fence_holds_while_the_loop_is_blocked(tmp_path: Path) -> None:
    python = shim_with(tmp_path, "output.Capture._take = lambda *_: time.sleep(600)")
    async with open_bench(tmp_path, python) as bench:
        script = "until [ -e go ]; do sleep 0.05; done; echo blocked; sleep 600"
        async with bench.renewing(3.0):
            first = await bench.ready(make_spec(("sh", "-c", script), tmp_path))
            status = await bench.running()
            (tmp_path / "go").touch()
            await asyncio.sleep(3.5)
            assert is_running(pid_of(status.workers[0])), "the fence reads on"
        await wait_for(lambda: not is_running(pid_of(status.workers[0])))
        assert first.shim_pid is not None
        os.kill(first.shim_pid, signal.SIGKILL)
        await bench.until(lambda s: s.phase == "gone")


async def test_what_a_shim_cannot_kill_its_host_ends(tmp_path: Path) -> None:
    change = "gang.STUCK_AFTER = 0.2\nfence.ProcessGuard.signal = lambda *_, **__: None"
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path))
        pid = pid_of((await bench.running()).workers[0])
        bench.host.stop(UID, None)
        ended = await bench.until(lambda s: s.phase in ("stuck", "gone"))
        if os.geteuid() == 0:
            assert (ended.phase, ended.reason) == ("gone", NOT_ENDED)
            await wait_for(lambda: not is_running(pid))
        else:
            assert ended.reason == f"processes {pid} do not end, even with SIGKILL; {NO_ROOT}"
            os.kill(pid, signal.SIGKILL)
            assert (await bench.until(lambda s: s.phase == "exited")).exits[0].stopped


async def test_a_promise_need_not_wait_for_what_has_been_sent_sigkill(tmp_path: Path) -> None:
    """Here SIGKILL never comes, so that the time between is long."""
    async with open_bench(tmp_path, shim_with(tmp_path, "fence.ProcessGuard.signal = lambda *_, **__: None")) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path))
        pid = pid_of((await bench.running()).workers[0])
        bench.host.promise(UID, token(2), True)
        bench.host.stop(UID, 60.0)
        bench.host.promise(UID, token(2), True)
        status = await bench.until(lambda s: s.phase == "stopping")
        assert (status.highest, status.rendezvous) == (token(1), None), "it lives, or has its grace"
        bench.host.stop(UID, None)
        bench.host.promise(UID, token(2), True)
        status = await bench.until(lambda s: s.rendezvous)
        assert (status.phase, status.highest) == ("stopping", token(2))
        bench.host.start(UID, bench.order(2))  # refused: something older lives
        bench.host.ping()
        os.kill(pid, signal.SIGKILL)
        status = await bench.until(lambda s: s.phase == "exited")
        assert (status.generation, status.highest) == (token(1), token(2))
        assert status.rendezvous is not None
        assert status.rendezvous.token == token(2)


def test_a_shim_does_nothing_before_its_agent_speaks(tmp_path: Path) -> None:
    """What it started before it is in its cgroup would be outside."""
    for words, ended in ((b"", 0), (b"{", 1)):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "nodeagent.shim", str(tmp_path / "none"), str(theirs.fileno())]
        with theirs, subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()]) as shim:
            theirs.close()
            with ours:
                with pytest.raises(subprocess.TimeoutExpired):
                    shim.wait(1.0)
                ours.send(words)
            _, errors = shim.communicate(timeout=30.0)
        assert (shim.returncode, b"pod.json" in errors) == (ended, bool(ended))


async def test_an_idle_shim_without_an_agent_ends(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, "main.IDLE_EXIT = 0.3")) as bench:
        shim = (await bench.ready(make_spec(("sleep", "600"), tmp_path))).shim_pid
        await bench.running()
        await bench.host.close()
        bench.host = bench.new_host()
        await bench.host.adopt()  # it works, so it waited for us
        await bench.until(lambda s: s.phase == "running")
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")
        bench.note_marks()
        await bench.host.close()
        assert shim is not None
        await wait_for(lambda: not is_running(shim))
        assert run_folders(tmp_path) == []
        await wait_for(lambda: bench.left() == [])  # its watchdog ends once it has seen the shim's end
        bench.host = bench.new_host()
        await bench.host.adopt()
        await wait_for(lambda: not bench.host.status())


async def test_folders_that_do_not_answer_make_the_node_unfit(tmp_path: Path) -> None:
    change = "prepare.CHECK_BOUND = 0.2\nprepare.verdict = lambda *_: time.sleep(600)"
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        status = await bench.ready(make_spec(("sleep", "600"), tmp_path))
        assert "did not answer" in status.reason


async def test_the_checkpoint_folder_is_looked_at_again_also_while_workers_run(tmp_path: Path) -> None:
    for name in ("wrong", "right"):
        (tmp_path / name).mkdir()
    ckpt = tmp_path / "ckpt"
    ckpt.symlink_to("wrong")
    spec = make_spec(("sleep", "600"), tmp_path, checkpoint_dir="ckpt")
    async with open_bench(tmp_path, shim_with(tmp_path, "prepare.FOLDER_AGAIN = 0.1")) as bench:
        wrong = (await bench.ready(spec)).folder
        assert wrong == folder_id(tmp_path / "wrong")
        (tmp_path / "new").symlink_to("right")
        (tmp_path / "new").rename(ckpt)  # at once: a look in between would make a folder of it
        right = (await bench.until(lambda s: s.folder != wrong)).folder
        assert right == folder_id(tmp_path / "right")
        running = await bench.running()
        assert running.folder == right
        (tmp_path / "right" / MARKER).unlink()  # a script that empties its folder
        changed = await bench.until(lambda s: s.folder != right)
        assert changed.folder == folder_id(tmp_path / "right")
        assert (changed.phase, changed.workers) == ("running", running.workers)
        await bench.host.close()
        bench.host = bench.new_host()
        await bench.host.adopt()
        assert (await bench.until(lambda s: s.phase == "running")).folder == changed.folder


async def test_a_look_at_the_checkpoint_folder_that_fails_disturbs_nothing(tmp_path: Path) -> None:
    change = (
        "prepare.FOLDER_AGAIN = 0.1\nreal = prepare.start_function\ncalls = []\n"
        "def refuse(*a):\n    calls.append(a)\n    if len(calls) in (2, 3):\n"
        "        raise BlockingIOError(11, 'no more')\n"
        "    return real(*a)\nprepare.start_function = refuse"
    )
    ckpt = tmp_path / "ckpt"
    (tmp_path / "away").mkdir()
    ckpt.symlink_to("away")
    spec = make_spec(("sleep", "600"), tmp_path, checkpoint_dir="ckpt")
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        before = await bench.ready(spec)
        running = await bench.running()
        assert running.folder == before.folder
        log = bench.logs / "pod.log"
        await wait_for(lambda: log.exists() and "no process for a look at its folders: no more" in log.read_text())
        (tmp_path / "file").touch()  # no folder at all
        (tmp_path / "file").rename(ckpt)
        await wait_for(lambda: "cannot be created: File exists" in log.read_text())
        seen = await bench.until(lambda s: f"checkpoint_dir {ckpt} cannot be created" in s.reason)  # while workers run
        no_reason = {"reason": ""}  # the first look may have been told of, or not
        assert seen.model_copy(update=no_reason) == running.model_copy(update=no_reason)
        ckpt.unlink()
        changed = await bench.until(lambda s: s.folder != before.folder)
        assert (changed.folder, changed.workers) == (folder_id(ckpt), running.workers)
        await bench.until(lambda s: not s.reason)
        assert log.read_text().count("job's folders failed") == 2, "each trouble is told once"


async def test_that_output_is_lost_is_reported_while_it_is(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        spec = make_spec(("sh", "-c", "while sleep 0.1; do echo line; done"), tmp_path)
        await bench.ready(spec)
        bench.logs.mkdir(parents=True, exist_ok=True)
        (bench.logs / "g1").touch()  # no folder
        await bench.running()
        lost = f"output is lost: {bench.logs / 'g1' / 'rank0.log'}: Not a directory"
        await bench.until(lambda s: s.phase == "running" and s.reason == lost)
        (bench.logs / "g1").unlink()
        await bench.until(lambda s: s.phase == "running" and not s.reason)
        await wait_for(lambda: bench.output(stream="stderr"))
        first, *more = bench.output(stream="stderr")
        assert first.endswith("lines were lost: the log folder could not be written") and not more


@pytest.mark.parametrize("fork_server", [True, False], ids=["fork_server", "plain"])
async def test_a_working_folder_that_goes_away_is_named(tmp_path: Path, fork_server: bool) -> None:
    """Not the program, which is there; and no traceback of ours stands for the script's."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "wait.py").write_text("import time; time.sleep(600)")
    spec = make_spec((sys.executable, "wait.py"), tmp_path / "work", fork_server=fork_server)
    change = (
        "import os\nprepare.FOLDER_AGAIN = prepare.CHECK_AGAIN = 0.1\ndoubt = main.Shim._doubt\n"
        f"main.Shim._doubt = lambda self: os.path.exists({str(tmp_path / 'tried')!r}) and doubt(self)"
    )  # or it might refuse to start what is to fail
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        await bench.ready(spec)
        await bench.running()
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")
        (tmp_path / "work").rename(tmp_path / "gone")
        gone = f"working_dir {tmp_path / 'work'} is missing"
        await bench.until(lambda s: s.reason == gone)
        bench.host.start(UID, bench.order(2))
        status = await bench.until(lambda s: s.generation == token(2) and s.exits)
        text = f"nodeagent: cannot enter working_dir {tmp_path / 'work'}: No such file or directory"
        assert (status.exits[0].code, status.exits[0].error) == (126, text)
        (tmp_path / "tried").touch()
        status = await bench.until(lambda s: s.phase == "unfit")
        assert (status.reason, status.exits[0].code) == (gone, 126), "nothing starts here, and no budget is spent"
        (tmp_path / "gone").rename(tmp_path / "work")
        await bench.until(lambda s: s.phase == "exited" and not s.reason)
        await bench.running(3)
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_worker_that_cannot_enter_its_folder_has_it_checked_at_once(tmp_path: Path) -> None:
    """Long before the next look at the folders."""
    (tmp_path / "work").mkdir()
    spec = make_spec(("sleep", "600"), tmp_path / "work")
    async with open_bench(tmp_path, shim_with(tmp_path, "prepare.FOLDER_AGAIN = 600.0")) as bench:
        await bench.ready(spec)
        (tmp_path / "work").rename(tmp_path / "gone")
        bench.host.start(UID, bench.order(1))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert status.reason == f"working_dir {tmp_path / 'work'} is missing"
        assert [end.code for end in status.exits] == [126]


async def test_a_pod_whose_folders_go_away_while_nothing_runs_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    spec = make_spec(("sleep", "600"), tmp_path, checkpoint_dir="ckpt")
    change = "prepare.FOLDER_AGAIN = prepare.CHECK_AGAIN = 0.1"
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        before = await bench.ready(spec)
        (tmp_path / "ckpt").rename(tmp_path / "old")
        (tmp_path / "ckpt").touch()  # no folder
        status = await bench.until(lambda s: s.phase == "unfit")
        assert status.reason.startswith(f"checkpoint_dir {tmp_path / 'ckpt'} cannot be created: File exists")
        (tmp_path / "ckpt").unlink()
        (tmp_path / "old").rename(tmp_path / "ckpt")
        again = await bench.until(lambda s: s.phase == "ready")
        assert again.folder == before.folder
        await bench.running()
