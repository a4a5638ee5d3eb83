"""Workers forked ahead: they wait, are used, replaced, and never outlive what they belong to."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

from nodeagent.osutil.linux import is_running
from nodeagent.pods.base import PodStatus
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, wait_for

PYTHON = sys.executable
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


async def preforked(bench: Bench, count: int = 2) -> PodStatus:
    return await bench.until(lambda s: len(s.preforked) == count)


async def started(bench: Bench, folder: Path, text: str = SLEEP, preload: tuple[str, ...] = ()) -> PodStatus:
    """Generation 1 runs with two workers; the next two are pre-forked."""
    (folder / "t.py").write_text(text)
    await bench.ready(make_spec((PYTHON, "t.py"), folder, preload=preload))
    await bench.running(1, ({}, {}))
    return await preforked(bench)


async def stopped(bench: Bench) -> None:
    bench.host.stop(UID, None)
    await bench.until(lambda s: s.phase == "exited")


async def test_the_next_start_takes_them_and_they_are_replaced(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        before = (await started(bench, tmp_path)).preforked
        assert all(private > 0 for private in before.values()), "each tells what memory it costs"
        await stopped(bench)
        status = await bench.running(2, ({}, {}))
        assert [pid_of(w) for w in status.workers] == list(before)
        assert not set(before) & set(status.preforked)
        after = (await preforked(bench)).preforked
        assert not set(before) & set(after)


async def test_they_are_forked_where_the_working_folder_was_replaced(tmp_path: Path) -> None:
    """As who installs another version of the code does. Each died at once, since it could not say where it was."""
    (folder := tmp_path / "work").mkdir()
    async with open_bench(tmp_path) as bench:
        await started(bench, folder)
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "t.py").write_text(SLEEP)
        await stopped(bench)
        await bench.running(2, ({}, {}))
        status = await preforked(bench)
        assert status.reason == ""
        await stopped(bench)
        after = await bench.running(3, ({}, {}))
        assert [pid_of(w) for w in after.workers] == list(status.preforked)
        await bench.output_line("up", 3, 1)


class Reported(asyncio.Event):
    """Keeps what each status of a pod that is ready said, however soon the next one followed."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench
        self.ready: list[tuple[bool, int]] = []
        """Whether it warmed up, and how many were pre-forked."""

    def set(self) -> None:
        status = self._bench.host.status().get(UID)
        if status is not None and status.phase == "ready":
            self.ready.append((status.warming, len(status.preforked)))
        super().set()


async def test_it_tells_that_it_warms_up_until_the_first_ones_wait(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLEEP)
    async with open_bench(tmp_path) as bench:
        reported = bench.host.changed = Reported(bench)
        bench.grant()
        bench.host.prepare(UID, make_spec((PYTHON, "t.py"), tmp_path, workers=1))
        status = await bench.until(lambda s: s.preforked)
        assert not status.warming
        assert set(reported.ready) == {(True, 0), (False, 1)}
        reported.ready.clear()
        for pid in status.preforked:
            os.kill(pid, signal.SIGKILL)
        await bench.until(lambda s: s.preforked and not set(s.preforked) & set(status.preforked))
        assert (True, 0) in reported.ready
        status = await bench.running(1, ({}, {}))
        assert not status.warming, "who trains is not waited for"


async def test_more_workers_than_preforked_ones(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        before = (await started(bench, tmp_path)).preforked
        await stopped(bench)
        status = await bench.running(2, ({}, {}, {}))
        assert [pid_of(w) for w in status.workers][:2] == list(before)
        await bench.output_line("up", 2, 2)
        await preforked(bench, 3)


async def test_one_that_died_is_not_used(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        status = await started(bench, tmp_path)
        dead, *_ = status.preforked
        os.kill(dead, signal.SIGKILL)
        status = await bench.until(lambda s: len(s.preforked) == 2 and dead not in s.preforked)
        assert "a pre-forked worker died" in status.reason
        await wait_for(lambda: not Path(f"/proc/{dead}").exists())  # reaped
        await stopped(bench)
        status = await bench.running(2, ({}, {}))
        assert dead not in {pid_of(w) for w in status.workers}


async def test_too_many_deaths_end_the_parking_until_the_next_start(tmp_path: Path) -> None:
    """A module that cannot live in a fork must not keep the node busy for ever."""
    (tmp_path / "deadly.py").write_text(
        "import os\nfrom pathlib import Path\nflag = Path(__file__).with_name('deadly')\n"
        "os.register_at_fork(after_in_child=lambda: flag.exists() and os._exit(1))\n"
    )
    async with open_bench(tmp_path) as bench:
        status = await started(bench, tmp_path, preload=("deadly",))
        (tmp_path / "deadly").touch()
        await stopped(bench)
        for pid in status.preforked:
            os.kill(pid, signal.SIGKILL)
        message = "no workers are pre-forked until the next start"  # forks may have died before those that we killed
        await bench.until(lambda s: message in s.reason and not s.preforked)
        (tmp_path / "deadly").unlink()
        await bench.running(2, ({}, {}))
        await preforked(bench)


async def test_a_thread_in_the_fork_is_reported_and_the_worker_is_not_used(tmp_path: Path) -> None:
    """What cannot be forked again must not wait; starts on demand go on."""
    (tmp_path / "busy.py").write_text(
        "import os, threading, time\n"
        "def start(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "os.register_at_fork(after_in_child=start)\n"
    )
    (tmp_path / "t.py").write_text(SLEEP)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, preload=("busy",)))
        await bench.running(1, ({},))
        status = await bench.until(lambda s: "no workers are pre-forked" in s.reason)
        assert "pre-forked workers wait without warming up: the preloaded modules started 1 thread(s)" in status.reason
        assert not status.warming, "none will come"
        assert not status.preforked
        await stopped(bench)
        await bench.running(2, ({},))


async def test_a_cuda_context_in_the_fork_server_means_plain_starts(tmp_path: Path) -> None:
    (tmp_path / "touches.py").write_text(
        "import sys, types\ntorch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
    )
    (tmp_path / "t.py").write_text("import sys\nprint('touches' in sys.modules)\n")
    async with open_bench(tmp_path) as bench:
        bench.grant()
        bench.host.prepare(UID, make_spec((PYTHON, "t.py"), tmp_path, preload=("touches",)))
        status = await bench.until(lambda s: s.phase == "ready")
        assert "made a CUDA context, so forking is unsafe; workers start without a fork server" in status.reason
        await bench.run()
        await bench.printed("False")
        assert not bench.state().preforked


async def test_a_framework_that_fails_to_warm_up_is_reported_and_preforked_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import sys, types\ntorch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)\n"
        "torch.default_generator = types.SimpleNamespace(seed=lambda: None)\n"
        "torch.get_num_threads = lambda: 1\ntorch.set_num_threads = lambda count: None\n"
    )
    async with open_bench(tmp_path) as bench:
        status = await started(bench, tmp_path, preload=("broken",))
        assert "warming up a pre-forked worker failed: AttributeError" in status.reason
        await stopped(bench)
        again = await bench.running(2, ({}, {}))
        assert {pid_of(w) for w in again.workers} == set(status.preforked)


async def test_a_framework_whose_first_step_starts_a_thread_does_not_spoil_the_fork_server(tmp_path: Path) -> None:
    """That is tried in a fork first."""
    (tmp_path / "threads.py").write_text(
        "import sys, threading, time, types\n"
        "class Torch(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "        raise AttributeError(name)\n"
        "torch = sys.modules['torch'] = Torch('torch')\n"
        "torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)\n"
        "torch.default_generator = types.SimpleNamespace(seed=lambda: None)\n"
        "torch.get_num_threads = lambda: 1\ntorch.set_num_threads = lambda count: None\n"
    )
    (tmp_path / "t.py").write_text(SLEEP)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, preload=("threads",)))
        await bench.running(1, ({},))
        status = await preforked(bench, 1)
        assert "pre-forked workers wait without warming up" in status.reason


async def test_they_die_with_the_fork_server(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        status = await started(bench, tmp_path)
        assert status.fork_server_pid is not None
        os.kill(status.fork_server_pid, signal.SIGKILL)
        await wait_for(lambda: not any(map(is_running, status.preforked)))
        old = status.fork_server_pid
        again = await bench.until(lambda s: s.fork_server_pid != old and len(s.preforked) == 2)
        assert not set(again.preforked) & set(status.preforked)


async def test_they_die_with_the_shim(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        status = await started(bench, tmp_path)
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGKILL)
        gone = await bench.until(lambda s: s.phase == "gone")
        assert not gone.preforked
        await wait_for(lambda: not any(map(is_running, status.preforked)))  # killed, if not yet quite gone


async def test_the_fence_ends_one_that_was_given_work_and_spares_those_that_wait(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await started(bench, tmp_path)
        await stopped(bench)
        status = await bench.running(2, ({},))
        waiting = (await preforked(bench, 1)).preforked
        bench.grant(0.2)
        status = await bench.until(lambda s: s.phase == "exited")
        assert status.fenced
        assert [(e.signal, e.stopped) for e in status.exits] == [(9, True)]
        assert all(map(is_running, waiting))


async def test_without_a_fork_server_nothing_is_preforked(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLEEP)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, fork_server=False))
        status = await bench.running(1, ({}, {}))
        assert (status.fork_server_pid, status.preforked) == (None, {})


ONCE = (
    "import sys, time\nprint('{0}', len(sys.modules['__nodeagent_fork_server__']._compiled), flush=True)\n"
    "time.sleep(600)\n"
)


async def test_the_script_is_compiled_ahead_and_compiled_anew_if_it_has_changed(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await started(bench, tmp_path, ONCE.format("first"))
        await stopped(bench)
        await bench.running(2, ({}, {}))
        await bench.output_line("first 1", 2, 0)
        await preforked(bench)
        (tmp_path / "t.py").write_text(ONCE.format("second"))
        await stopped(bench)
        await bench.running(3, ({}, {}))
        await bench.output_line("second 1", 3, 0)


async def test_what_the_compiler_has_to_say_the_worker_says(tmp_path: Path) -> None:
    text = "import sys, time\nprint(len(sys.modules['__nodeagent_fork_server__']._compiled), 1 is 1, flush=True)\n"
    async with open_bench(tmp_path) as bench:
        await started(bench, tmp_path, text + "time.sleep(600)\n")
        await stopped(bench)
        await bench.running(2, ({}, {}))
        await bench.output_line("0 True", 2, 0)
        await wait_for(lambda: any('SyntaxWarning: "is" with' in line for line in bench.output(2, 0, "stderr")))
