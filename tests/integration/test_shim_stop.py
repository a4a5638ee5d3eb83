"""How workers end: by themselves, by order, by the fence, with their shim; and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Hooks
from nodeagent.osutil.linux import boottime, is_running, pids
from tests.integration.shim_support import UID, make_spec, open_bench, pid_of, run_folders, shim_with, token, wait_for
from tests.processes import command_line

PYTHON = sys.executable
# In these scripts a handler may run at any point: inside a print, or just before one long sleep.
SLEEP = "import os, time\nos.write(1, b'up\\n')\nwhile True: time.sleep(0.02)\n"
STUBBORN = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'no\\n'))\n" + SLEEP
POLITE = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" + SLEEP


def script(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "t.py").write_text(text)
    return (PYTHON, "t.py")


@pytest.fixture(params=[True, False], ids=["fork_server", "plain"])
def fork_server(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_exit_codes_order_and_error_text(tmp_path: Path, fork_server: bool) -> None:
    text = (
        "import os, sys, time\nrank = int(os.environ['RANK'])\n"
        "def after(other):\n"
        f"    while not os.path.exists('{tmp_path}/ended-%s' % other): time.sleep(0.01)\n"
        "if rank == 0: print('x' * 10, 'y', file=sys.stderr); sys.exit(7)\n"
        "if rank == 1: open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"told\"}')\n"
        "if rank == 1: after(0); os.kill(os.getpid(), 11)\n"
        "after(1)\n"
    )
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, text), tmp_path, fork_server=fork_server))
        await bench.running(1, tuple({"RANK": str(rank)} for rank in range(3)))
        await bench.until(lambda s: len(s.exits) == 1)
        (tmp_path / "ended-0").touch()
        await bench.until(lambda s: len(s.exits) == 2)
        (tmp_path / "ended-1").touch()
        status = await bench.until(lambda s: s.phase == "exited")
        ends = status.exits
        assert [(e.rank, e.order, e.code, e.signal, e.stopped) for e in ends] == [
            (0, 0, 7, None, False), (1, 1, None, 11, False), (2, 2, 0, None, False),
        ]  # fmt: skip
        assert [e.error for e in ends] == ["xxxxxxxxxx y", "told", ""]
        assert [(w.rank, w.state, w.exit) for w in status.workers] == [
            (0, "exited", 7), (1, "exited", 139), (2, "exited", 0),
        ]  # fmt: skip


async def test_sigterm_then_sigkill(tmp_path: Path, fork_server: bool) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, STUBBORN), tmp_path, fork_server=fork_server))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        await bench.until(lambda s: s.phase == "stopping")
        await bench.output_line("no")
        bench.host.stop(UID, 0.05)  # a shorter grace overrides a longer one
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.signal, e.stopped) for e in status.exits] == [(9, True)]


async def test_a_polite_worker_uses_its_grace(tmp_path: Path, fork_server: bool) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, POLITE), tmp_path, fork_server=fork_server))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.code, e.stopped) for e in status.exits] == [(5, True)]
        bench.host.stop(UID, None)  # nothing runs: nothing happens
        await bench.run_another(2)


async def test_a_worker_that_starts_too_late_for_a_stop_costs_the_others_no_grace(tmp_path: Path) -> None:
    late = f"""
import os
fork, calls = client.ForkServer.fork, []
def slow(self, argv, env, cwd, limits, fds, forked):
    calls.append(argv)
    def late(pid, error):
        if os.path.exists({str(tmp_path / "stopping")!r}):
            forked(pid, error)
        else:
            self._loop.after(0.05, lambda: late(pid, error))
    fork(self, argv, env, cwd, limits, fds, late if len(calls) == 2 else forked)
client.ForkServer.fork = slow
"""
    leaves = """
import os, signal, sys, time
def leave(*_):
    while not os.path.exists("leave"): time.sleep(0.01)
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
"""
    async with open_bench(tmp_path, shim_with(tmp_path, late)) as bench:
        await bench.ready(make_spec(script(tmp_path, leaves + SLEEP), tmp_path))
        bench.host.start(UID, bench.order(1, ({}, {})))
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        await bench.until(lambda s: s.phase == "stopping")
        (tmp_path / "stopping").touch()
        await bench.until(lambda s: [e.rank for e in s.exits] == [1])
        (tmp_path / "leave").touch()
        status = await bench.until(lambda s: s.phase == "exited")
        assert {e.rank: (e.code, e.signal, e.stopped) for e in status.exits} == {
            0: (5, None, True),
            1: (None, 9, True),
        }


async def test_a_worker_that_died_before_the_stop_was_not_stopped(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, SLEEP), tmp_path))
        status = await bench.running(1, ({}, {}))
        os.kill(pid_of(status.workers[1]), signal.SIGKILL)
        await wait_for(lambda: not is_running(pid_of(status.workers[1])))
        bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.rank, e.stopped) for e in status.exits] == [(1, False), (0, True)]


async def test_the_fence_when_the_agent_is_silent(tmp_path: Path, fork_server: bool) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, STUBBORN), tmp_path, fork_server=fork_server))
        await bench.running(1, ({}, {}))
        bench.grant(0.2)  # it is shortened
        deadline = boottime() + 0.2
        status = await bench.until(lambda s: s.phase == "exited")
        assert boottime() >= deadline - 0.1
        assert status.fenced
        assert [(e.signal, e.stopped) for e in status.exits] == [(9, True), (9, True)]
        bench.grant()
        await bench.run_another(2)


async def test_the_fence_when_the_agent_is_gone(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, SLEEP), tmp_path))
        status = await bench.running()
        bench.grant(0.3)
        await bench.host.close()
        await wait_for(lambda: not is_running(pid_of(status.workers[0])))
        bench.host = bench.new_host()
        await bench.host.adopt()
        after = await bench.until(lambda s: s.phase == "exited")
        assert after.fenced
        assert after.shim_pid == status.shim_pid


async def test_a_stopped_shim_still_dies_with_everything(tmp_path: Path, fork_server: bool) -> None:
    text = "import subprocess, os\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n" + SLEEP
    async with open_bench(tmp_path) as bench:
        spec = make_spec(script(tmp_path, text), tmp_path, fork_server=fork_server)
        first = await bench.ready(spec)
        await bench.running(1, ({}, {}))
        await bench.output_line("up", rank=1)
        assert first.shim_pid is not None
        os.kill(first.shim_pid, signal.SIGKILL)
        status = await bench.until(lambda s: s.phase == "gone")
        assert status.reason in ("its shim was killed by SIGKILL (9), not by nodeagent", "the shim died"), (
            "as a service"
        )
        assert bench.left() == []
        bench.host.start(UID, bench.order(1))
        bench.host.prepare(UID, spec)
        again = await bench.until(lambda s: s.phase == "ready")
        assert again.shim_pid != first.shim_pid
        assert again.highest == token(1)
        bench.host.start(UID, bench.order(1))  # it was started before, by the dead shim
        await bench.run_another(2)


@pytest.mark.parametrize("end", ["exit", "kill", "stop"])
async def test_what_workers_leave_behind_is_swept(tmp_path: Path, fork_server: bool, end: str) -> None:
    lonely = f"600.{os.getpid()}{time.monotonic_ns() % 10**6}"  # carries no mark: told by its argument
    text = (
        "import os, subprocess, sys\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "subprocess.Popen(['sh', '-c', 'trap : TERM HUP; setsid sleep 600 & wait'])\n"
        f"subprocess.Popen(['env', '-i', 'setsid', 'sleep', '{lonely}'])\n"
    )
    text += "sys.exit(3)\n" if end == "exit" else SLEEP
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, text), tmp_path, fork_server=fork_server))
        bench.host.start(UID, bench.order(1))
        if end != "exit":
            status = await bench.until(lambda s: s.phase == "running")
            await bench.output_line("up")
            if end == "kill":
                os.kill(pid_of(status.workers[0]), signal.SIGKILL)
            else:
                bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert set(bench.left()) <= bench.own() | bench.preforked()
        assert not [pid for pid in pids() if command_line(pid) == ["sleep", lonely]]


HELPED = """
import os, signal, subprocess, sys, time
def save(*_):
    time.sleep(0.3)
    told.append(helper.poll())
    if len(sys.argv) == 1:
        os.write(1, b"saved with its helper\\n" if told[0] is None else b"its helper was gone\\n")
        os._exit(5)
told = []
signal.signal(signal.SIGTERM, save)
helper = subprocess.Popen(["sleep", "600"])
os.write(1, b"up\\n")
while True:
    time.sleep(0.02)
    if helper.poll() is not None:
        os.write(1, f"its helper ended by {helper.returncode}\\n".encode())
        os._exit(6)
"""


async def test_a_worker_that_saves_keeps_its_helpers(tmp_path: Path, fork_server: bool) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, HELPED), tmp_path, fork_server=fork_server))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.code, e.stopped) for e in status.exits] == [(5, True)]
        await bench.output_line("saved with its helper")


async def test_helpers_have_the_signal_before_the_end_of_the_grace(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, "grace.LATE = 0.2")) as bench:
        await bench.ready(make_spec((*script(tmp_path, HELPED), "go on"), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 20)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.code, e.stopped) for e in status.exits] == [(6, True)]
        await bench.output_line(f"its helper ended by {-signal.SIGTERM}")


async def test_a_shell_with_a_training_child_is_one_worker(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(STUBBORN)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(("sh", "-c", f"{PYTHON} t.py; echo over"), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 0.2)
        await bench.until(lambda s: s.phase == "exited")
        assert set(bench.left()) <= bench.own() | bench.preforked()


async def test_a_stop_lets_go_of_the_rendezvous_of_a_gang_that_has_ended_by_itself(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, "import sys; sys.exit(3)"), tmp_path))
        bench.host.promise(UID, token(1), True)
        await bench.until(lambda s: s.rendezvous)
        bench.host.start(UID, bench.order(1))
        ended = await bench.until(lambda s: s.phase == "exited" and s.exits)
        assert ended.rendezvous is not None, "others may still use it"
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.rendezvous is None)


async def test_refused_starts(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, SLEEP), tmp_path))
        bench.host.start(UID, bench.order(3, late=-1))
        status = await bench.until(lambda s: s.generation == token(3) and s.refused)
        assert (status.phase, status.workers, status.exits) == ("exited", (), ())
        assert "too late" in status.refused
        assert status.fenced, "no fault of the job's"
        bench.host.start(UID, bench.order(3))  # twice
        bench.host.start(UID, bench.order(2))  # lower
        bench.host.promise(UID, token(5), False)
        bench.host.ping()
        await bench.until(lambda s: (s.highest, s.generation) == (token(5), token(3)))
        bench.host.start(UID, bench.order(4))  # lower than promised
        other = bench.order(5).model_copy(update={"token": token(5).model_copy(update={"id": "other"})})
        bench.host.start(UID, other)
        bench.host.promise(UID, token(4), False)
        status = await bench.running(5)
        pid = status.workers[0].pid
        bench.host.start(UID, bench.order(5))
        bench.host.start(UID, bench.order(6))  # something older lives
        bench.host.promise(UID, token(7), False)
        bench.host.ping()
        bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert (status.generation, status.highest, status.exits[0].pid) == (token(5), token(5), pid)
        bench.grant(-1)
        bench.host.start(UID, bench.order(6))
        status = await bench.until(lambda s: s.generation == token(6) and s.refused)
        assert "nobody has granted this pod time" in status.refused
        assert status.fenced


async def test_hooks(tmp_path: Path) -> None:
    note = "echo $WHO $RANK >>hooks.txt"
    hooks = Hooks(pre_start=("sh", "-c", note + "; echo said"), post_stop=("sh", "-c", note + "; exit 4"))
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, "print('ran')"), tmp_path, hooks=hooks))
        status = await bench.run(1, ({"WHO": "w", "RANK": "0"}, {"WHO": "w", "RANK": "1"}))
        assert [e.code for e in status.exits] == [0, 0]
        assert (tmp_path / "hooks.txt").read_text() == "w 0\nw 0\n"
        await bench.logged("stdout F said")
        await bench.logged("hook post_stop failed with exit code 4")


@pytest.mark.parametrize(
    ("hook", "timeout", "message"),
    [
        (("sh", "-c", "echo broken >&2; exit 3"), 30, "hook pre_start failed with exit code 3: broken"),
        (("sleep", "600"), 0.3, "hook pre_start was not done after 0.3 s"),
        (("no-such-tool",), 30, "hook pre_start failed with exit code 127: nodeagent: cannot run no-such-tool"),
    ],
)
async def test_a_failing_pre_start_refuses(tmp_path: Path, hook: tuple[str, ...], timeout: float, message: str) -> None:
    hooks = Hooks(pre_start=hook, timeout=timeout)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, "print('ran')"), tmp_path, hooks=hooks))
        status = await bench.run()
        assert message in status.refused
        assert status.exits == ()
        assert bench.output() == []


async def test_stop_and_fence_during_pre_start(tmp_path: Path) -> None:
    hooks = Hooks(pre_start=("sleep", "600"))
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, SLEEP), tmp_path, hooks=hooks))
        bench.host.start(UID, bench.order(1))
        await bench.until(lambda s: s.phase == "starting" and s.highest == token(1))  # it is carried out
        bench.host.stop(UID, 600)
        status = await bench.until(lambda s: s.phase == "exited")
        assert "was stopped" in status.refused
        bench.host.start(UID, bench.order(2))
        await bench.until(lambda s: s.phase == "starting" and s.highest == token(2))
        bench.grant(-1)
        status = await bench.until(lambda s: s.phase == "exited" and s.generation == token(2))
        assert "nobody granted" in status.refused


async def test_retire_kills_and_removes(tmp_path: Path, fork_server: bool) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, STUBBORN), tmp_path, fork_server=fork_server))
        await bench.running(1, ({}, {}))
        await bench.output_line("up")
        bench.host.retire(UID)
        bench.host.retire(UID)
        await wait_for(lambda: UID not in bench.host.status())
        assert bench.left() == []
        assert run_folders(tmp_path) == []
        assert (bench.logs / "g1" / "rank0.log").exists()
