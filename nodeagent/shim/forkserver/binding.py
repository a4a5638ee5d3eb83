"""Binding a worker to the cores near its GPU, with the meaning of torchrun's ``--numa-binding``; and which network
cards its NCCL uses then.

Runs in the worker's own process before its program, also in the job's Python (3.8 or later): standard library only. A
broken driver can block a process that reads its files, so that the shim itself must never call this.
"""

# ruff: noqa: PTH118, PTH123, PTH208 (os.path: pathlib would be one import more in each worker)
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping

VARIABLE = "NODEAGENT_NUMA_BINDING"
NEAR = "NODEAGENT_NUMA_NODES"
CARDS = "NCCL_IB_HCA"


def bind(env: MutableMapping[str, str], root: str = "/") -> None:
    """Bind this process as its environment says, and name the network cards there in it, unless the job does. What
    cannot be done is reported on stderr, and the worker runs unbound."""
    mode = env.get(VARIABLE, "")
    if not mode:
        return
    if CARDS not in env and (cards := cards_near(env.get(NEAR, ""), root)):
        env[CARDS] = "=" + ",".join(cards)  # =: mlx5_1 is not mlx5_10 as well
    try:
        cpus = cpus_near(mode, gpu_of(env), os.sched_getaffinity(0), root)
        if not cpus:
            raise ValueError("none of the cores there may be used")
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        print(f"nodeagent: this worker is not bound to cores ({mode}): {error}", file=sys.stderr, flush=True)


def gpu_of(env: Mapping[str, str]) -> str:
    """The UUID of the worker's first GPU. Raises ValueError if it has none."""
    gpus = [gpu for gpu in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not gpus:
        raise ValueError("it has no GPU")
    local, workers = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    return gpus[local * len(gpus) // workers]


def cpus_near(mode: str, gpu: str, allowed: set[int], root: str = "/") -> set[int]:
    """Those of the ``allowed`` cores that are for this GPU: all of its NUMA node (``node``) or socket (``socket``), or
    a part of the node that no other GPU has (``exclusive``: whole physical cores; ``core-complex``: cores that share
    their largest cache, as far as there are enough of these).

    Raises OSError where the system does not tell, ValueError where it cannot be done.
    """
    nodes = {uuid: _node_of(bus, root) for uuid, bus in _buses(root)}
    if gpu not in nodes:
        raise ValueError(f"the driver does not list {gpu}")
    node = nodes[gpu]
    cpus = _cpus_of(node, root) & allowed
    if mode == "node" or not cpus:
        return cpus
    if mode == "socket":
        return {cpu for cpu in allowed if _socket_of(cpu, root) == _socket_of(min(cpus), root)}
    there = [uuid for uuid, other in nodes.items() if other == node]
    at = there.index(gpu)
    if mode == "core-complex":
        complexes = sorted(_groups(cpus, _cache_of, root), key=lambda group: (-len(group), min(group)))
        return complexes[at % len(complexes)]
    cores = sorted(_groups(cpus, _core_of, root), key=min)
    each, more = divmod(len(cores), len(there))
    if not each:
        raise ValueError(f"its NUMA node has {len(cores)} cores and {len(there)} GPUs")
    first = at * each + min(at, more)
    return set().union(*cores[first : first + each + (at < more)])


def cards_near(nodes: str, root: str = "/") -> list[str]:
    """InfiniBand and RoCE devices of these NUMA nodes (``0,1``) with a port that is up. None if there are no such ones,
    or no others: then NCCL's own choice is as good. Nor where the kernel does not tell."""
    folder = os.path.join(root, "sys/class/infiniband")
    try:
        up = [card for card in os.listdir(folder) if _is_up(os.path.join(folder, card, "ports"))]
        at = {card: max(0, int(_read(os.path.join(folder, card, "device/numa_node")))) for card in up}
        near = sorted(card for card, node in at.items() if node in numbers(nodes))
    except (OSError, ValueError):
        return []
    return near if len(near) < len(at) else []


def _is_up(ports: str) -> bool:
    return any("ACTIVE" in _read(os.path.join(ports, port, "state")) for port in os.listdir(ports))


def _buses(root: str) -> list[tuple[str, str]]:
    """(UUID, PCI address) of each of the driver's GPUs, by address."""
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    found = []
    for bus in sorted(os.listdir(folder)):
        for line in _read(os.path.join(folder, bus, "information")).splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "GPU UUID":
                found.append((value.strip(), bus))
    return found


def _node_of(bus: str, root: str) -> int:
    """-1, where the machine has one NUMA node, is node 0."""
    return max(0, int(_read(os.path.join(root, "sys/bus/pci/devices", bus.lower(), "numa_node"))))


def _cpus_of(node: int, root: str) -> set[int]:
    return numbers(_read(os.path.join(root, f"sys/devices/system/node/node{node}/cpulist")))


def _socket_of(cpu: int, root: str) -> int:
    return int(_read(os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")))


def _core_of(cpu: int, root: str) -> int:
    return min(numbers(_read(os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))))


def _cache_of(cpu: int, root: str) -> int:
    """The least of the cores that share its largest cache."""
    folder = os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/cache")
    level, shared = 0, {cpu}
    for entry in os.listdir(folder):
        path = os.path.join(folder, entry)
        if not entry.startswith("index") or _read(os.path.join(path, "type")).strip() not in ("Unified", "Data"):
            continue
        found = int(_read(os.path.join(path, "level")))
        if found > level:
            level, shared = found, numbers(_read(os.path.join(path, "shared_cpu_list")))
    return min(shared)


def _groups(cpus: set[int], key: Callable[[int, str], int], root: str) -> list[set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu, root), set()).add(cpu)
    return list(groups.values())


def numbers(text: str) -> set[int]:
    """``0-2,4``: 0, 1, 2 and 4."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return found


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
