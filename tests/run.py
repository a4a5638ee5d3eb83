"""Runs groups of tests: `python -m tests.run test`, or `rest`, each with more arguments for pytest; `sum` adds them up.

Owns how many run at once, where their durations are kept, how long the rest may take, and that nothing which the tests
started outlives them: this process adopts every orphan among their descendants and kills what is left when pytest has
ended, however it ended. Never decides which test is in which group: that is in `tests/groups.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from nodeagent.osutil.tether import tethered
from tests.folders import short
from tests.groups import NOT_REACHED, STOP_AT
from tests.processes import children, command_line

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "test-results"
"""A file for each group, as pytest writes it for CI: every case with its duration."""
ELSEWHERE = "not endurance and not nodes and not large"
"""What has targets of make of its own."""
GROUPS = {"test": f"not slow and {ELSEWHERE}", "rest": f"slow and {ELSEWHERE}"}
WORKERS = 4
"""Tests mostly wait, so there are more than cores; with more than this on two cores they wait for each other."""
PATIENCE = 10.0
"""Seconds for killed processes to end."""
PR_SET_CHILD_SUBREAPER = 36
OUTCOMES = ("passed", "failed", "skipped")


def run(group: str, report: Path, workers: int, seconds: float | None, more: list[str]) -> int:
    """Run one group; pytest's exit code, or 1 where that is 0 and the report says otherwise: xdist ends with 0 when
    its processes could not collect the tests."""
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", GROUPS[group], "-n", str(workers), "--dist", "loadfile",
        "--no-loadscope-reorder", "--junitxml", str(report), "--durations", "20", *more,
    ]  # fmt: skip
    environ = {"PYTEST_DEBUG_TEMPROOT": str(short())} | os.environ
    if seconds is not None:
        environ[STOP_AT] = str(time.time() + seconds)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pytest = subprocess.Popen(tethered(command), cwd=ROOT, env=environ)
    signal.signal(signal.SIGINT, lambda *_: None)  # a Ctrl-C reaches pytest without our help
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: pytest.send_signal(signal.SIGINT))
    try:
        code = _reap_until(pytest.pid)
    finally:
        left = _end_descendants()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{group}: {used.ru_utime + used.ru_stime:.0f} s of CPU, {workers} at once; durations in {report}")
    for line in left:
        print(f"{group}: a process was left and killed: {line}")
    if not sound(code, report):
        print(f"{group}: pytest says that all is well, and its report that it is not")
        return 1
    return code


def sound(code: int, report: Path) -> bool:
    """The exit code is not 0, or the report agrees with it."""
    return code != 0 or (report.exists() and bool(count := outcomes(report)) and not count["failed"])


def _reap_until(wanted: int) -> int:
    """Bury every child that ends, adopted ones too, until this one has; its exit code."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == wanted:
            return os.waitstatus_to_exitcode(status)


def _end_descendants() -> list[str]:
    """Kill what is left of the tests' processes; command lines of what was."""
    left: dict[int, str] = {}
    end = time.monotonic() + PATIENCE
    while (found := children(os.getpid())) and time.monotonic() < end:
        for pid in found:
            left.setdefault(pid, " ".join(command_line(pid)))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its children are ours next
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    return [line for line in left.values() if line]


def outcomes(report: Path) -> Counter[str]:
    """How many cases of a report passed, failed (or were in error), were skipped, and were not reached in time."""
    count: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            count["failed"] += 1
        elif (skipped := case.find("skipped")) is not None:
            count["skipped"] += 1
            count["not reached"] += (skipped.get("message") or "").startswith(NOT_REACHED)
        else:
            count["passed"] += 1
    return count


def add_up() -> int:
    """Print all groups' outcomes as the last line; 1 if a group has no report."""
    total: Counter[str] = Counter()
    missing = [group for group in GROUPS if not (RESULTS / f"{group}.xml").exists()]
    for group in GROUPS:
        if group in missing:
            print(f"{group}: no report, it did not run to its end")
            continue
        count = outcomes(RESULTS / f"{group}.xml")
        print(f"{group}: {', '.join(f'{count[o]} {o}' for o in OUTCOMES)}")
        total += count
    if total["not reached"]:
        print(f"{total['not reached']} of those skipped were not reached in the time there was: `make test-rest`")
    print(", ".join(f"{total[o]} {o}" for o in OUTCOMES), flush=True)
    return 1 if missing or total["failed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=[*GROUPS, "sum"])
    parser.add_argument("--workers", type=int, default=WORKERS, help="tests at once")
    parser.add_argument("--seconds", type=float, help="begin no test later than this; those are skipped, and counted")
    parser.add_argument("--report", type=Path, help="where to leave pytest's report, if not in test-results")
    options, more = parser.parse_known_args()
    if options.group == "sum":
        return add_up()
    report = options.report or RESULTS / f"{options.group}.xml"
    return run(options.group, report, options.workers, options.seconds, more)


if __name__ == "__main__":
    sys.exit(main())
