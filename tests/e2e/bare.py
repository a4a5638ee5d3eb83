"""Agents that a test starts itself, each with a config of its own: what a local cluster cannot be, such as a store
behind sentinels, nodes with networks of their own, or an agent with another clock.

Owns their processes. They run without a supervisor: who dies stays dead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from nodeagent.ctl.where import ENV
from nodeagent.local import power
from nodeagent.local.registry import choose_ports
from nodeagent.osutil.tether import tethered
from nodeagent.trust.key import make
from tests.e2e.support import CALL_LIMIT, Cluster, home

STEPPER = Path(__file__).parent / "stepper.py"
NO_LOSS: Mapping[int, float] = defaultdict(float)
"""What a stepper's steps are checked against."""
AGENT = (sys.executable, "-m", "nodeagent.agent.main", "run", "--config")


@dataclass
class Bare(Cluster):
    """The folders lie where a local cluster's would, so that what looks into them finds them."""

    store: Mapping[str, object] = field(default_factory=dict)
    """The config's ``redis`` section."""
    ports: tuple[int, int] = (0, 0)
    _agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        """The cluster's key, one file for all its agents."""
        return self.home / "cluster.key"

    def start_agent(
        self, node: str, address: str | None = "127.0.0.1", *, interface: str | None = None, slots: int = 8,
        under: Callable[[Sequence[str]], list[str]] = list, notice: Path | None = None,
        lease: float | None = None,
    ) -> None:  # fmt: skip
        """Start a node's agent from this thread, and so in its network namespace. ``under``: makes its command
        another one, that becomes it. ``notice``: it may be taken away, and is when this file is there. ``lease``:
        seconds, where the usual ones are not the subject."""
        run, data = self.home / "local" / "run" / "b" / node, self.home / "local" / "data" / "b" / node
        for folder in (run, data / "state", data / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "cluster": self.home.name.replace("_", "-"),  # several may share one store
            "node": {"id": node, "address": address, "data_interface": interface, "cpu_slots": slots, "gpus": "none"},
            "cluster_key": str(self.key),
            "redis": dict(self.store),
            "ports": {"api": 0, "rendezvous": "{}-{}".format(*self.ports)},
            "dirs": {"run": str(run), "state": str(data / "state"), "logs": str(data / "logs")},
            "timing": {"cooldown": "5s"},
            "jobs": {"allow_root": os.geteuid() == 0},
        }
        if lease is not None:
            config["timing"] |= {"lease": f"{lease:g}s", "fence": f"{0.7 * lease:g}s", "promise": f"{lease:g}s"}
        if notice is not None:
            config["node"] |= {"spot": True, "notice": {"file": str(notice), "every": "0.5s"}}
        (data / "agent.yaml").write_text(yaml.safe_dump(config))
        marked = self.environ | {power.MARK: power.mark(self.home.name, node)}
        with (data / "agent.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                tethered(under([*AGENT, str(data / "agent.yaml")])), env=marked, cwd="/", stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    def cut(self, node: str) -> None:
        """A power cut of one node; nothing of its ``run`` folder is left."""
        power.cut(self.home.name, node)
        self._agents.pop(node).wait()
        shutil.rmtree(self.home / "local" / "run" / "b" / node)

    def ctl(
        self, *arguments: str, check: int | None = 0, limit: float = CALL_LIMIT
    ) -> subprocess.CompletedProcess[str]:
        self._choose_agent()
        return super().ctl(*arguments, check=check, limit=limit)

    def start(self, *arguments: str, to: tuple[IO[str], IO[str]] | None = None) -> subprocess.Popen[str]:
        self._choose_agent()
        return super().start(*arguments, to=to)

    def _choose_agent(self) -> None:
        self.environ[ENV] = self.socket(min(set(self._agents) - self.frozen))

    def socket(self, node: str) -> str:
        """Where its agent's API listens."""
        return str(self.home / "local" / "run" / "b" / node / "api.sock")

    def until_ready(self) -> None:
        """Until every agent has joined and sees all the others."""
        self.until(lambda: all(Path(self.socket(n)).exists() for n in self._agents), 90, "every agent listens")
        self.until(lambda: self.nodes() == dict.fromkeys(self._agents, "ready"), 60, "every node is ready")

    def at_rest(self) -> None:
        """Until every node is ready for work and no job lives: what one test leaves to the next."""
        self.until_ready()
        self.stop_jobs()

    def log(self, node: str) -> str:
        return (self.home / "local" / "data" / "b" / node / "agent.log").read_text()

    def end(self) -> None:
        """A power cut of everything."""
        power.cut(self.home.name)
        for process in self._agents.values():
            process.wait()


@contextmanager
def bare(store: Mapping[str, object]) -> Iterator[Bare]:
    """No agent yet; afterwards nothing of it is left, or the test fails."""
    with home() as (folder, environ):
        one = Bare(folder, folder / "work", environ, store=store, ports=choose_ports(()))
        make(one.key)
        try:
            yield one
        finally:
            one.end()


def stepper_job(work: Path, name: str, nodes: str) -> str:
    """A job file for one stepper per node, with a step log as the digits job has."""
    command = [sys.executable, str(STEPPER), str(work / f"{name}.steps")]
    return f"name: {name}\ncommand: {json.dumps(command)}\nnodes: {nodes}\nworkers_per_node: 1\ngrace: 1s\n"
