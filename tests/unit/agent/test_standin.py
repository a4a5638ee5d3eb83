"""The split of a process: what waited goes on in the copy, which is alone; and where there can be none, it says so."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.workers.linux import POWER

SPLITS = """
import asyncio, os, signal, socket, sys
from nodeagent.agent.standin import Split
from nodeagent.workers.linux import is_running

async def main(split):
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    other_reader, other_writer = await asyncio.open_connection(sock=theirs)
    await asyncio.to_thread(os.getpid)
    first, told, done = os.getpid(), [], asyncio.Event()
    before = asyncio.create_task(reader.readline())  # waits since before the split
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    pid = await split(lambda pid: print("told", pid, flush=True))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    os.kill(os.getpid(), signal.SIGTERM)
    await done.wait()
    other_writer.write(b"hello\\n")
    line = await before
    thread = await asyncio.to_thread(os.getpid)
    print("copy", pid == os.getpid() != first, thread == pid, not is_running(first), line, flush=True)
    return 7

split = Split()
sys.exit(split.run(main(split)))
"""
REFUSED = """
import asyncio, errno, os, sys
from nodeagent.agent.standin import Split

def fork():
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

async def main(split):
    try:
        await split(lambda pid: None)
    except OSError as error:
        print(error.strerror, flush=True)
    return 3

os.fork = fork
split = Split()
sys.exit(split.run(main(split)))
"""
ALONE = """
import sys
from nodeagent.agent.standin import Split

async def main():
    return 5

sys.exit(Split().run(main()))
"""
ORPHAN = """
import asyncio, os, sys
from nodeagent.agent.standin import Split
from nodeagent.workers.linux import become_subreaper

async def main(split):
    await split(lambda pid: None)
    print(os.getpid(), flush=True)
    await asyncio.sleep(60)
    return 0

become_subreaper()
if os.fork() == 0:
    split = Split()
    split.run(main(split))
sys.stdin.read()
"""


def run(script: str, tmp_path: Path) -> tuple[int, list[str]]:
    """Its exit code, and what it and its copy wrote, until both have ended."""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_what_waits_goes_on_in_the_copy_once_the_first_has_ended(tmp_path: Path) -> None:
    code, lines = run(SPLITS, tmp_path)
    assert code == 0, "the first one has ended well"
    told, copy = lines
    assert told.startswith("told ")
    assert copy == r"copy True True True b'hello\n'"


def test_where_no_process_can_be_made_the_first_one_goes_on(tmp_path: Path) -> None:
    assert run(REFUSED, tmp_path) == (3, ["Resource temporarily unavailable"])


def test_without_a_split_it_is_as_asyncio_run(tmp_path: Path) -> None:
    assert run(ALONE, tmp_path) == (5, [])


@pytest.mark.parametrize("local", [True, False])
def test_only_on_a_local_cluster_it_ends_with_whoever_adopted_it(local: bool, tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != POWER} | ({POWER: "c/n1"} if local else {})
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], env=environ, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        assert bool(ended.poll(2000 if local else 300)) == local
        if not local:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
