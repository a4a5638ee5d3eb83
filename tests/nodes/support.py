"""A cluster of nodes as an administrator has it: the product installed from wheels, its unit, a Redis on a machine of
its own; and a training with gloo across them.

Owns the installation and the questions to it; what a test does to the nodes is the test's own.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nodeagent.ctl.client import Client, job_path, node_path
from tests.e2e.support import ENDED, digits_job, read_steps
from tests.nodes import image
from tests.nodes.lab import SHARED, Lab, lab
from tests.nodes.node import Node, wait_for

CTL = f"{image.VENV}/bin/nodeagentctl"
STORE = "store"
PASSWORD = "only-in-tests"
UNITS = Path("/etc/systemd/system")
POD_UNITS = "nodeagent-pod-*.service"
READY_LIMIT = 120.0
TRAINS_LIMIT = 180.0
"""Seconds: three nodes on two cores import torch."""
REDIS_CONF = f"""bind 0.0.0.0
port 6379
requirepass {PASSWORD}
masterauth {PASSWORD}
appendonly yes
maxmemory-policy noeviction
dir /var/lib/redis
daemonize no
supervised systemd
"""

SERVICE = "gpus"
WATCHED = "min-replicas-to-write 1\nmin-replicas-max-lag 2\n"
SENTINEL_CONF = f"""bind 0.0.0.0
protected-mode no
port 26379
dir /var/lib/redis
supervised systemd
sentinel monitor {SERVICE} {{first}} 6379 2
sentinel auth-pass {SERVICE} {PASSWORD}
sentinel down-after-milliseconds {SERVICE} 3000
sentinel failover-timeout {SERVICE} 6000
"""
"""As docs/config.md asks for: max lag + 1 + fence < down-after + lease."""


class Site:
    """See above. Made by ``site()``."""

    def __init__(self, one: Lab, url: str) -> None:
        self.lab, self.url = one, url
        self.key = secrets.token_hex(32)
        self.unasked: set[str] = set()
        """Nodes whose agents are not asked: they are cut off and know nothing new, or hang."""
        self.wheel = image.build_wheel(one.folder)

    @property
    def python_path(self) -> str:
        """PATH with the Python that has torch in front."""
        return f"{sys.prefix}/bin:/usr/bin:/bin"

    # --- installation

    def install(self, *names: str) -> None:
        """On nodes that are up, as an administrator does, all at once; returns when all are ready."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._install, [self.lab.nodes[name] for name in names]))
        self.until_nodes("ready", *names)

    def _install(self, node: Node) -> None:
        self.put_wheel(node, self.wheel)
        repository = image.ROOT / "systemd"
        for unit in ("nodeagent.service", "nodeagent.slice"):
            node.write(str(UNITS / unit), (repository / unit).read_text())
        for kind in ("sysusers", "tmpfiles"):
            node.write(f"/etc/{kind}.d/nodeagent.conf", (repository / f"nodeagent.{kind}.conf").read_text())
        node.run("systemd-sysusers")
        node.write("/etc/nodeagent/cluster.key", self.key + "\n", 0o600)
        node.write("/etc/nodeagent/nodeagent.yaml", self.config(node), 0o600)
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "enable", "--now", "--no-block", "nodeagent")

    def put_wheel(self, node: Node, wheel: Path) -> None:
        """What an upgrade replaces."""
        there = f"/root/{wheel.name}"
        shutil.copy(wheel, node.here(there))
        pip = [f"{image.VENV}/bin/python", "-m", "pip", "install", "--no-index", "--no-deps", "--no-cache-dir"]
        node.run(*pip, "--quiet", "--root-user-action=ignore", "--force-reinstall", there)

    def config(self, node: Node, more: str = "") -> str:
        return (
            f"redis: {{url: {json.dumps(self.url)}}}\nlog: {{level: debug}}\n"
            f"node: {{address: {node.address}, data_interface: eth0, cpu_slots: 2, gpus: none}}\n"
            f"jobs: {{operators: nodeagent-operators}}\n{more}"
        )

    # --- questions

    def _agents(self) -> list[Node]:
        """The nodes that have one."""
        return [node for node in self.lab.nodes.values() if not node.name.startswith(STORE)]

    def ask(self, path: str) -> Any:
        """What the API says, asked of the first agents that are up; as root of their node."""
        up = [node for node in self._agents() if node.is_up and not node.is_frozen and node.name not in self.unasked]
        sockets = [str(node.here("/run/nodeagent/api.sock")) for node in up]
        return Client(sockets, patience=READY_LIMIT).get(path)

    def job(self, name: str) -> dict[str, Any]:
        job: dict[str, Any] = self.ask(job_path(name))
        return job

    def node(self, name: str) -> dict[str, Any]:
        node: dict[str, Any] = self.ask(node_path(name))
        return node

    def states(self) -> dict[str, str]:
        return {n["name"]: n["state"] for n in self.ask("/v1/nodes")["items"]}

    def steps(self, job: str) -> list[dict[str, Any]]:
        return read_steps(self.lab.shared, job)

    def ctl(self, node: str, *words: str, user: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.lab.nodes[node].run(CTL, *words, user=user, check=check, limit=120.0)

    def pod_units(self, node: str) -> list[str]:
        """The shims' services that run there."""
        words = ["--plain", "--no-legend", "--state=active", POD_UNITS]
        lines = self.lab.nodes[node].run("systemctl", "list-units", *words).stdout.splitlines()
        return sorted(line.split()[0] for line in lines)

    # --- training

    def train(self, name: str, *, nodes: str, steps: int, delay: float = 0.1, at: str = "n1", more: str = "",
              options: Sequence[str] = ()) -> None:  # fmt: skip
        """Submit the digits example, one worker per node; a checkpoint each 5 steps, its log in the shared folder."""
        more = f"working_dir: {SHARED}\nenv: {{PYTHONPATH: {image.ROOT}}}\n{more}"
        text = digits_job(SHARED, name, nodes=nodes, steps=steps, delay=delay, workers=1, more=more, options=options)
        self.lab.nodes[at].write(f"/shared/{name}.yaml", text)
        self.ctl(at, "submit", f"/shared/{name}.yaml", user="train")

    def until_running(self, job: str, nodes: int, limit: float = TRAINS_LIMIT, above: int = 0) -> dict[str, Any]:
        """Until it runs whole on so many nodes, in a generation above ``above``."""

        def whole() -> bool:
            now = self.job(job)
            if now["phase"] in ENDED:
                raise AssertionError(f"{job} ended: {now['phase']}: {now['reason']}\n{self.story()}")
            pods = [p for p in now["pods"] if p["generation"] == now["generation"]]
            running = {p["node"] for p in pods if any(w["state"] == "running" for w in p["workers"])}
            return now["phase"] == "running" and now["generation"] > above and len(running) == nodes

        wait_for(whole, limit, f"{job} runs on {nodes} nodes in a generation above {above}", self.story)
        return self.job(job)

    def until_phase(self, job: str, phase: str, limit: float = 90.0) -> dict[str, Any]:
        def so() -> bool:
            now = self.job(job)
            if now["phase"] in ENDED and now["phase"] != phase:
                raise AssertionError(f"{job} ended: {now['phase']}: {now['reason']}\n{self.story()}")
            return bool(now["phase"] == phase)

        wait_for(so, limit, f"{job} is {phase}", self.story)
        return self.job(job)

    def until_steps(self, job: str, count: int = 10, limit: float = TRAINS_LIMIT) -> None:
        """Until it has made so many more steps than now."""
        before, world = len(self.steps(job)), self.job(job)["world_size"]
        wait_for(
            lambda: len(self.steps(job)) >= before + count * world, limit, f"{job} makes {count} steps", self.story
        )

    def until_nodes(self, state: str, *names: str, limit: float = READY_LIMIT) -> float:
        def so() -> bool:
            now = self.states()
            return all(now.get(name) == state for name in names)

        return self.until(so, limit, f"{', '.join(names)}: {state}")

    def until(self, holds: Callable[[], bool], limit: float, what: str) -> float:
        return wait_for(holds, limit, what, self.story)

    def at_rest(self) -> None:
        """Every node up and ready, and no job lives: what one test leaves to the next."""
        self.unasked.clear()
        for node in self.lab.nodes.values():
            if node.is_frozen:
                node.thaw()
            self.lab.net.plug(node.name)
        self.lab.boot()
        names = [node.name for node in self._agents()]
        for name in names:
            self.lab.nodes[name].run("systemctl", "start", "--no-block", "nodeagent")
        self.until_nodes("ready", *names)
        for job in self.ask("/v1/jobs")["items"]:
            if job["phase"] not in ENDED:
                self.ctl(names[0], "stop", job["name"])

    def story(self) -> str:
        """What a person would look at when something hangs."""
        out: list[str] = []
        for node in self._agents():
            if node.is_up and node.name not in self.unasked and not node.is_frozen:
                if not out:
                    for words in (["get"], ["nodes"], ["events", "--limit", "30"], ["describe"], ["doctor"]):
                        done = self.ctl(node.name, *words, check=False)
                        out.append(f"$ nodeagentctl {' '.join(words)}\n{done.stdout}{done.stderr}")
                lines = [line for line in node.journal(lines=2000).splitlines() if '"level": "debug"' not in line]
                out.append("\n".join([f"--- {node.name}", *lines[-20:]]))
        return "\n".join(out)


def redis_on(node: Node, more: str = "") -> str:
    """Start a server on this node, for all; its URL."""
    node.write("/etc/redis/redis.conf", REDIS_CONF + more)
    node.run("systemctl", "enable", "--now", "redis-server")
    return f"redis://:{PASSWORD}@{node.address}:6379/0"


def sentinels_on(nodes: Sequence[Node]) -> str:
    """A primary on the first of these nodes, replicas on the others, a sentinel on each; their URL."""
    first = nodes[0].address
    for node in nodes:
        replica = f"replicaof {first} 6379\n" if node is not nodes[0] else ""
        node.write("/etc/redis/redis.conf", REDIS_CONF + WATCHED + replica)
        node.write("/etc/redis/sentinel.conf", SENTINEL_CONF.format(first=first))
        node.run("chown", "redis:redis", "/etc/redis/redis.conf", "/etc/redis/sentinel.conf")
        node.run("systemctl", "enable", "--now", "redis-server", "redis-sentinel")
    hosts = ",".join(f"{node.address}:26379" for node in nodes)
    return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}/0"


@contextmanager
def site(nodes: int, stores: int = 1) -> Iterator[Site]:
    """So many nodes, n1 to nN, with an agent each; beside them a Redis on a host of its own, or more with sentinels."""
    with lab() as one:
        hosts = [one.add(f"{STORE}{number or ''}", []) for number in range(stores)]
        names = [one.add(f"n{number}").name for number in range(1, nodes + 1)]
        one.boot()
        place = Site(one, redis_on(hosts[0]) if stores == 1 else sentinels_on(hosts))
        place.install(*names)
        yield place
