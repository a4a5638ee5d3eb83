"""A real shim's watch over its workers: what it tells of them, when, and what it leaves alone."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Hang, JobSpec
from nodeagent.model.pod import Stall
from nodeagent.pods.base import PodStatus
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, token, wait_for

SHORT = Hang(progress=1.0)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path) as one:
        yield one


def script(bench: Bench, code: str, *, hang: Hang | None = SHORT, fork_server: bool = True) -> JobSpec:
    file = bench.root / "w.py"
    file.write_text("import os, sys, time\nrank = int(sys.argv[1]) if len(sys.argv) > 1 else 0\n" + code)
    path = str(Path(__file__).parents[2])
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    return make_spec((sys.executable, str(file)), bench.root, hang=hang, fork_server=fork_server, environ=environ)


def stall(status: PodStatus) -> Stall:
    assert status.stall is not None
    return status.stall


def read(file: str) -> str:
    return Path(file).read_text()


STOPS = """
from nodeagent.train import progress
def stands_still():
    while not os.access("go", os.F_OK): time.sleep(0.05)
progress(7)
stands_still()
while True:
    progress(8)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("fork_server", [True, False], ids=["forked", "started cold"])
async def test_a_worker_that_gets_no_further_is_reported_with_its_stacks_until_it_does(
    bench: Bench, fork_server: bool
) -> None:
    await bench.ready(script(bench, STOPS, fork_server=fork_server))
    await bench.running()
    seen = stall(await bench.until(lambda s: s.stall))
    assert (seen.suspects, seen.limit) == (True, 1.0)
    (facts,) = seen.ranks
    assert (facts.rank, facts.step, facts.overdue, facts.state, facts.waits) == (0, 7, "long", "idle", False)
    assert facts.site.startswith("stands_still (")
    assert "w.py:" in facts.site
    text = read(facts.stacks)
    assert Path(facts.stacks) == bench.logs / "stacks" / "g1-rank0.txt"
    for part in ("rank 0 of generation 1", "--- kernel, each thread", "--- Python", "--- native and Python"):
        assert part in text
    assert text.count("stands_still") >= 2
    (bench.root / "go").touch()
    await bench.until(lambda s: s.stall is None)


async def test_stacks_are_begun_before_the_limit_is_reached(bench: Bench) -> None:
    """So that nobody waits for them when it is."""
    code = "import signal\nfrom nodeagent.train import progress\nprogress(7)\nos.kill(os.getpid(), signal.SIGSTOP)"
    await bench.ready(script(bench, code, hang=Hang(progress=6.0)))
    await bench.running()
    (facts,) = stall(await bench.until(lambda s: s.stall)).ranks
    assert (facts.overdue, facts.state, facts.step) == ("long", "stopped", 7)
    begun = re.search(r"'age': ([0-9.]+)", read(facts.stacks))
    assert begun is not None
    assert 3.0 <= float(begun[1]) < 6.0


async def test_a_reading_before_the_limit_halts_nobody_whose_limit_is_short(bench: Bench) -> None:
    """It could make late who is only slow. Who gets on afterwards was never told."""
    code = (
        "import glob\nfrom nodeagent.train import progress\nprogress(7)\nend = time.monotonic() + 30\n"
        "while not glob.glob('**/stacks/g1-rank0.txt', recursive=True) and time.monotonic() < end: time.sleep(0.05)\n"
    )
    await bench.ready(script(bench, code, hang=Hang(progress=10.0)))
    await quiet_to_the_end(bench)
    text = read(str(bench.logs / "stacks" / "g1-rank0.txt"))
    assert "--- kernel, each thread" in text
    assert "native" not in text


async def test_a_phase_that_is_reported_may_take_longer(bench: Bench) -> None:
    code = "from nodeagent.train import progress\nprogress(7, 'evaluate')\ntime.sleep(3.5)"
    await bench.ready(script(bench, code))
    await quiet_to_the_end(bench)


async def test_who_computes_without_a_word_is_left_alone(bench: Bench) -> None:
    await bench.ready(script(bench, "end = time.monotonic() + 3.5\nwhile time.monotonic() < end: pass"))
    await quiet_to_the_end(bench)


async def test_who_writes_is_left_alone(bench: Bench) -> None:
    await bench.ready(script(bench, "for i in range(14): print(i, flush=True); time.sleep(0.25)"))
    await quiet_to_the_end(bench)


async def test_the_first_step_is_reported_with_or_without_a_watch(bench: Bench) -> None:
    code = (
        "from nodeagent.train import progress\nprogress(phase='compile')\n"
        "while not os.path.exists(f'go{os.environ[\"WHICH\"]}'): time.sleep(0.02)\n"
        "progress(1)\nprogress(2)\ntime.sleep(600)"
    )
    await bench.ready(script(bench, code, hang=None))
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    await bench.running(environments=({"WHICH": "0"}, {"WHICH": "1"}))
    (bench.root / "go0").touch()
    (bench.root / "go1").touch()
    status = await bench.until(lambda s: s.stepped)
    assert status.stepped is not None
    assert began < status.stepped < time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_nothing_is_watched_unless_the_job_wants_it(bench: Bench) -> None:
    code = "print(os.environ.get('NODEAGENT_PROGRESS'), flush=True)\ntime.sleep(2.5)"
    await bench.ready(script(bench, code, hang=None))
    await quiet_to_the_end(bench)
    await bench.printed("None")


async def quiet_to_the_end(bench: Bench) -> None:
    """The workers end well, and no stall was told meanwhile."""
    seen: list[Stall | None] = []

    def ended(status: PodStatus) -> bool:
        seen.append(status.stall)
        return status.generation == token(1) and status.phase == "exited"

    bench.host.start(UID, bench.order(1))
    end = await bench.until(ended)
    assert [e.code for e in end.exits] == [0]
    assert not any(seen)


TWO = """
print("up", flush=True)
if os.environ["WHICH"] == "1":
    while True: time.sleep(60)
while True: pass
"""


async def test_without_help_a_stopped_worker_is_reported_while_the_others_spin(bench: Bench) -> None:
    await bench.ready(script(bench, TWO))
    up = await bench.running(environments=({"WHICH": "0"}, {"WHICH": "1"}))
    await bench.output_line("up", rank=1)
    os.kill(pid_of(up.workers[1]), signal.SIGSTOP)
    seen = stall(await bench.until(lambda s: s.stall))
    assert [(f.state, f.silent, f.quiet, f.frozen) for f in seen.ranks] == [
        ("busy", True, False, False), ("stopped", True, True, True),
    ]  # fmt: skip
    assert seen.suspects
    stacks = read(seen.ranks[1].stacks)
    assert "none: the process is in state T" in stacks
    assert "w.py" in stacks, "Python's can be read all the same"
    os.kill(pid_of(up.workers[1]), signal.SIGCONT)
    await bench.until(lambda s: s.stall is None)


async def test_a_deadlock_without_help_is_reported(bench: Bench) -> None:
    await bench.ready(script(bench, "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()"))
    await bench.running()
    (facts,) = stall(await bench.until(lambda s: s.stall)).ranks
    assert (facts.state, facts.silent, facts.quiet, facts.step, facts.overdue) == ("idle", True, True, None, None)


async def test_a_pod_that_is_asked_tells_what_it_sees(bench: Bench) -> None:
    code = "from nodeagent.train import progress\nfor i in range(10 ** 6): progress(i); time.sleep(0.02)"
    await bench.ready(script(bench, code, hang=Hang(progress=60.0)))
    await bench.running()
    await wait_for(lambda: bench.host.status()[UID].phase == "running")
    bench.host.look(UID)
    seen = stall(await bench.until(lambda s: s.stall, 40))
    (facts,) = seen.ranks
    assert (seen.suspects, facts.overdue) == (False, "no")
    shown = await bench.until(lambda s: s.workers[0].step)
    assert shown.workers[0].doing == "train"


async def test_the_watch_ends_with_the_generation(bench: Bench) -> None:
    await bench.ready(script(bench, STOPS))
    await bench.running()
    page = next(bench.root.glob("run/pods/*/progress-0"))
    await bench.until(lambda s: s.stall)
    bench.host.stop(UID, None)
    await bench.until(lambda s: s.phase == "exited" and s.stall is None)
    await wait_for(lambda: not page.exists())
    (bench.root / "go").touch()  # the next one does not stand still
    await bench.run_another(2)
    assert sorted(p.name for p in (bench.logs / "stacks").iterdir()) == ["g1-rank0.txt"]


TWICE = """
def first():
    print("one", flush=True)
    while not os.access("go", os.F_OK): time.sleep(0.05)
def second():
    print("two", flush=True)
    time.sleep(600)
first()
second()
"""


async def test_stacks_are_of_the_standstill_that_is_reported(bench: Bench) -> None:
    """However soon after another one it comes."""
    await bench.ready(script(bench, TWICE))
    await bench.running()
    (facts,) = stall(await bench.until(lambda s: s.stall)).ranks
    assert facts.site.startswith("first (")
    (bench.root / "go").touch()
    await bench.until(lambda s: s.stall is None)
    (facts,) = stall(await bench.until(lambda s: s.stall)).ranks
    assert facts.site.startswith("second (")
    assert "second" in read(facts.stacks)
