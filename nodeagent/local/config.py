"""The configuration of a local cluster's agents: each agent's config file, and ports that no other program uses. Owns
the differences between a local node and a real one; everything else keeps the agent's defaults."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from nodeagent.local.registry import LocalCluster

ADDRESS = "127.0.0.1"
SLOTS = 64
"""Workers without a GPU that a local node runs at once."""
COOLDOWN = "5s"
"""Shorter than on a real cluster, since a person is watching."""
PORTS_EACH = 200
FIRST_PORT = 20000


def node_names(count: int, first: int = 1) -> list[str]:
    return [f"n{number}" for number in range(first, first + count)]


def write_config(cluster: LocalCluster, node: str, *, gpus: Sequence[str], slots: int) -> Path:
    """Write one node's config file and return its path."""
    layout = cluster.layout.node(node)
    config = {
        "cluster": cluster.name,
        "cluster_key": str(cluster.layout.key),
        "node": {"id": node, "address": ADDRESS, "cpu_slots": slots, "gpus": list(gpus) if gpus else "none"},
        "redis": {"url": f"unix://{cluster.layout.redis / 'redis.sock'}"},
        "api": {"listen": "off"},  # its agents reach each other through their sockets
        "ports": {"api": 0, "rendezvous": "{}-{}".format(*cluster.ports)},
        "dirs": {"run": str(layout.run), "state": str(layout.state), "logs": str(layout.logs)},
        "timing": {"cooldown": COOLDOWN},
        "jobs": {"allow_root": os.geteuid() == 0},
    }
    if not gpus:  # without GPUs there is little to watch, and every node would watch the same machine
        config["health"] = "off"
    layout.config.parent.mkdir(parents=True, exist_ok=True)
    layout.config.write_text("# written by nodeagentctl local\n" + yaml.safe_dump(config, sort_keys=False))
    return layout.config


def choose_ports(taken: Collection[tuple[int, int]]) -> tuple[int, int]:
    """A range of rendezvous ports below those that the kernel uses for outgoing connections. It is apart from the
    ranges in ``taken`` while there is room."""
    lowest = _first_ephemeral()
    starts = range(FIRST_PORT if lowest > FIRST_PORT + PORTS_EACH else 1024, lowest - PORTS_EACH, PORTS_EACH)
    free = [s for s in starts if not any(a <= s + PORTS_EACH - 1 and s <= b for a, b in taken)]
    start = random.choice(free or list(starts) or [61000])
    return start, start + PORTS_EACH - 1


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768
