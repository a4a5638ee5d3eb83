"""A training under nodeagent: a private local cluster and one job, driven through ``nodeagentctl`` as a person would.

Owns the cluster and the job file. The faults go to the cluster's supervisor directly, so that the start of a command
is not counted as recovery.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from benchmarks.launcher import MAX_RESTARTS, PYTHON, LaunchError, Shape, tail
from benchmarks.steplog import POLL, NotReachedError, StepLog
from nodeagent.ctl.client import Client, job_path, node_path
from nodeagent.local import control, power
from nodeagent.local.layout import HOME_VARIABLE, LocalFolders
from nodeagent.local.registry import LocalCluster, cluster, clusters
from tests.e2e.driver import Driver

JOB = "bench"
QUEUE, OTHER_QUEUE = "bench", "others"
"""Of the job, and of who comes, where the shape has them share the cluster."""
PROBATION = "2s"
"""Of a GPU that was evicted, before it is given back for the next trial."""
CTL_TIMEOUT = 120.0
"""Seconds for any one command."""


class Ours:
    """A local cluster and, unless ``shape`` is None, a running training. Use as a context manager: leaves no
    process and no folder but the given one."""

    def __init__(
        self,
        folder: Path,
        shape: Shape | None,
        nodes: int = 2,
        environ: Mapping[str, str] | None = None,
        gpus: int = 0,
    ) -> None:
        self.shape = shape
        self.log = StepLog(folder / "steps.jsonl")
        self._nodes = nodes if shape is None else shape.nodes
        self._gpus = shape.world if shape is not None and shape.gpus else gpus
        """Of the machine, which the nodes share."""
        self.folder = folder
        self._environ = dict(environ or {})
        """The agents' own, beside this process's."""
        self.driver: Driver | None = None
        """Of the GPUs, where the training has some."""
        self._home = tempfile.TemporaryDirectory(prefix="nab-", dir="/tmp")  # short: it holds sockets
        home = Path(self._home.name)
        self._folders = LocalFolders(home / "run", home / "data")
        self._folders.run.mkdir(mode=0o700)
        self._shared: set[int] = set()
        """The supervisor and Redis."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        if self._gpus:
            self._environ |= self._give_gpus(self._gpus)
        if self.shape is not None and self.shape.shared:  # the training fills its nodes
            self._environ["NODEAGENT__NODE__CPU_SLOTS"] = str(self.shape.workers)
        try:
            self.ctl("local", "up", "--nodes", str(self._nodes))
            status = self.status()
            self._uid = self.cluster().uid
            self._shared = {status["pid"], status["redis"]["pid"]}
            if self.shape is not None:
                for queue in (QUEUE, OTHER_QUEUE) if self.shape.shared else ():
                    self.ctl("queue", "create", queue)
                file = self.folder / "job.yaml"
                file.write_text(yaml.safe_dump(job_file(self.folder, self.shape), sort_keys=False))
                self.ctl("submit", str(file))
        except BaseException:
            self._clear_away()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clear_away()

    def _give_gpus(self, count: int) -> dict[str, str]:
        """What makes the agents find a driver that is not real. Raises LaunchError."""
        self.driver = Driver(self.folder / "driver", count)
        try:
            found = self.driver.environ(self.folder / "nvml")
        except (OSError, subprocess.CalledProcessError) as error:
            raise LaunchError(
                f"the driver that is not real cannot be built, which takes a C compiler: {error}"
            ) from error
        return found | {"NODEAGENT__HEALTH__PROBATION": PROBATION}

    def ctl(self, *words: str) -> str:
        """Run ``nodeagentctl`` and return its output. Raises LaunchError."""
        done = subprocess.run(
            [PYTHON, "-c", "from nodeagent.ctl.main import main; main()", *words],
            env=power.unmarked(os.environ) | self._environ | {HOME_VARIABLE: self._home.name},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CTL_TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise LaunchError(f"nodeagentctl {' '.join(words)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> set[int]:
        return power.processes(self._uid) | self._shared

    def job(self, name: str = JOB) -> dict[str, Any]:
        """The job as ``get -o json`` shows it."""
        return self._client().get(job_path(name))

    def slots(self, node: str) -> int:
        """How many workers without a GPU fit on a node that is idle."""
        return int(self._client().get(node_path(node))["cpu_slots"])

    def change(self, path: str, **body: Any) -> None:
        """Ask an agent for a change, as the tool does."""
        self._client().change("POST", path, **body)

    def until_phase(self, phase: str, bound: float, name: str = JOB) -> None:
        """Raises NotReachedError."""
        until = time.monotonic() + bound
        while (now := self.job(name)["phase"]) != phase:
            if time.monotonic() > until:
                raise NotReachedError(f"job {name} is {now}, not {phase}, after {bound:g} s")
            time.sleep(POLL)

    def node_of(self, rank: int) -> str:
        """Where this rank of the newest gang runs."""
        job = self.job()
        return next(
            str(pod["node"])
            for pod in job["pods"]
            if pod["generation"] == job["generation"] and rank in [worker["rank"] for worker in pod["workers"]]
        )

    def stacks(self) -> int:
        """Files of workers' stacks, of all generations."""
        nodes = self.cluster()
        return sum(1 for n in nodes.nodes() for _ in nodes.layout.node(n).logs.glob("*/stacks/g*-rank*.txt"))

    def _client(self) -> Client:
        sockets = [node["socket"] for node in self.status()["nodes"] if node["power"] == "on"]
        return Client(sockets, patience=CTL_TIMEOUT)

    def status(self) -> dict[str, Any]:
        """The supervisor's status: nodes, agents, Redis."""
        return control.ask(self.cluster().layout.control, {"do": "status"})

    def cluster(self) -> LocalCluster:
        return cluster(self._folders)

    def check(self) -> None:
        if self.shape is not None and (job := self.job())["phase"] in ("succeeded", "failed", "stopped"):
            raise LaunchError(f"the job {job['phase']}: {job['reason']}\n{self.evidence()}")

    def evidence(self) -> str:
        nodes = self.cluster()
        reported = "\n".join(f"{node}:\n{tail(nodes.layout.node(node).agent_log)}" for node in nodes.nodes())
        try:
            return f"{self.ctl('describe', JOB)}\n{reported}"
        except LaunchError as error:
            return f"{error}\n{reported}"

    def killable(self) -> list[str]:
        return [node["name"] for node in self.status()["nodes"] if node["power"] == "on"]

    def kill_node(self, node: str) -> float:
        at = time.monotonic()
        control.ask(self.cluster().layout.control, {"do": "kill", "node": node})
        return at

    def start_node(self, node: str) -> None:
        there = [known["name"] for known in self.status()["nodes"]]
        request: dict[str, object] = {"do": "start", "node": node} if node in there else {"do": "add"}
        control.ask(self.cluster().layout.control, request)

    def next_node(self) -> str:
        """The name of a node that was never there: one that was lost soon after it had joined is not taken again at
        once (``plan/nodes/setbacks.py``)."""
        return f"n{len(self.status()['nodes']) + 1}"

    def _clear_away(self) -> None:
        try:
            if clusters(self._folders):
                self.ctl("local", "down")
        finally:
            self._home.cleanup()


def job_file(folder: Path, shape: Shape) -> dict[str, Any]:
    """The job that runs the same script as torchrun does, with as little patience between restarts."""
    hang = {} if shape.hang is None else {"hang": {"progress": f"{shape.hang:g}s"}}
    span = shape.least if shape.least == shape.most else f"{shape.least}:{shape.most}"
    return {
        "name": JOB,
        "command": [PYTHON, *shape.command(folder)],
        "nodes": {"min": shape.least, "max": shape.most, "target": "auto"} if shape.auto else span,
        "workers_per_node": "gpu" if shape.gpus else shape.workers,
        **({"uneven": True} if shape.gpus else {}),
        **({"queue": QUEUE} if shape.shared else {}),
        "working_dir": str(folder),
        "preload": ["torch"],
        "restarts": {"max": MAX_RESTARTS, "backoff": "0s..0s"},
        **hang,
    }
