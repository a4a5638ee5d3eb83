"""What runs below a process is found and ended, and what is spared is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from nodeagent.osutil.linux import is_running
from nodeagent.shim.processes import below, children_of, is_reaped_elsewhere, kill_below, parent_of
from tests.descriptors import few_files, seen_with

BRANCH = """
import os, sys, threading, time
def own_session():
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
    print(pid, flush=True)
own_session()
thread = threading.Thread(target=lambda: (own_session(), time.sleep(600)))
thread.start()
thread.join()
"""


def test_children_in_other_sessions_and_of_other_threads_are_found_and_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", BRANCH], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            pids = {int(process.stdout.readline()) for _ in range(2)}
            assert set(children_of(process.pid)) == pids
            assert (process.pid, os.getpid()) in below(os.getpid())
            assert pids < {pid for pid, _ in below(os.getpid())}
            assert {parent_of(pid) for pid in pids} == {process.pid}
            assert {pid for pid, _ in below(os.getpid(), {process.pid})}.isdisjoint({process.pid, *pids})
            assert set(kill_below(process.pid)) == pids
            while kill_below(process.pid):
                pass
            assert not any(map(is_running, pids))
            assert is_running(process.pid)
        finally:
            process.kill()


def test_without_a_descriptor_nothing_that_lives_is_passed_over() -> None:
    with subprocess.Popen([sys.executable, "-c", BRANCH], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            pids, looks = {int(process.stdout.readline()) for _ in range(2)}, list[set[int]]()
            for count in range(8):
                with few_files(count), suppress(OSError):
                    looks.append(set(kill_below(process.pid)))
                if looks:
                    break
            assert count > 0 and looks == [pids]
        finally:
            process.kill()


def test_without_a_descriptor_no_status_counts_as_lost_and_no_process_as_nobodys_child() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

        def look() -> None:
            assert not is_reaped_elsewhere(ended.pid)
            assert parent_of(ended.pid) == os.getpid()

        seen = seen_with(look, 4)
        assert seen[0] is False and seen[-1] is True
    assert is_reaped_elsewhere(ended.pid)


def test_nothing_is_below_a_process_that_does_not_exist() -> None:
    assert (children_of(1 << 30), parent_of(1 << 30), list(below(1 << 30)), kill_below(1 << 30)) == ([], 0, [], [])


FAILS = """
import os, sys
from nodeagent.shim.processes import start_function

def fails():
    raise {error}

status = os.waitpid(start_function(fails, 1, 2, "the watchdog"), 0)[1]
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ("FileNotFoundError(2, 'No such file')", 127, "No such file"),
        ("PermissionError(13, 'Not permitted')", 126, "Not permitted"),
        ("ValueError('too much')", 126, "ValueError: too much"),
        ("KeyError('a mistake of ours')", 126, "KeyError: 'a mistake of ours'"),
    ],
)
def test_no_forked_function_ends_without_a_word(error: str, code: int, says: str) -> None:
    program = [sys.executable, "-c", FAILS.format(error=error)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, f"nodeagent: cannot run the watchdog: {says}\n")


@pytest.mark.slow
def test_children_that_fill_more_than_a_page_are_all_found() -> None:
    many = 800
    code = f"for n in $(seq {many}); do sleep 600 & done; wait"
    with subprocess.Popen(["sh", "-c", code]) as process:
        try:
            end = time.monotonic() + 60
            while len(children_of(process.pid)) < many:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            assert len(kill_below(process.pid)) == many
        finally:
            process.kill()
