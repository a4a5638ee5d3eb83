"""``make soak HOURS=n``: training after training on a local cluster under random faults, until the time is over.

The seed brings the same faults in the same order. What was found goes to test-results/soak.json; with ``--record`` a
summary goes to docs/benchmarks.md. Exit code 1 at the first thing that is not as it must be.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import SOAK_MARKS
from nodeagent.local.privateredis import bundled_server
from tests.e2e import clocks, netns
from tests.e2e.clocks import WallClock
from tests.e2e.support import ROOT, Cluster, home
from tests.soak.faults import Place
from tests.soak.resources import ALLOWED
from tests.soak.rounds import GENERATION, Row, Soak, in_words

NODES = 4
ROUND = 240.0
SMALL = "2g"
"""Of the file system that the fault `disk full` fills; the logs of a round's small jobs must not."""
RESULTS = ROOT / "test-results" / "soak.json"
DOCUMENT = ROOT / "docs" / "benchmarks.md"


@contextmanager
def own_network() -> Iterator[bool]:
    """What this thread starts meanwhile has a network of its own, with nothing but loopback; False where it cannot."""
    if netns.why_not():
        yield False
        return
    with Path("/proc/thread-self/ns/net").open() as home_network:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(netns.CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield True
        finally:
            libc.setns(home_network.fileno(), netns.CLONE_NEWNET)


def clock_of_redis(folder: Path, environ: dict[str, str]) -> WallClock | None:
    """The cluster's Redis gets a clock of its own: as the first ``redis-server`` on its PATH. None where it cannot."""
    if clocks.why_not():
        return None
    clock, program = WallClock(folder / "clock"), folder / "bin" / "redis-server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, clock.under([str(bundled_server())])))} "$@"\n')
    program.chmod(0o755)
    environ["PATH"] = f"{program.parent}{os.pathsep}{environ['PATH']}"
    return clock


@contextmanager
def place(seed: int) -> Iterator[Place]:
    """A cluster of its own; where this process may mount, in a small file system."""
    with own_network() as cables, home() as (folder, environ):
        local = folder / "local"
        local.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL},mode=755", "tmpfs", str(local)]
        small = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
        clock = clock_of_redis(folder, environ)
        one = Cluster(folder, folder / "work", environ)
        where = Place(one, tuple(f"n{n + 1}" for n in range(NODES)), small, seed, cables, clock)
        try:
            one.up(NODES)
            where.redis()
            yield where
        finally:
            one.ctl("local", "down", check=None)
            clocks.clear_away(sorted(where.redis_pids))
            if small:
                subprocess.run(["umount", "--lazy", str(local)], check=True)


def soak(seconds: float, seed: int, each: float = ROUND) -> list[Row]:
    """Rounds, at least one, until the time is over or something is wrong."""
    end, rows = time.monotonic() + seconds, list[Row]()
    with place(seed) as where:
        rounds = Soak(where, each)
        rounds.prepare()
        able = {"full disk": where.small, "cut": where.cables, "skew": where.clock is not None}
        without = ", ".join(name for name, can in able.items() if not can)
        print(f"seed {seed}; {f'without {without}; ' if without else ''}{GENERATION}", flush=True)
        while not rows or (time.monotonic() < end and not rows[-1].wrong):
            rows.append(rounds.round(len(rows) + 1))
            print(in_words(rows[-1]), flush=True)
            for text in rows[-1].wrong:  # now: the cluster's end may fail, too
                print(text, file=sys.stderr, flush=True)
            keep(rows, seed)
    return rows


def keep(rows: list[Row], seed: int) -> None:
    """All figures: after each round, since hours may be cut short."""
    RESULTS.parent.mkdir(exist_ok=True)
    allowed = {name: {"more": more, "why": why} for name, (more, why) in ALLOWED.items()}
    found = {"seed": seed, "allowed": allowed, "rounds": [vars(row) for row in rows]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def record(rows: list[Row], seconds: float, seed: int) -> None:
    """A section of the document of figures."""
    faults = sum((row.faults for row in rows), Counter[str]())
    lines = [
        SOAK_MARKS[0], "## Hours under random faults", "",
        f"By `make soak` on {time.strftime('%Y-%m-%d')}: {seconds / 3600:.1f} hours, {len(rows)} trainings, "
        f"seed {seed}, {faults.total()} faults, {sum(r.small_jobs.total() for r in rows)} small jobs, "
        f"{sum(r.generations for r in rows)} generations. Every image of every pass used once; losses, and weights at "
        "one size, those of an undisturbed run; nothing grew beyond what tests/soak/resources.py allows.", "",
        "| fault | times |", "| --- | --- |", *(f"| {name} | {times} |" for name, times in sorted(faults.items())),
        SOAK_MARKS[1],
    ]  # fmt: skip
    text = DOCUMENT.read_text()
    text = re.sub(f"\n*{SOAK_MARKS[0]}.*?{SOAK_MARKS[1]}\n*", "\n", text, flags=re.DOTALL)
    DOCUMENT.write_text(text.rstrip() + "\n\n" + "\n".join(lines) + "\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trainings under random faults, and what they leave.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--round", type=float, default=ROUND, metavar="SECONDS", help="of an undisturbed training")
    parser.add_argument("--record", action="store_true", help="write a section of docs/benchmarks.md")
    arguments = parser.parse_args()
    asked = arguments.minutes * 60 if arguments.minutes else (arguments.hours or 2.0) * 3600
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the cluster and its mount go first
    begin = time.monotonic()
    rows = soak(asked, arguments.seed, min(arguments.round, asked / 2))
    took = time.monotonic() - begin
    wrong = any(row.wrong for row in rows)
    if arguments.record and not wrong:
        record(rows, took, arguments.seed)
    print(f"{len(rows)} rounds in {took / 60:.0f} minutes, seed {arguments.seed}: {'wrong' if wrong else 'all fine'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
