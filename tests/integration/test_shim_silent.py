"""A shim that hangs under a living agent: found by its silence, killed, and said so."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from nodeagent.ctl.jobtext import SILENT_SHIM
from nodeagent.osutil.linux import is_running
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, shim_with, token, wait_for

PYTHON = sys.executable
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


async def test_a_shim_that_stops_answering_is_killed_with_all_it_has(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLEEPER)
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        status = await bench.running(1, ({}, {}))
        assert first.shim_pid is not None
        os.kill(first.shim_pid, signal.SIGSTOP)
        bench.host.ping()
        gone = await bench.until(lambda s: s.phase == "gone")
        assert gone.reason == "the shim stopped answering for 2 s and was killed"
        assert gone.reason.startswith(SILENT_SHIM), "describe knows it by that"
        assert not any(is_running(pid_of(w)) for w in status.workers)


async def test_a_shim_that_answers_lives_on(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLEEPER)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        await bench.running()
        bench.host.ping()
        await wait_for(lambda: not awaited(bench))
        assert bench.state().phase == "running"


def awaited(bench: Bench) -> bool:
    """An answer to a ping is waited for."""
    return any(pod._link._unanswered is not None for pod in bench.host._pods.values())


async def test_a_log_folder_that_hangs_delays_logs_only(tmp_path: Path) -> None:
    """A pipe in a log's place blocks open(2), and then write(2), as a dead file server does."""
    (tmp_path / "t.py").write_text("print('x' * 1000, flush=True)\n" * 20 + "open('printed', 'w').close()\n" + SLEEPER)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        (bench.logs / "g1").mkdir()
        os.mkfifo(bench.logs / "g1" / "rank0.log")
        await bench.running()
        await wait_for((tmp_path / "printed").exists)
        bench.host.ping()
        await wait_for(lambda: not awaited(bench))
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_slow_disk_delays_a_promise_and_ends_no_shim(tmp_path: Path) -> None:
    """Longer than an agent waits for an answer of its shim."""
    change = "import os\nreal = os.fsync\ndef slow(fd):\n    time.sleep(2.5)\n    real(fd)\nos.fsync = slow"
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        before = await bench.ready(make_spec(("sleep", "600"), tmp_path))
        bench.host.promise(UID, token(1), True)
        bench.host.promise(UID, token(1), True)  # agents ask again
        bench.host.ping()
        status = await bench.until(lambda s: s.rendezvous)
        assert (status.highest, status.shim_pid) == (token(1), before.shim_pid)
        bench.host.start(UID, bench.order(2))  # never promised: it is, and then it starts
        bench.host.ping()
        status = await bench.until(lambda s: s.phase == "running")
        assert (status.highest, status.shim_pid) == (token(2), before.shim_pid)


async def test_a_slow_look_up_of_the_nodes_name_delays_the_checks_alone(tmp_path: Path) -> None:
    change = (
        "import socket\n"
        "real = socket.getaddrinfo\n"
        "def slow(host, *given, **named):\n"
        "    if host == 'localhost':\n"
        "        time.sleep(4)\n"
        "    return real(host, *given, **named)\n"
        "socket.getaddrinfo = slow"
    )
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        bench.host = bench.new_host(address="localhost")
        before = await bench.ready(make_spec(("sleep", "600"), tmp_path))
        assert before.phase == "ready"
        bench.host.promise(UID, token(1), True, 3)
        bench.host.ping()
        status = await bench.until(lambda s: s.rendezvous)
        assert status.rendezvous is not None
        assert (status.rendezvous.address.partition(":")[0], len(status.ports)) == ("localhost", 3)
        assert status.shim_pid == before.shim_pid
