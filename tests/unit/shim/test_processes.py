"""What runs below a process is found and ended, and what is spared is not."""

from __future__ import annotations

import os
import subprocess
import sys

from nodeagent.osutil.linux import is_running
from nodeagent.shim.processes import below, children_of, kill_below, parent_of

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


def test_nothing_is_below_a_process_that_does_not_exist() -> None:
    assert (children_of(1 << 30), parent_of(1 << 30), list(below(1 << 30)), kill_below(1 << 30)) == ([], 0, [], [])
