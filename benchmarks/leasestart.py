"""How long a lease process takes from its start to its first grant: that long a killed one gives nobody time, beside
what its supervisor takes. On a real Redis, killed and started again with the order of before."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from nodeagent.lease.order import Server
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.store.client import connect
from tests.contract.bench import Bench
from tests.integration.lease_support import CLUSTER, LIFE, NODE, Node, order


def measure(folder: Path, trials: int) -> dict[str, Any]:
    """Seconds from exec to the first grant, and its CPU time until then, one of each per trial."""
    folder.mkdir(parents=True)
    with PrivateRedis(folder / "redis") as server:
        found = asyncio.run(_trials(server, folder, trials))
    print(f"  median {statistics.median(found['seconds']):.3f} s", flush=True)
    return found


async def _trials(server: PrivateRedis, folder: Path, trials: int) -> dict[str, Any]:
    store = connect(server.url, CLUSTER, 5.0)
    bench = Bench(store)
    await bench.join(NODE, LIFE)
    era = (await bench.beat(NODE)).era
    node = Node(folder / "run")
    node.add()
    seconds, cpu = list[float](), list[float]()
    try:
        node.give(order(Server(str(server.socket), "", 0, (), None), era=era))
        for _ in range(trials + 1):
            node.kill()
            before, began = node.grant().until, time.monotonic()
            node.start()
            _wait(node, before)
            seconds.append(time.monotonic() - began)
            cpu.append(_cpu(node))
    finally:
        node.close()
        await store.close()
    return {"seconds": seconds[1:], "cpu": cpu[1:]}  # the first one compiles modules


def _wait(node: Node, before: float) -> None:
    while node.grant().until <= before:
        time.sleep(0.0005)


def _cpu(node: Node) -> float:
    assert node.process is not None
    return int(Path(f"/proc/{node.process.pid}/schedstat").read_text().split()[0]) / 1e9
