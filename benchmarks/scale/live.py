"""``python -m benchmarks.scale.live``: real agents, lease processes, shims and a real Redis under random faults.

One job runs over all nodes of a local cluster, with workers that only step (no torch). A seeded random chooses the
next fault once the one before is over. Exit code 1 at the first thing that is not as it must be: two generations that
step at the same time, a generation that no fault explains, a node that lost its life without having been switched off.
With ``--record`` a run of at least ``RECORDED`` minutes is written into docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks import machine
from benchmarks.rest import measure
from benchmarks.scale.report import DOCUMENT, between
from nodeagent.ctl.terminal import CtlError
from nodeagent.local import control
from tests.e2e import stepper
from tests.e2e.support import Cluster, home

JOB = "live"
MARKS = "<!-- begin: python -m benchmarks.scale.live -->\n", "<!-- end: live -->\n"
RECORDED = 10.0
BATCH = 5
"""Nodes that are started at a time: a start is most of what an agent costs."""
START_LIMIT = 600.0
"""Seconds for all nodes to be ready, and for the first generation."""
LIMIT = 180.0
"""Seconds for any one fault to be over."""
QUIET = 6.0
"""Seconds after a fault that must disturb nobody, in which nothing may happen: two leases."""
PAUSE = (1.0, 5.0)
"""Seconds between the end of a fault and the next one."""
STOPPED, AWAY = (5.0, 20.0), (1.0, 8.0)
"""Seconds that an agent is stopped, and that Redis is."""
REST_WINDOW = 20.0


class WrongError(Exception):
    """What must never happen; the text says what."""


@dataclass
class Generation:
    """What its workers have written. Times are CLOCK_MONOTONIC."""

    number: int
    world: int
    began: dict[int, float] = field(default_factory=dict)
    """By rank."""
    last: dict[int, float] = field(default_factory=dict)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """End and length of each pause of a worker that is worth knowing."""

    @property
    def whole(self) -> bool:
        return len(self.began) == self.world


PAUSE_KNOWN = 0.15
"""Seconds between two steps from which on it is kept; the workers step each 0.1 s."""


class Steps:
    """The workers' log, read as it grows: no generation may step beside or after a newer one."""

    def __init__(self, file: Path) -> None:
        self._file, self._at = file, 0
        self.of: dict[int, Generation] = {}

    def newest(self) -> Generation | None:
        """Raises WrongError."""
        with suppress(FileNotFoundError), self._file.open("rb") as log:
            log.seek(self._at)
            new = log.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.splitlines():
                self.take(json.loads(line))
        return self.of[max(self.of)] if self.of else None

    def take(self, row: Mapping[str, Any]) -> None:
        """Lines of different workers may be in any order; each has its own time."""
        number, rank, at = row["generation"], row["rank"], row["mono"]
        one = self.of.setdefault(number, Generation(number, row["world"]))
        one.began[rank] = min(at, one.began.get(rank, at))
        if rank in one.last and at - one.last[rank] > PAUSE_KNOWN:
            one.gaps.append((at, at - one.last[rank]))
        one.last[rank] = max(at, one.last.get(rank, at))
        for other in self.of.values():
            if other.number < number and max(other.last.values()) >= min(one.began.values()):
                late = max(other.last.values()) - min(one.began.values())
                raise WrongError(f"generation {other.number} stepped {late:.3f} s after {number} had begun")
            if other.number > number and at >= min(other.began.values()):
                late = at - min(other.began.values())
                raise WrongError(f"generation {number} stepped {late:.3f} s after {other.number} had begun")


class Site:
    """The cluster, the job and what was found."""

    def __init__(self, one: Cluster, nodes: int, seed: int) -> None:
        self.one, self.nodes, self.chance = one, nodes, random.Random(seed)
        self.steps = Steps(one.work / "steps")
        self.took: dict[str, list[float]] = {name: [] for name in FAULTS}
        self.lives: dict[str, str] = {}

    # --- the cluster

    def supervisor(self, **request: object) -> dict[str, Any]:
        (socket,) = self.one.home.glob("local/run/*/control.sock")
        return control.ask(socket, request, LIMIT)

    def begin(self) -> None:
        self.one.up(min(BATCH, self.nodes))
        for number in range(BATCH, self.nodes):
            self.supervisor(do="add")
            if number % BATCH == BATCH - 1:
                self.until(lambda n=number: self.ready() > n, START_LIMIT, "the next nodes are ready")  # type: ignore[misc]
        self.until(lambda: self.ready() == self.nodes, START_LIMIT, "all nodes are ready")
        self.lives = self.lives_now()
        job = {
            "name": JOB, "command": [sys.executable, "-sSE", stepper.__file__, str(self.one.work / "steps")],
            "nodes": f"{max(1, self.nodes // 2)}:{self.nodes}", "workers_per_node": 1,
            "fork_server": "off", "grace": "1s",
            "restarts": {"max": 60, "window": "1m", "backoff": "0s..0s"},
        }  # fmt: skip
        self.one.submit(json.dumps(job))
        self.whole_again(0, START_LIMIT)

    def ready(self) -> int:
        with suppress(CtlError):
            return sum(state == "ready" for state in self.one.nodes().values())
        return 0

    def lives_now(self) -> dict[str, str]:
        nodes = [self.one.node(name) for name in self.one.nodes()]
        return {node["name"]: node["incarnation"]["life"] for node in nodes}

    def pods(self, what: str) -> list[tuple[str, int]]:
        """Node and pid, of the newest generation: ``shim_pid`` or ``worker``."""
        job = self.one.job(JOB)
        now = [pod for pod in job["pods"] if pod["generation"] == job["generation"]]
        if what == "worker":
            return sorted((pod["node"], w["pid"]) for pod in now for w in pod["workers"] if w["state"] == "running")
        return sorted((pod["node"], pod[what]) for pod in now if pod[what])

    # --- waiting

    def until(self, holds: Callable[[], bool], limit: float, what: str) -> None:
        end = time.monotonic() + limit
        while not holds():
            if time.monotonic() > end:
                raise WrongError(f"not within {limit:g} s: {what}\n{self.one.state()}")
            time.sleep(0.1)

    def whole_again(self, above: int, limit: float = LIMIT, world: int | None = None) -> Generation:
        """The first generation of this size above this number in which every worker has stepped."""

        def found() -> Generation | None:
            self.steps.newest()
            fit = [g for g in self.steps.of.values() if g.number > above and g.whole]
            return min((g for g in fit if g.world == (world or self.nodes)), key=lambda g: g.number, default=None)

        self.until(
            lambda: found() is not None, limit, f"a generation above {above} steps on {world or self.nodes} nodes"
        )
        generation = found()
        assert generation is not None
        return generation

    def generation(self) -> int:
        newest = self.steps.newest()
        assert newest is not None
        return newest.number

    # --- faults

    def reforms(self, name: str, at: float, before: int, world: int | None = None) -> Generation:
        """The fault has its one generation, and no other comes. Keeps how long no gang stepped as a whole."""
        after = self.whole_again(before, world=world)
        self.took[name].append(max(after.began.values()) - at)
        self.explained(before, after.number)
        return after

    def explained(self, before: int, after: int) -> None:
        if between_them := [n for n in self.steps.of if before < n < after]:
            raise WrongError(f"more generations than faults: {between_them}\n{self.one.state()}")

    def undisturbed(self, name: str, at: float, before: int) -> None:
        """No generation comes, and nobody's worker stands still. Keeps the longest pause of any worker."""
        time.sleep(QUIET)
        if self.generation() != before:
            raise WrongError(f"{name} formed the job anew\n{self.one.state()}")
        pauses = [length for end, length in self.steps.of[before].gaps if end > at]
        self.took[name].append(max(pauses, default=PAUSE_KNOWN))

    def check_lives(self) -> None:
        """No node was declared lost."""
        now = self.lives_now()
        if now != self.lives:
            lost = sorted(node for node, life in now.items() if life != self.lives.get(node))
            raise WrongError(f"these nodes have lost their lives without a cause: {lost}\n{self.one.state()}")


Fault = Callable[[Site, str], None]


def kill_of(what: str) -> Fault:
    def kill(site: Site, name: str) -> None:
        before, (_, pid) = site.generation(), site.chance.choice(site.pods(what))
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        site.reforms(name, at, before)

    return kill


def power_cut(site: Site, name: str) -> None:
    """And on again, once the others run."""
    before, node = site.generation(), site.chance.choice(sorted(site.lives))
    at = time.monotonic()
    site.supervisor(do="kill", node=node)
    after = site.reforms(name, at, before, site.nodes - 1)
    site.supervisor(do="start", node=node)
    site.explained(after.number, site.whole_again(after.number).number)
    site.lives[node] = site.one.node(node)["incarnation"]["life"]


def agent_kill(site: Site, name: str) -> None:
    before, pid = site.generation(), site.chance.choice(_agents(site))
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    site.undisturbed(name, at, before)
    site.until(lambda: site.ready() == site.nodes, LIMIT, "the agent is back")


def stop_of(pids: Callable[[Site], Sequence[int]], seconds: tuple[float, float]) -> Fault:
    """SIGSTOP for so long."""

    def stop(site: Site, name: str) -> None:
        before, pid = site.generation(), site.chance.choice(pids(site))
        at, length = time.monotonic(), site.chance.uniform(*seconds)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(length)
        finally:
            os.kill(pid, signal.SIGCONT)
        site.undisturbed(name, at, before)

    return stop


def lease_kill(site: Site, name: str) -> None:
    before, pid = site.generation(), site.one.lease_pid(site.chance.choice(sorted(site.lives)))
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    site.undisturbed(name, at, before)


def redis_kill(site: Site, name: str) -> None:
    before, at = site.generation(), time.monotonic()
    os.kill(site.supervisor(do="status")["redis"]["pid"], signal.SIGKILL)
    site.undisturbed(name, at, before)


def _agents(site: Site) -> list[int]:
    return sorted(node["agent_pid"] for node in site.supervisor(do="status")["nodes"] if node["agent_pid"])


def _redis(site: Site) -> list[int]:
    return [site.supervisor(do="status")["redis"]["pid"]]


FAULTS: Mapping[str, tuple[str, Fault]] = {
    "worker killed": ("formed again on all nodes", kill_of("worker")),
    "shim killed": ("formed again on all nodes", kill_of("shim_pid")),
    "a node's power cut": ("formed again on the others, beyond the lease of 3 s too", power_cut),
    "agent killed": ("nothing", agent_kill),
    f"agent stopped for {STOPPED[0]:g} to {STOPPED[1]:g} s": ("nothing", stop_of(_agents, STOPPED)),
    "lease process killed": ("nothing", lease_kill),
    f"Redis stopped for {AWAY[0]:g} to {AWAY[1]:g} s": ("nothing", stop_of(_redis, AWAY)),
    "Redis killed": ("nothing", redis_kill),
}
"""What it is to do to the job, and how it is brought about. Each is over when it returns."""


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Of workers on one slot for each node."""
    with home() as (folder, environ):
        one = Cluster(folder, folder / "work", environ | {"NODEAGENT__NODE__CPU_SLOTS": "1"})
        try:
            yield one
        finally:
            one.ctl("local", "down", check=None, limit=LIMIT)


def run(nodes: int, minutes: float, seed: int) -> str:
    """The faults; the section of the document. Raises WrongError."""
    about = machine.describe()
    with cluster() as one:
        site = Site(one, nodes, seed)
        began = time.monotonic()
        site.begin()
        print(f"{nodes} nodes run after {time.monotonic() - began:.0f} s; seed {seed}", flush=True)
        leases = [one.lease_pid(node) for node in site.lives]
        costs = measure({"agent": _agents(site), "lease process": leases, "redis": _redis(site)}, REST_WINDOW)
        rest = ", ".join(f"{kind} {cost.cpu_percent:.2f} %, {cost.pss_mb:.1f} MB" for kind, cost in costs.items())
        print(rest, flush=True)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            time.sleep(site.chance.uniform(*PAUSE))
            name = site.chance.choice(sorted(FAULTS))
            FAULTS[name][1](site, name)
            site.check_lives()
            print(f"{time.strftime('%H:%M:%S')} {name}: {site.took[name][-1]:.2f} s", flush=True)
        return section(site, minutes, seed, about, rest, os.getloadavg()[0])


def section(site: Site, minutes: float, seed: int, about: Mapping[str, str], rest: str, load: float) -> str:
    rows = [
        "| fault | times | what it did to the job | seconds, median | p95 | longest |",
        "| --- | --: | --- | --: | --: | --: |",
    ]
    for name, (effect, _) in FAULTS.items():
        if took := sorted(site.took[name]):
            p95 = took[min(len(took) - 1, round(0.95 * (len(took) - 1)))]
            rows.append(
                f"| {name} | {len(took)} | {effect} | {statistics.median(took):.2f} | {p95:.2f} | {took[-1]:.2f} |"
            )
    times = sum(map(len, site.took.values()))
    found = (
        f"{site.nodes} nodes, {minutes:g} minutes, seed {seed}: {times} faults, {len(site.steps.of)} generations. No "
        "two generations stepped at the same time, each generation has its fault, and no node lost its life but those "
        "that were switched off."
    )
    where = f"Measured {about['date']}: {about['machine']}; {about['system']}; load {about['load']}, {load:.1f} after."
    parts = (
        fill(found, 120),
        "\n".join(rows),
        fill(f"At rest with this job, on average: {rest}.", 120),
        fill(where, 120),
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.live", description=__doc__)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=RECORDED)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--record", action="store_true", help="write the table into docs/scale.md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the cluster goes first
    try:
        text = run(arguments.nodes, arguments.minutes, arguments.seed)
    except (WrongError, AssertionError, subprocess.SubprocessError) as error:
        print(f"wrong: {error}", file=sys.stderr)
        return 1
    print(text)
    if arguments.record and arguments.minutes >= RECORDED:
        DOCUMENT.write_text(between(DOCUMENT.read_text(), *MARKS, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
