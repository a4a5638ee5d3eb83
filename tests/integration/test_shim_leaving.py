"""Workers that leave by themselves when they are asked: no signal for them and their children, and what they tell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from textwrap import indent

from nodeagent.pods.folder import run_folder
from tests.integration.shim_support import UID, make_spec, open_bench, pid_of, wait_for

ROOT = Path(__file__).parents[2]
PREPARE = f"""
import itertools, json, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from nodeagent.train.link import _connect
line = _connect(Path(os.environ["NODEAGENT_SOCKET"]), 30)
answers, ids = line.makefile(), itertools.count(1)
def say(what):
    os.write(1, (str(what) + "\\n").encode())
def put(name, **fields):
    number = next(ids)
    line.sendall(json.dumps({{"v": 1, "op": "worker." + name, "id": number, **fields}}).encode() + b"\\n")
    return number
def answer(number):
    return next(a for a in map(json.loads, answers) if a.get("id") == number)
def ask(name, **fields):
    return answer(put(name, **fields))
def want_to_be_asked():
    "The shim has heard the question when it has answered the one behind it."
    number = put("leave.wait")
    assert "not as it must be" in ask("leave.done")["error"]
    return number
signal.signal(signal.SIGTERM, lambda *_: say("signalled"))
"""
LEAVES = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
asked = want_to_be_asked()
say("up")
left = answer(asked)["answer"]["grace"]  # of 600 s
say(f"asked {'in time' if 570 < left <= 600 else left}, child {'lives' if child.poll() is None else 'is gone'}")
for wrong in ({"step": -1, "seconds": 1.0}, {"step": True, "seconds": 1.0}, {"step": 1, "seconds": float("inf")}):
    say(ask("leave.done", **wrong)["error"].partition(" the message")[0])
say(ask("leave.done", step=41, seconds=0.25)["answer"])
os._exit(101)
"""
STAYS = """
asked = want_to_be_asked()
say("up")
answer(asked)
say("asked")
while True:
    time.sleep(0.02)
"""
ASKS_LATE = """
signal.signal(signal.SIGTERM, lambda *_: leave())
def leave():
    say("yes" if 500 < ask("leave.wait")["answer"]["grace"] < 600 else "no")
    os._exit(3)
say("up")
while True:
    time.sleep(0.02)
"""

ENDS_SLOWLY = """
import atexit, threading
from nodeagent.train import goodbye
def never(why):
    say(why)
    while True:
        time.sleep(1)
def leave(*_):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("saved")  # not flushed
    try:
        goodbye()
    finally:
        never("finally")
atexit.register(never, "atexit")
threading.Thread(target=never, args=("thread",)).start()  # the interpreter waits for it
signal.signal(signal.SIGTERM, leave)
say("up")
while True:
    time.sleep(0.02)
"""


def script(folder: Path, text: str) -> tuple[str, str]:
    (folder / "t.py").write_text(PREPARE + text)
    return (sys.executable, "t.py")


async def test_a_worker_is_asked_instead_of_signalled_and_tells_how_it_left(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, LEAVES), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        status = await bench.until(lambda s: s.phase == "exited")
        (end,) = status.exits
        assert (end.code, end.stopped, end.left_at, end.saved_in, end.overdue) == (101, True, 41, 0.25, None)
        await bench.printed("up", "asked in time, child lives", *["worker.leave.done:"] * 3, "{}")


async def test_one_that_stays_is_killed_when_its_grace_is_over_and_that_is_reported(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, STAYS), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        await bench.output_line("asked")
        bench.host.stop(UID, 0.2)
        status = await bench.until(lambda s: s.phase == "exited")
        (end,) = status.exits
        assert (end.signal, end.stopped, end.left_at, end.overdue) == (9, True, None, 0.2)
        assert "signalled" not in bench.output()


async def test_one_that_says_goodbye_is_not_waited_for(tmp_path: Path) -> None:
    """Its interpreter would never end: ``finally``, ``atexit`` and a thread hang, and it has a child."""
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, ENDS_SLOWLY), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        status = await bench.until(lambda s: s.phase == "exited")
        (end,) = status.exits
        assert (end.code, end.signal, end.stopped) == (101, None, True)
        await wait_for(lambda: sorted(bench.output()) == ["saved", "thread", "up"])


async def test_one_that_is_killed_at_once_had_no_grace_to_exceed(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, STAYS), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert (status.exits[0].signal, status.exits[0].overdue) == (9, None)
        assert "asked" not in bench.output()


async def test_one_that_asks_when_the_stop_has_begun_learns_what_is_left(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, ASKS_LATE), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        status = await bench.until(lambda s: s.phase == "exited")
        assert status.exits[0].code == 3
        await bench.printed("up", "yes")


def ranks(*texts: str) -> str:
    """One script for workers that each do something else, by RANK; they are up when the shim has heard them ask."""
    parts = "\n".join(f"def rank{number}():\n" + indent(text, "    ") for number, text in enumerate(texts))
    return f"{parts}\nglobals()['rank' + os.environ['RANK']]()\n"


WAITS = """
asked = want_to_be_asked()
say("up")
answer(asked)
say("asked")
time.sleep(600)
"""
SAVES = """
asked = want_to_be_asked()
say("up")
answer(asked)
ask("leave.saving")
say("saving")
while not Path("disk").exists():
    time.sleep(0.01)
ask("leave.done", step=7, seconds=0.5)
time.sleep(600)
"""
PLAIN = """
say("up")
while not Path("disk").exists():
    time.sleep(0.01)
os._exit(0)
"""


async def test_those_that_wait_for_one_that_died_as_it_left_are_killed_and_those_that_save_are_not(
    tmp_path: Path,
) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, ranks(WAITS, WAITS, SAVES, PLAIN)), tmp_path))
        status = await bench.running(1, tuple({"RANK": str(rank)} for rank in range(4)))
        pids = {w.rank: pid_of(w) for w in status.workers}
        for rank in range(4):
            await bench.output_line("up", rank=rank)
        bench.host.stop(UID, 600)
        for rank, word in ((0, "asked"), (1, "asked"), (2, "saving")):
            await bench.output_line(word, rank=rank)
        os.kill(pids[0], signal.SIGKILL)
        status = await bench.until(lambda s: len(s.exits) == 2)
        assert [(e.rank, e.signal, e.stopped, e.missed) for e in status.exits] == [
            (0, 9, True, True),
            (1, 9, True, True),
        ]
        (tmp_path / "disk").touch()
        status = await bench.until(lambda s: s.phase == "exited")
        saved, plain = sorted(status.exits[2:], key=lambda e: e.rank)
        assert (saved.left_at, saved.saved_in, saved.missed) == (7, 0.5, False)
        assert (plain.code, plain.missed) == (0, False)


async def test_one_that_died_elsewhere_is_as_good_a_reason(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, STAYS), tmp_path))
        await bench.running()
        await bench.output_line("up")
        bench.host.stop(UID, 600)
        await bench.output_line("asked")
        bench.host.stop(UID, 600, broken=True)
        status = await bench.until(lambda s: s.phase == "exited")
        assert (status.exits[0].signal, status.exits[0].missed) == (9, True)


ENDS = """
asked = want_to_be_asked()
say("up")
answer(asked)
say("asked")
while not Path("end").exists():
    time.sleep(0.01)
os._exit(0)
"""


async def test_one_that_had_no_more_to_do_is_not_missed(tmp_path: Path) -> None:
    """The others have come to the end of their training as well, and need their grace for what they do there."""
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(script(tmp_path, ranks(ENDS, STAYS)), tmp_path))
        await bench.running(1, ({"RANK": "0"}, {"RANK": "1"}))
        await bench.output_line("up", rank=0)
        await bench.output_line("up", rank=1)
        bench.host.stop(UID, 600)
        await bench.output_line("asked", rank=1)
        (tmp_path / "end").touch()
        status = await bench.until(lambda s: len(s.exits) == 1)
        assert (status.exits[0].code, status.exits[0].missed, status.phase) == (0, False, "stopping")
        assert [w.state for w in status.workers] == ["exited", "running"]


async def test_a_shim_that_is_retired_tells_how_its_workers_ended(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path, fork_server=False))
        await bench.running()
        path = run_folder(bench.grants.parent, UID) / "s"
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            bench.host.retire(UID)
            read = await asyncio.to_thread(lambda: b"".join(iter(lambda: link.recv(1 << 16), b"")))
        last = json.loads(read.splitlines()[-1])["status"]
        assert [(end["signal"], end["stopped"]) for end in last["exits"]] == [(signal.SIGKILL, True)]
