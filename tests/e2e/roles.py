"""Jobs of several roles for end-to-end tests: the example's servers and trainers, and caches that serve workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.e2e.support import ROOT, Cluster

EXAMPLE = ROOT / "examples" / "roles"
STEPS = 60
PLACES = ["pserver.0", "pserver.1", "trainer.0", "trainer.1"]


def roles_job(work: Path, name: str, pause: float = 0.05, more: str = "", steps: int = STEPS) -> str:
    """The example's job: two servers, two trainers."""
    python = json.dumps(sys.executable)
    return f"""
name: {name}
working_dir: {EXAMPLE}
checkpoint_dir: {work / name}
env: {{STEPS: "{steps}", PAUSE: "{pause}"}}
completes: trainer
grace: 5s
roles:
  pserver: {{command: [{python}, server.py], replicas: 2, workers_per_node: 1, gpus_per_worker: 0,
    ready: {{port: true}}}}
  trainer: {{command: [{python}, trainer.py], nodes: 2, after: pserver, workers_per_node: 1, gpus_per_worker: 0}}
{more}"""


def pids(cluster: Cluster, job: str) -> dict[str, int]:
    """Place to the pid of its worker, of those that run."""
    pods = cluster.job(job)["pods"]
    return {w["place"]: w["pid"] for p in pods for w in p["workers"] if w["state"] == "running"}


def newest(work: Path, job: str) -> int:
    """The last step that a server has saved."""
    return max((int(path.stem) for path in (work / job).glob("server*/*.json")), default=0)


def result(work: Path, job: str) -> Any:
    return json.loads((work / job / "result.json").read_text())


SERVICE = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", int(os.environ["NODEAGENT_PORT"])))
print("serves", flush=True)
while not os.path.exists(f"broken{os.environ['NODEAGENT_ROLE_INDEX']}"): time.sleep(0.05)
sys.exit(9)
"""
WORK = """
import os, time
while not os.path.exists("enough"): time.sleep(0.05)
"""

CACHES = ["cache.0", "cache.1", "work.0", "work.1"]


def submit_caches(cluster: Cluster, name: str, *, job: str = "", cache: str = "", work: str = "") -> Path:
    """Submit two caches that never end by themselves, and two workers; wait until all of them run. ``job``, ``cache``
    and ``work``: further keys of the job and of its roles. Returns the folder in which a file ``enough`` lets the
    workers end, and a file ``broken<N>`` has cache N fail."""
    folder = cluster.work / name
    folder.mkdir()
    (folder / "service.py").write_text(SERVICE)
    (folder / "work.py").write_text(WORK)
    python, one = json.dumps(sys.executable), "workers_per_node: 1, gpus_per_worker: 0"
    cluster.submit(f"""
name: {name}
working_dir: {folder}
{job}
roles:
  cache: {{command: [{python}, service.py], replicas: 2, {one}, {cache}}}
  work: {{command: [{python}, work.py], nodes: 2, {one}, {work}}}
""")
    cluster.until(lambda: sorted(pids(cluster, name)) == CACHES, 60, "all places run")
    return folder
