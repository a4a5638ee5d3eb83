"""What must be on time goes before others where cores are short; what a job runs never does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.osutil.linux import PREFERRED

PROGRAM = """
import os
from nodeagent.osutil.linux import prefer
from nodeagent.shim.processes import start_function, start_program

def say():
    os.write(1, b"%d\\n" % os.getpriority(os.PRIO_PROCESS, 0))

prefer()
say()
os.waitpid(start_function(say, 1, 2, "the watchdog", preferred=True), 0)
os.waitpid(start_function(say, 1, 2, "the checks"), 0)
os.waitpid(start_program(["nice"], {"PATH": os.defpath}, "/", 1, 2), 0)
"""
GROUPS = Path("/proc/self/autogroup")


def numbers(*command: str) -> list[int]:
    return [int(line) for line in subprocess.check_output(command, text=True, timeout=60).split()]


def test_only_the_shim_and_its_watchdog_go_before_others() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    may = numbers("nice", "-n", "-1", "nice") == [ours - 1]
    high = PREFERRED if may else ours
    assert numbers(sys.executable, "-c", PROGRAM) == [high, high, max(0, high), max(0, high)]


def may_prefer_sessions() -> bool:
    """Whether the kernel has autogroup and lets us: twice at once it lets only those with CAP_SYS_ADMIN, which root in
    a container may lack."""
    if not GROUPS.exists():
        return False
    twice = f"echo -1 > {GROUPS} && echo -2 > {GROUPS} && cat {GROUPS}"
    done = subprocess.run(["sh", "-c", twice], capture_output=True, text=True, timeout=60, start_new_session=True)
    return done.stdout.strip().endswith("nice -2")


@pytest.mark.skipif(not may_prefer_sessions(), reason="the kernel has no autogroup, or does not let us write there")
def test_where_time_is_shared_among_sessions_theirs_goes_before_others() -> None:
    program = PROGRAM.replace("os.getpriority(os.PRIO_PROCESS, 0)", f"int(open('{GROUPS}').read().split()[-1])")
    program = program.replace("os.waitpid(start_program", "# ")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, start_new_session=True)
    assert done.stdout.split() == [str(PREFERRED), str(PREFERRED), "0"]
    ours = GROUPS.read_text()  # empty in the session of the machine's own init
    subprocess.run(
        [sys.executable, "-c", "from nodeagent.osutil.linux import prefer; prefer()"], check=True, timeout=60
    )
    assert GROUPS.read_text() == ours, "a session that is another's stays as it is"


def test_who_was_put_behind_others_may_stay_there() -> None:
    behind = numbers("nice", "-n", "3", sys.executable, "-c", PROGRAM.replace("prefer()\n", "", 1))
    assert behind == [os.getpriority(os.PRIO_PROCESS, 0) + 3] * 4, "only what is before others is put back"
