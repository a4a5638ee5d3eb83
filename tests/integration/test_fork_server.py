"""A worker forked from the fork server, ahead or on demand, behaves as one started plainly."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.osutil.linux import is_running
from nodeagent.plan.pods.report import without_output
from nodeagent.shim.forkserver.server import NOT_OURS
from tests.groups import one_in
from tests.integration.shim_support import LAST_WORD, UID, Bench, make_spec, open_bench, pid_of, wait_for

PYTHON = sys.executable

REPORT = """
import json, os, resource, signal, sys, threading, atexit
import helper
def gone():
    print("atexit runs")
atexit.register(gone)
t = threading.Thread(target=lambda: print("thread ends"))
mod = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "helper": helper.__file__,
    "orig": sys.orig_argv,
    "main": sorted(k for k in vars(mod) if k not in ("t", "mod", "gone")), "is_main": mod.__dict__ is globals(),
    "spec": getattr(__spec__, "name", None), "package": __package__,
    "loader": type(__loader__).__name__, "doc": __doc__,
    "cwd": os.getcwd(), "executable": sys.executable, "prefix": sys.prefix, "flags_path": sys.flags.safe_path,
    "session": os.getsid(0) == os.getpid() == os.getpgid(0), "umask": os.umask(0o22),
    "signals": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "stdin": os.readlink("/proc/self/fd/0"),
    "fds": sorted(int(f) for f in os.listdir("/proc/self/fd"))[:-1],
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "encoding": [sys.stdout.encoding, sys.stderr.encoding, sys.stderr.line_buffering, sys.stdout.line_buffering],
    "write_through": [sys.stdout.write_through, sys.stderr.write_through], "hook": sys.excepthook is sys.__excepthook__,
    "threads": threading.active_count(), "uid": [os.getuid(), os.getgid(), os.getgroups()],
    "status": [l for l in open("/proc/self/status") if l.startswith(("Threads", "SigB", "SigI", "SigC"))],
}, sort_keys=True))
t.start()
end = sys.argv[1:] and sys.argv[1]
def inner():
    raise ValueError("boom")
if end == "code": sys.exit(7)
if end == "text": sys.exit("cannot go on")
if end == "raise": inner()
if end == "interrupt": raise KeyboardInterrupt
if end == "signal": os.kill(os.getpid(), signal.SIGTERM)
if end == "osexit": os._exit(3)
if end == "none": sys.exit(None)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts: one that reports all it can see, one with a mistake."""
    path = tmp_path_factory.mktemp("scripts")
    (path / "report.py").write_text(REPORT)
    (path / "helper.py").write_text("")
    (path / "sub").mkdir()
    (path / "sub" / "linked.py").symlink_to("../report.py")
    (path / "pack").mkdir()
    (path / "pack" / "__main__.py").write_text(REPORT)
    (path / "pack" / "__init__.py").write_text("")
    (path / "wrong.py").write_text("x = (\n")
    (path / "printenv.py").write_text("import os, json; print(json.dumps(dict(os.environ), sort_keys=True))")
    return path


async def outcome(bench: Bench, number: int) -> tuple[Any, ...]:
    status = await bench.run(number)
    (end,) = status.exits
    assert status.refused == ""
    await bench.over(number)
    return (end.code, end.signal, bench.output(number), normal(bench.output(number, stream="stderr")))


def normal(lines: list[str]) -> list[str]:
    """Without what may differ: none so far but for addresses."""
    return [re.sub(r"0x[0-9a-f]+", "0x", line) for line in lines]


CASES = [
    ["report.py", "a", "b c"],
    ["./report.py"],
    ["sub/linked.py"],
    ["-u", "report.py", "code"],
    ["report.py", "text"],
    ["report.py", "raise"],
    ["report.py", "interrupt"],
    ["report.py", "signal"],
    ["report.py", "osexit"],
    ["report.py", "none"],
    ["-m", "report", "raise"],
    ["-m", "pack", "x", "code"],
    ["-m", "nothing_of_that_name"],
    ["missing.py"],
    ["wrong.py"],
]


@pytest.mark.parametrize("arguments", one_in(2, CASES), ids=" ".join)
async def test_forked_and_preforked_equal_plain(tmp_path: Path, folder: Path, arguments: list[str]) -> None:
    """Generation 1 is forked on demand (the number of GPUs is not known before), generation 2 ahead."""
    outcomes = []
    for fork_server in (True, False):
        async with open_bench(tmp_path / str(fork_server)) as bench:
            spec = make_spec(
                (PYTHON, *arguments), folder, fork_server=fork_server, limits={"nofile": 512}, hooks=LAST_WORD
            )
            status = await bench.ready(spec)
            assert (status.fork_server_pid is not None) == fork_server
            outcomes.append(await outcome(bench, 1))
            if fork_server:
                (ahead,) = (await bench.until(lambda s: s.preforked)).preforked
                outcomes.append(await outcome(bench, 2))
                assert [end.pid for end in bench.state().exits] == [ahead]
    assert outcomes[0] == outcomes[2]
    assert outcomes[1] == outcomes[2]
    for _, _, out, _ in outcomes:
        reports = [json.loads(line) for line in out if line.startswith("{")]
        assert [report["fds"] for report in reports] == [[0, 1, 2]] * len(reports)


AGAIN = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    seen = open("/proc/self/cmdline").read().split("\\0")[:-1]
    os.execv(sys.executable, seen if sys.argv[1] == "seen" else sys.orig_argv)
print(*sys.argv)
"""


@pytest.mark.parametrize(("way", "code", "out", "err"), [("own", 0, ["t.py own"], []), ("seen", 1, [], [NOT_OURS])])
async def test_a_worker_starts_itself_anew_by_its_own_command_line(
    tmp_path: Path, way: str, code: int, out: list[str], err: list[str]
) -> None:
    """It was killed without a word: by either it became a fork server whose shim is not its parent."""
    (tmp_path / "t.py").write_text(AGAIN)
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(make_spec((PYTHON, "t.py", way), tmp_path))
        assert status.fork_server_pid is not None
        (end,) = (await bench.run()).exits
        assert (end.code, end.signal) == (code, None)
        await bench.printed(*out)
        assert bench.output(stream="stderr") == err


async def test_environment_is_exact(tmp_path: Path, folder: Path) -> None:
    outcomes = []
    (tmp_path / "secrets").write_text("TOKEN=s3cret\nRANK=9\n")
    for fork_server in (True, False):
        async with open_bench(tmp_path / str(fork_server)) as bench:
            spec = make_spec(
                (PYTHON, "printenv.py"), folder, fork_server=fork_server, env={"A": "1"},
                env_file=str(tmp_path / "secrets"),
                environ={"PATH": "/usr/bin:/bin", "HOME": "/here"},
            )  # fmt: skip
            await bench.ready(spec)
            await bench.run(1, ({"RANK": "0", "A": "1"},))
            await wait_for(bench.output)
            (text,) = bench.output()
            env = dict(re.findall(r'"(\w+)": "([^"]*)"', text))
            assert env.pop("NODEAGENT_SHIM").startswith(UID)
            assert env.pop("NODEAGENT_SOCKET").endswith("/s")
            assert env.pop("TORCHELASTIC_ERROR_FILE").endswith("/errors/g1-r0.json")
            outcomes.append(env)
    assert outcomes[0] == outcomes[1]
    assert {key: outcomes[0][key] for key in ("A", "RANK", "TOKEN", "HOME")} == {
        "A": "1", "RANK": "0", "TOKEN": "s3cret", "HOME": "/here",
    }  # fmt: skip
    assert set(outcomes[0]) <= {"A", "RANK", "TOKEN", "HOME", "PATH", "LANG", "USER", "LOGNAME", "SHELL", "LC_CTYPE"}


async def test_preloaded_modules_are_there_and_random_differs(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os\nWHO = os.getpid()\n")
    (tmp_path / "t.py").write_text("import sys, random\nassert 'slow' in sys.modules\nprint(random.random())\n")
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, preload=("slow",)))
        status = await bench.run(1, ({}, {}))
        assert [end.code for end in status.exits] == [0, 0]
        await wait_for(lambda: bench.output(1, 0) and bench.output(1, 1))
        assert bench.output(1, 0) != bench.output(1, 1)


async def test_a_missing_preload_is_reported_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("print('ran')\n")
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, preload=("no_such_module",)))
        assert "no_such_module" in status.reason
        assert status.fork_server_pid is not None
        await bench.run()
        await bench.printed("ran")


async def test_threads_in_the_fork_server_mean_plain_starts(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (tmp_path / "t.py").write_text("import sys\nprint('threads' in sys.modules)\n")
    async with open_bench(tmp_path) as bench:
        bench.grant()
        bench.host.prepare(UID, make_spec((PYTHON, "t.py"), tmp_path, preload=("threads",)))
        status = await bench.until(lambda s: s.phase == "ready")
        assert "1 thread(s)" in status.reason
        await bench.run()
        await bench.printed("False")


async def test_the_fork_server_is_started_again_and_its_death_ends_its_workers(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        await bench.running(1, ({}, {}))
        assert first.fork_server_pid is not None
        os.kill(first.fork_server_pid, signal.SIGKILL)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [end.signal for end in status.exits] == [9, 9]
        assert not any(end.stopped for end in status.exits)
        await bench.until(lambda s: s.preforked and s.fork_server_pid != first.fork_server_pid)


async def test_an_idle_fork_server_outlives_the_granted_time(tmp_path: Path) -> None:
    """Nothing runs, so there is nothing to end: the next start costs no import."""
    (tmp_path / "t.py").write_text("print('up', flush=True)\n")
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        bench.grant(0.2)
        await asyncio.sleep(0.8)
        assert first.fork_server_pid is not None
        assert is_running(first.fork_server_pid)


async def test_stopped_while_the_fork_server_hangs(tmp_path: Path) -> None:
    """The fork server reaps; one that does not answer is killed, so that ends are known all the same."""
    (tmp_path / "t.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        await bench.running()
        assert first.fork_server_pid is not None
        os.kill(first.fork_server_pid, signal.SIGSTOP)
        bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(end.signal, end.stopped) for end in status.exits] == [(9, True)]


@pytest.mark.parametrize("size", [25_000, 60_000])
async def test_an_environment_of_any_size(tmp_path: Path, size: int) -> None:
    """Beyond what one message holds a worker starts cold, and sees it all."""
    (tmp_path / "t.py").write_text(
        "import os\nprint(sum(len(v) for k, v in os.environ.items() if k.startswith('BIG')))"
    )
    big = {f"BIG{i}": "x" * size for i in range(5)}
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        status = await bench.run(1, (big,))
        assert (status.refused, [end.code for end in status.exits]) == ("", [0])
        await bench.printed(str(5 * size))


async def test_more_workers_than_the_link_holds_commands(tmp_path: Path) -> None:
    """Found by a stranger: at 28 workers on a node the link was full, and the shim killed its fork server for it."""
    (tmp_path / "t.py").write_text("import os\nprint(len(os.environ['BIG']), os.environ['RANK'])\n")
    many = tuple({"BIG": "x" * 20_000, "RANK": str(rank)} for rank in range(40))
    async with open_bench(tmp_path) as bench:
        ready = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        status = await bench.run(1, many)
        assert (status.refused, [end.code for end in status.exits]) == ("", [0] * 40)
        for rank in range(40):
            await bench.printed(f"20000 {rank}", rank=rank)
        assert status.fork_server_pid == ready.fork_server_pid, "it has forked them all"


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """The usual soft limit, for what this process starts."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, usual[1]))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@pytest.mark.parametrize("fork_server", [True, False])
async def test_a_shim_has_descriptors_for_all_its_workers_and_they_have_as_usual(
    tmp_path: Path, few_descriptors: int, fork_server: bool
) -> None:
    (tmp_path / "t.py").write_text("import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n")
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, fork_server=fork_server))
        status = await bench.run(1, ({},) * 80)
        assert (status.refused, [end.code for end in status.exits]) == ("", [0] * 80)
        for rank in range(80):
            await bench.printed(str(few_descriptors), rank=rank)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_what_waits_for_a_fork_server_that_dies_is_given_up(tmp_path: Path) -> None:
    """It reads nothing; its death leaves no descriptor of theirs open."""
    (tmp_path / "t.py").write_text("import time\ntime.sleep(600)\n")
    many = tuple({"BIG": "x" * 20_000} for _ in range(40))
    async with open_bench(tmp_path) as bench:
        ready = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        assert ready.fork_server_pid is not None
        shim = ready.shim_pid
        assert shim is not None
        before = descriptors(shim)
        os.kill(ready.fork_server_pid, signal.SIGSTOP)
        bench.host.start(UID, bench.order(1, many))
        await bench.until(lambda s: len(s.workers) == 40)
        os.kill(ready.fork_server_pid, signal.SIGKILL)
        over = await bench.until(lambda s: s.phase == "exited")
        assert "the fork server died" in over.refused
        await wait_for(lambda: descriptors(shim) <= before)


async def test_a_worker_has_no_pid_until_it_is_forked(tmp_path: Path) -> None:
    """Not 0, which to whoever kills it is the killer's own process group."""
    (tmp_path / "t.py").write_text("import time\ntime.sleep(600)\n")
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        assert first.fork_server_pid is not None
        os.kill(first.fork_server_pid, signal.SIGSTOP)
        bench.host.start(UID, bench.order(1))
        starting = await bench.until(lambda s: s.workers)
        assert [(w.state, w.pid) for w in starting.workers] == [("starting", None)]
        os.kill(first.fork_server_pid, signal.SIGCONT)
        running = await bench.until(lambda s: s.phase == "running")
        assert [w.state for w in running.workers] == ["running"]
        assert is_running(pid_of(running.workers[0]))


async def test_output_of_a_flood_does_not_hold_up_the_worker(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("for i in range(300000): print(i)\n")
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        status = await bench.run()
        assert status.exits[0].code == 0
        await wait_for(lambda: bench.output()[-1:] == ["299999"])
        files = list((bench.logs / "g1").iterdir())
        assert len(files) == 3
        assert all(file.stat().st_size <= (1 << 20) + 70_000 * 5 for file in files)


IMPORTS = """
import os, sys
print(sorted(name for name in ("plain", "threaded", "broken") if name in sys.modules), flush=True)
"""


async def test_a_guess_with_which_forking_is_unsafe_is_taken_back_and_the_others_stay(tmp_path: Path) -> None:
    """One that is not there is not told of."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(IMPORTS)
    (folder / "plain.py").write_text("")
    (folder / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    )
    (folder / "broken.py").write_text("raise ValueError('no luck')")
    command = (PYTHON, "train.py")
    async with open_bench(tmp_path / "pods") as bench:
        status = await bench.ready(make_spec(command, folder, guessed=("plain", "threaded", "nowhere", "broken")))
        assert status.fork_server_pid is not None
        assert (
            "threaded is not preloaded, though the script imports it: the preloaded modules started 1" in status.reason
        )
        assert "preload broken: ValueError: no luck" in status.reason
        assert without_output(status.reason)[0] == "trouble with the fork server", "as others see it"
        assert "nowhere" not in status.reason
        await bench.run(1)
        await bench.printed("['plain']")
