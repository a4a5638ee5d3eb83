"""What a cluster at rest uses, and how much more than at the baseline it may."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent.store.wire import Connection
from tests.e2e.support import leftovers
from tests.soak.faults import Place

ALLOWED = {
    "agent PSS": (12 << 20, "bytes; caches with bounds, which fill, and what a start of Python differs by"),
    "agent descriptors": (4, "a request that is being answered"),
    "agent threads": (8, "helpers of asyncio.to_thread, made when first needed and kept"),
    "processes": (0, "at rest there are the supervisor, Redis, the agents, and what ended agents left of themselves"),
    "redis keys": (12, "capped streams and hashes appear with their first entry"),
    "redis memory": (16 << 20, "bytes; the capped stream of events fills; no key stays of a job that was deleted"),
    "files in run": (8, "sockets and marks of agents"),
    "files in state": (24, "logs of changes; besides, PER_JOB of each job, until the agents' hourly look"),
    "files in logs": (8, "besides, PER_JOB of each job, until the agents' hourly look"),
}
"""Growth since the baseline that is no failure, and why."""
PER_JOB = 24
"""Files that one ended job leaves on all nodes together: each pod's records, and its output."""
OF_JOBS = ("files in state", "files in logs")


@dataclass(frozen=True)
class Usage:
    """At one moment, ``jobs`` having ended so far; per node where a node has it."""

    jobs: int
    figures: dict[str, int]


def measure(place: Place, jobs: int) -> Usage:
    """Raises OSError where an agent is not there."""
    found: dict[str, int] = {}
    for node in place.supervisor()["nodes"]:
        proc = Path(f"/proc/{node['agent_pid']}")
        pss = next(x for x in (proc / "smaps_rollup").read_text().splitlines() if x.startswith("Pss:"))
        found[f"agent PSS {node['name']}"] = int(pss.split()[1]) << 10
        found[f"agent descriptors {node['name']}"] = len(list((proc / "fd").iterdir()))
        found[f"agent threads {node['name']}"] = len(list((proc / "task").iterdir()))
    found["processes"] = _processes(place)
    keys, memory = asyncio.run(_redis(place))
    found |= {"redis keys": keys, "redis memory": memory}
    local = place.one.home / "local"
    data = Path(place.supervisor()["data"])
    found["files in run"] = _files(local / "run")
    for kind in ("state", "logs"):
        found[f"files in {kind}"] = sum(_files(data / node / kind) for node in place.nodes)
    return Usage(jobs, found)


def _files(folder: Path) -> int:
    """Below this folder. What the agents remove meanwhile, as the output of the job that was just deleted, is gone."""
    return sum(len(files) for _, _, files in os.walk(folder))


def _processes(place: Place) -> int:
    """All that belong to the cluster, and those that one of them has not reaped."""
    living, dead = set(leftovers(place.one.home)), 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended while we looked
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                dead += state == "Z" and int(parent) in living
    return len(living) + dead


async def _redis(place: Place) -> tuple[int, int]:
    (socket,) = place.one.home.glob("local/run/*/redis/redis.sock")
    link = Connection(str(socket))
    async with asyncio.timeout(20):
        await link.open()
        await link.send("DBSIZE")
        keys: Any = await link.receive()
        await link.send("INFO", "memory")
        info: Any = await link.receive()
    await link.close()
    used = next(line for line in info.splitlines() if line.startswith("used_memory:"))
    return int(keys), int(used.partition(":")[2])


def grown(base: Usage, now: Usage) -> list[str]:
    """What uses more than it may."""
    found = []
    for name, figure in now.figures.items():
        kind = next(k for k in ALLOWED if name.startswith(k))
        more = ALLOWED[kind][0] + (PER_JOB * (now.jobs - base.jobs) if kind in OF_JOBS else 0)
        if figure > base.figures[name] + more:
            found.append(f"{name}: {base.figures[name]} -> {figure}, allowed {base.figures[name] + more}")
    return found
