"""How short may a lease be? Lease processes with several clockworks renew for a long time on a machine whose every core
is busy; what is counted is how late renewals come, and how often a healthy node was taken for lost.

``python -m benchmarks.lease --minutes 60``: prints the tables and writes ``benchmarks/lease.json``, from which
``docs/benchmarks.md`` takes them. Owns the load, the clusters and the listening; the figures are ``leasecurve.py``'s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from benchmarks import machine
from benchmarks.launcher import PYTHON, LaunchError
from benchmarks.leasecurve import Gaps, tables
from benchmarks.ours import JOB, Ours
from nodeagent.lease.statefiles import find_holder
from nodeagent.model.timing import Timing

RESULTS = Path(__file__).with_name("lease.json")
NODES = 2
"""Per clockwork."""
SAVE_EVERY = 30.0
"""Seconds between two writings of the results, and between two lease processes that are killed."""
RENEWED = re.compile(rb'"ZADD" "na:\{[^}]*\}:lease" "\d+" "([^"]+)"')
"""What the script of a renewal does once, as MONITOR shows it."""
CLOCKWORKS = (
    Timing(),
    Timing(heartbeat=0.4, store_timeout=0.3, credit=0.4, gap=1.2, lease=2.0, fence=1.3, failsafe=0.5, promise=2.0),
    Timing(heartbeat=0.25, store_timeout=0.25, credit=0.25, gap=1.0, lease=1.5, fence=1.0, failsafe=0.4, promise=1.5),
    Timing(heartbeat=0.15, store_timeout=0.15, credit=0.15, gap=0.6, lease=1.0, fence=0.63, failsafe=0.3, promise=1.0),
)
SPIN = """
import os, pathlib, sys
os.nice(int(sys.argv[1]))
group = pathlib.Path("/proc/self/autogroup")  # where the kernel has these, a session's counts and not a process's
if group.exists():
    group.write_text(sys.argv[1])
while True:
    pass
"""
IDLE = [PYTHON, "-c", "import time\nwhile True: time.sleep(1)"]


class Study:
    """One clockwork: a cluster whose renewals are listened to. Use as a context manager."""

    def __init__(self, folder: Path, timing: Timing) -> None:
        problems = timing.problems()
        if problems:
            raise LaunchError("; ".join(problems))
        self.timing, self.gaps = timing, Gaps(timing.heartbeat)
        environ = {f"NODEAGENT__TIMING__{key.upper()}": f"{value:g}" for key, value in timing.model_dump().items()
                   if value != getattr(Timing(), key)}  # fmt: skip
        self._ours = Ours(folder, None, NODES, environ=environ)
        self._last: dict[bytes, float] = {}
        self._killed: dict[bytes, float] = {}
        """When (Unix time) the lease processes were killed that have not renewed since."""
        self._restarts: list[float] = []
        """Seconds between the renewals around such a death."""
        self._began = 0.0

    def __enter__(self) -> Study:
        self._ours.__enter__()
        try:
            job = {"name": JOB, "command": IDLE, "nodes": NODES, "workers_per_node": 1, "fork_server": "off"}
            file = self._ours.folder / "job.yaml"
            file.write_text(json.dumps(job))
            self._ours.ctl("submit", str(file))
            self._ours.until_phase("running", 60.0)
            self._redis = Redis(unix_socket_path=str(self._ours.cluster().layout.redis / "redis.sock"))
            self._began = time.monotonic()
            self._generation = self._ours.job()["generation"]
            threading.Thread(target=self._listen, daemon=True).start()
        except BaseException:
            self._ours.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.__exit__(None, None, None)

    def _listen(self) -> None:
        """Until the connection breaks, which is when the cluster ends. The times are the store's own."""
        with self._redis.monitor() as monitor:  # type: ignore[no-untyped-call]
            connection = monitor.connection
            while True:
                try:
                    line: bytes = connection.read_response(disable_decoding=True)
                except (OSError, RedisConnectionError):
                    return
                if found := RENEWED.search(line):
                    self._renewed(found[1], float(line.split(b" ", 1)[0].lstrip(b"+")))

    def _renewed(self, node: bytes, at: float) -> None:
        before = self._last.get(node)
        self._last[node] = at
        if before is None:
            return
        if at > self._killed.get(node, at):
            del self._killed[node]
            self._restarts.append(round(at - before, 3))
        else:
            self.gaps.add(at - before)

    def kill_lease_process(self) -> None:
        """kill -9 of a random one; its agent starts it again."""
        folders = self._ours.cluster().layout.run.glob("*/lease")
        held = {folder.parent.name: holder for folder in folders if (holder := find_holder(folder)) is not None}
        node = random.choice(sorted(held))
        os.kill(held[node][0], signal.SIGKILL)
        self._killed[node.encode()] = time.time()

    def result(self) -> dict[str, Any]:
        """So far."""
        events = json.loads(self._ours.ctl("events", "--limit", "500", "-o", "json"))["items"]
        job = self._ours.job()
        return {
            "timing": {key: getattr(self.timing, key) for key in ("heartbeat", "fence", "lease")},
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "node_hours": round(NODES * (time.monotonic() - self._began) / 3600, 4),
            "lost": sum(event["kind"] == "NodeLost" for event in events),
            "reformed": job["generation"] - self._generation,
            "gaps": self.gaps.as_json(),
            "restarts": sorted(self._restarts),
            "killed": "lease processes",
        }


@contextmanager
def load(count: int, nice: int) -> Iterator[None]:
    """So many processes that never rest."""
    burners = [subprocess.Popen([sys.executable, "-c", SPIN, str(nice)], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lease", description="How short may a lease be?")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--per-core", type=int, default=2, metavar="N", help="processes that never rest, per core")
    parser.add_argument("--nice", type=int, default=0, help="their niceness")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that everything is cleared away
    cores = os.cpu_count() or 1
    results: dict[str, Any] = {"machine": machine.describe(), "load": vars(arguments) | {"cores": cores}}
    with tempfile.TemporaryDirectory(prefix="nodeagent-lease-") as scratch, ExitStack() as stack:
        studies = [
            stack.enter_context(Study(Path(scratch) / f"{number}", timing))
            for number, timing in enumerate((*CLOCKWORKS, Timing()))
        ]
        killed = studies.pop()
        stack.enter_context(load(arguments.per_core * cores, arguments.nice))
        until, loads = time.monotonic() + 60 * arguments.minutes, []
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(SAVE_EVERY, left))
            killed.kill_lease_process()
            loads.append(os.getloadavg()[0])
            results["load_average"] = [round(value, 1) for value in (min(loads), sum(loads) / len(loads), max(loads))]
            results["clockworks"] = [study.result() for study in studies]
            results["killed"] = killed.result()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
