"""What each worker sees of its generation: variables for torch, Paddle, MindSpore, TensorFlow, JAX, and our own.

In a job of several roles each role is a world of its own: ranks, sizes and rendezvous count within the role.

Pure. The shim adds what only it knows: login variables, the recorded shell, env_file (whose values beat our
``DEFAULTS``), TORCHELASTIC_ERROR_FILE, NODEAGENT_SOCKET and its mark. Precedence, the later winning: recorded shell,
env_file, the job's ``env``, ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from nodeagent.model.base import PORT_MAX
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.node import Gpu, NodeRecord
from nodeagent.model.world import Generation, Member, Place
from nodeagent.shim.environment import DEFAULTS

PSERVER = "pserver"
"""The role whose workers are Paddle's parameter servers."""
TRAINER = "trainer"
"""Beside parameter servers: the role whose workers are Paddle's trainers. A job without it: the role that completes it,
else the first that is no parameter server."""

SCHEDULER = "scheduler"
"""The role whose worker is MindSpore's scheduler."""
MOST_VALUE = 24 << 10
"""The most characters of a variable that we set; a longer one is left out. Lists of all ranks grow with the job, and
Linux starts no program with one of 128 KiB. So short that a fork server (``MOST_REPORTED``) takes all of them."""


def worker_environments(
    job: JobRecord, generation: Generation, node: NodeRecord, nodes: Mapping[str, NodeRecord]
) -> tuple[dict[str, str], ...]:
    """One environment per local rank of ``node``'s pod. ``nodes``: the record of every member.

    Raises KeyError if the node is no member or a record is missing, ValueError if the generation has no address yet.
    """
    theirs = {*job.spec.env, *(name for role in job.spec.roles for name in role.env)}
    return tuple(
        {name: value for name, value in env.items() if len(value) <= MOST_VALUE or name in theirs}
        for env in _environments(job, generation, node, nodes)
    )


def _environments(
    job: JobRecord, generation: Generation, node: NodeRecord, nodes: Mapping[str, NodeRecord]
) -> list[dict[str, str]]:
    addresses = {n: nodes[n].facts.address for n in generation.members}
    faulty = _faulty(generation, nodes)
    member = generation.members[node.id]
    if job.spec.several:
        worlds = _worlds(job, generation, addresses)
        gang = _of_gang(worlds)
        served = _of_trainers(job, worlds)
        scheduled = _of_scheduled(job, worlds)
        out: list[dict[str, str]] = []
        for place in member.places:
            world = worlds[place.role]
            out += [
                env
                | gang
                | _of_place(worlds, place, local)
                | (served if place.role == PSERVER else scheduled if place.role == SCHEDULER else {})
                for local, env in enumerate(_of_world(job, generation, world, world.members[place.index], node, faulty))
            ]
        return out
    endpoints, spare = _endpoints(generation, addresses)
    # Torch's store is served at the address of the rendezvous already: JAX's coordinator needs one of its own.
    coordinator = spare if generation.store_hosted else generation.address
    world = _World(
        job.spec.role, generation.ordered(), generation.address, generation.store_hosted, coordinator, endpoints
    )
    return _of_world(job, generation, world, member, node, faulty)


def roles_file(generation: Generation, addresses: Mapping[str, str]) -> str:
    """What NODEAGENT_ROLES_FILE of a job of several roles holds: where each place of each role is. ``addresses``: of
    every member."""
    roles: dict[str, list[dict[str, object]]] = {}
    for place, member, ports in _placed(generation):
        host, port = addresses[member.node], ports[0]
        roles.setdefault(place.role, []).append(
            {"index": place.index, "node": member.node, "host": host, "port": port, "address": joined(host, port)}
        )
    return json.dumps(roles, indent=1)


@dataclass(frozen=True, slots=True)
class _World:
    """Workers that count their ranks together: those of a job, or of one of its roles."""

    role: Role
    members: Sequence[Member]
    """By group rank; of a role its places, each as if it were alone on its node."""
    address: str
    store_hosted: bool
    coordinator: str
    """Where rank 0 serves JAX's."""
    endpoints: list[str]
    """One ``host:port`` for each rank."""

    @property
    def size(self) -> int:
        return sum(member.workers for member in self.members)

    @property
    def hosts(self) -> str:
        """Of the members, in their order, as Paddle's lists them."""
        return ",".join(split_address(self.endpoints[member.first_rank])[0] for member in self.members)


def _placed(generation: Generation) -> list[tuple[Place, Member, tuple[int, ...]]]:
    """Every place with its member and its ports, by role and index."""
    found: list[tuple[Place, Member, tuple[int, ...]]] = []
    for member in generation.ordered():
        ports = generation.ports[member.node]
        for place in member.places:
            found.append((place, member, ports[: place.ports]))
            ports = ports[place.ports :]
    return sorted(found, key=lambda one: (one[0].role, one[0].index))


def _worlds(job: JobRecord, generation: Generation, addresses: Mapping[str, str]) -> dict[str, _World]:
    """Each role's, in the job file's order."""
    placed = _placed(generation)
    worlds = {}
    for role in job.spec.roles:
        members: list[Member] = []
        endpoints: list[str] = []
        master = ""
        for place, member, ports in placed:
            if place.role == role.name:
                host = addresses[member.node]
                if place.index == 0:
                    master = joined(host, ports[-1])
                changes = {"group_rank": place.index, "first_rank": len(endpoints), "workers": place.workers}
                members.append(member.model_copy(update=changes | {"devices": place.devices, "places": ()}))
                endpoints += [joined(host, port) for port in ports[: place.workers]]
        worlds[role.name] = _World(role, members, master, False, master, endpoints)
    return worlds


def _of_world(
    job: JobRecord, generation: Generation, world: _World, member: Member, node: NodeRecord, faulty: str
) -> list[dict[str, str]]:
    """One environment for each of the member's workers."""
    own = job.spec.env | world.role.env
    common = _defaults(job.spec, member, node) | own | _common(job, generation, world, member, node, faulty)
    ranks = [common | _of_rank(member, local, world.endpoints) for local in range(member.workers)]
    if world.role.virtual_local_rank:
        ranks = [env | _own_device(member, node, local) for local, env in enumerate(ranks)]
    return ranks


def _of_gang(worlds: Mapping[str, _World]) -> dict[str, str]:
    """What every worker of a job of several roles knows of all roles."""
    env = {}
    for name, world in worlds.items():
        firsts = [world.endpoints[member.first_rank] for member in world.members]
        env[f"NODEAGENT_HOSTS_{name.upper().replace('-', '_')}"] = ",".join(firsts)
    if PSERVER in worlds:
        servers = worlds[PSERVER]
        env |= {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers.endpoints),
            "PADDLE_GLOO_HTTP_ENDPOINT": servers.address,  # the first server serves there what trainers meet at
        }
    if SCHEDULER in worlds:
        host, port = split_address(worlds[SCHEDULER].endpoints[0])
        env |= {"MS_SCHED_HOST": host, "MS_SCHED_PORT": str(port)}
    return env


def _of_scheduled(job: JobRecord, worlds: Mapping[str, _World]) -> dict[str, str]:
    """What MindSpore's scheduler sees of the workers that it waits for: it is none of them."""
    names = [name for name in worlds if name != SCHEDULER]
    workers = worlds[job.spec.completes if job.spec.completes in names else names[0]]
    return {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": str(workers.size), "RANK_SIZE": str(workers.size)}


def _of_trainers(job: JobRecord, worlds: Mapping[str, _World]) -> dict[str, str]:
    """What Paddle's parameter servers see of the trainers that they serve: its fleet counts these, not servers."""
    names = [name for name in worlds if name != PSERVER]
    trainers = worlds[next(name for name in (TRAINER, job.spec.completes, *names) if name in names)]
    return {
        "PADDLE_TRAINERS_NUM": str(trainers.size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(trainers.endpoints),
        "DISTRIBUTED_TRAINER_ENDPOINTS": ",".join(trainers.endpoints),
        "PADDLE_TRAINERS": trainers.hosts,
        "PADDLE_GLOBAL_SIZE": str(trainers.size),
        "PADDLE_NNODES": str(len(trainers.members)),
    }


def _of_place(worlds: Mapping[str, _World], place: Place, local: int) -> dict[str, str]:
    """What one worker knows of its place. ``local``: its number there."""
    world = worlds[place.role]
    rank = world.members[place.index].first_rank + local
    cluster = {name: other.endpoints for name, other in worlds.items()}
    port = split_address(world.endpoints[rank])[1]
    env = {
        "NODEAGENT_ROLE": place.role,
        "NODEAGENT_ROLE_INDEX": str(place.index),
        "NODEAGENT_PORT": str(port),
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": place.role, "index": rank}}),
    }
    if PSERVER in worlds:  # its fleet asks trainers for their port, too
        role = "PSERVER" if place.role == PSERVER else "TRAINER"
        env |= {"TRAINING_ROLE": role, "PADDLE_ROLE": role, "PADDLE_PORT": str(port)}
    return env


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_address(text: str) -> bool:
    """Whether ``split_address`` reads it, ``joined`` would write it so, and there is such a port."""
    try:
        host, port = split_address(text)
    except ValueError:
        return False
    return 1 <= port <= PORT_MAX and host.isprintable() and " " not in host and text == joined(host, port)


def joined(host: str, port: int) -> str:
    """``host:port``, as ``split_address`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _defaults(spec: JobSpec, member: Member, node: NodeRecord) -> dict[str, str]:
    """What gives way to the job's own values."""
    env = {
        "RES_OPTIONS": "timeout:1 attempts:1",  # a silent resolver costs TCPStore 1 s instead of 10 s
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
        "PYTHONUNBUFFERED": "1",  # as torchrun's -u: output comes at once, and a kill loses none
    }
    if member.workers > 1:
        env["OMP_NUM_THREADS"] = "1"
    if node.facts.data_interface:
        env |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), node.facts.data_interface)
    elif node.facts.gloo_interface:
        env["GLOO_SOCKET_IFNAME"] = node.facts.gloo_interface
    if not _gpus(member):
        env["PADDLE_DISTRI_BACKEND"] = "gloo"  # as Paddle's launcher: without it a CPU build finds no backend
    if not spec.several:
        env |= _elastic(spec)
    elif any(role.name == PSERVER for role in spec.roles):  # as Paddle's launcher, so that trainers wait for each other
        env |= {"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_RENDEZVOUS": "3"}
    assert set(env) <= DEFAULTS
    return env


def _elastic(spec: JobSpec) -> dict[str, str]:
    """What Paddle's elastic launcher needs in its environment, and its workers inherit."""
    least, most = spec.nodes.min, spec.nodes.max
    return {
        "PADDLE_ELASTIC_JOB_ID": spec.name,
        "PADDLE_ELASTIC_NP": str(least) if least == most else f"{least}:{most}",
        "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "1" if least == most else "2",  # Paddle's own spelling
    }


def _common(
    job: JobRecord, generation: Generation, world: _World, member: Member, node: NodeRecord, faulty: str
) -> dict[str, str]:
    host, port = split_address(world.address)
    size = str(world.size)
    env = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(member.workers),
        "GROUP_RANK": str(member.group_rank),
        "GROUP_WORLD_SIZE": str(len(world.members)),
        "ROLE_NAME": world.role.name,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job.uid,
        "TORCHELASTIC_RESTART_COUNT": str(job.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.spec.restarts.max),
        "TORCHELASTIC_USE_AGENT_STORE": str(world.store_hosted),
        "JAX_COORDINATOR_ADDRESS": world.coordinator,
        "PADDLE_MASTER": world.address,
        "PADDLE_TRAINERS_NUM": size,
        "PADDLE_GLOBAL_SIZE": size,
        "PADDLE_LOCAL_SIZE": str(member.workers),
        "PADDLE_NNODES": str(len(world.members)),
        "PADDLE_TRAINERS": world.hosts,
        "PADDLE_PSERVERS_IP_PORT_LIST": "",
        "TRAINING_ROLE": "TRAINER",
        "POD_IP": node.facts.address,
        "RANK_SIZE": size,
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": size,
        "MS_SCHED_HOST": host,
        "MS_SCHED_PORT": str(port),
        "NODEAGENT_JOB": job.name,
        "NODEAGENT_NODE": node.id,
        "NODEAGENT_GENERATION": str(generation.number),
        "NODEAGENT_RESTARTS": str(job.restarts),
        "NODEAGENT_REASON": generation.cause.text,
        "NODEAGENT_FAULTY": faulty,
    }
    env |= _visible(member.devices, node)
    if (seconds := job.time_left(generation.since)) is not None:
        env["NODEAGENT_TIME_LEFT"] = f"{seconds:g}"
    if (array := job.spec.array) is not None:
        env |= {
            "NODEAGENT_ARRAY": array.name,
            "NODEAGENT_ARRAY_INDEX": str(array.index),
            "NODEAGENT_ARRAY_COUNT": str(array.count),
            "NODEAGENT_ARRAY_MIN": str(array.first),
            "NODEAGENT_ARRAY_MAX": str(array.last),
        }
    if job.checkpoint is not None:
        env["NODEAGENT_CHECKPOINT"] = job.checkpoint.name
    if world.role.numa_binding is not None:
        env["NODEAGENT_NUMA_BINDING"] = world.role.numa_binding
        if near := _numa_nodes(generation.members[node.id], node):
            env["NODEAGENT_NUMA_NODES"] = near
    if job.spec.checkpoint_dir is not None:
        env["NODEAGENT_CHECKPOINT_DIR"] = str(PurePosixPath(job.spec.working_dir, job.spec.checkpoint_dir))
    return env


def _numa_nodes(member: Member, node: NodeRecord) -> str:
    """Of all GPUs that the job has on a node, so that all its workers there use the same network cards; empty if one of
    them is not known."""
    known = {gpu.uuid: gpu.numa for gpu in node.facts.gpus}
    found = {known.get(device) for device in _gpus(member)}
    return ",".join(str(numa) for numa in sorted(n for n in found if n is not None)) if None not in found else ""


def _of_rank(member: Member, local: int, endpoints: list[str]) -> dict[str, str]:
    rank = member.first_rank + local
    task = {"cluster": {"worker": endpoints}, "task": {"type": "worker", "index": rank}}
    each = len(member.devices) // member.workers
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "ROLE_RANK": str(rank),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_LOCAL_RANK": str(local),
        "PADDLE_RANK_IN_NODE": str(local),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "DISTRIBUTED_TRAINER_ENDPOINTS": ",".join(endpoints),
        "RANK_ID": str(rank),
        "MS_NODE_ID": str(rank),
        "DEVICE_ID": str(local * each),
        "TF_CONFIG": json.dumps(task),
    }
    if _gpus(member):
        env |= _numbers_of_gpus(range(local * each, (local + 1) * each))
    return env


def _numbers_of_gpus(mine: range) -> dict[str, str]:
    """A worker's GPUs, counted within CUDA_VISIBLE_DEVICES, for frameworks that do not look at LOCAL_RANK."""
    numbers = ",".join(map(str, mine))
    return {"FLAGS_selected_gpus": numbers, "JAX_LOCAL_DEVICE_IDS": numbers}


def _own_device(member: Member, node: NodeRecord, local: int) -> dict[str, str]:
    """LOCAL_RANK is 0 for all, and of the node's GPUs a worker sees its own."""
    each = len(member.devices) // member.workers
    none = dict.fromkeys(_visible(member.devices, node), "")
    mine = _visible(member.devices[local * each : (local + 1) * each], node)
    env = {"LOCAL_RANK": "0", "PADDLE_LOCAL_RANK": "0", "PADDLE_RANK_IN_NODE": "0"} | none | mine
    return env | (_numbers_of_gpus(range(each)) if mine else {})


def _gpus(member: Member) -> list[str]:
    return [device for device in member.devices if not device.startswith("cpu")]


def _visible(devices: Sequence[str], node: NodeRecord) -> dict[str, str]:
    """What shows a program these devices of the node alone: a variable for each vendor's."""
    known = {gpu.uuid: gpu for gpu in node.facts.gpus}
    shown: dict[str, list[str]] = {}
    for device in devices:
        if not device.startswith("cpu"):
            gpu = known.get(device) or Gpu(uuid=device, index=0)
            shown.setdefault(gpu.variable or "CUDA_VISIBLE_DEVICES", []).append(gpu.visible or device)
    return {variable: ",".join(values) for variable, values in shown.items()}


def _endpoints(generation: Generation, addresses: Mapping[str, str]) -> tuple[list[str], str]:
    """One host:port per rank, and one more on rank 0's node.

    They count up from the rendezvous port, at each address by itself: nodes may share one. Only rank 0's port is held.
    """
    _, first = split_address(generation.address)
    taken: Counter[str] = Counter()

    def another(node: str) -> str:
        host = addresses[node]
        port = first + taken[host]
        taken[host] += 1
        return joined(host, port)

    members = generation.ordered()
    endpoints = [another(member.node) for member in members for _ in range(member.workers)]
    return endpoints, another(members[0].node)


def _faulty(generation: Generation, nodes: Mapping[str, NodeRecord]) -> str:
    """Nodes left out, and the members' devices left out, with why: the same for every worker."""
    devices = {
        name: out
        for name in sorted(generation.members)
        if (out := {gpu.uuid: gpu.why for gpu in nodes[name].facts.gpus if not gpu.healthy})
    }
    return json.dumps({"nodes": generation.outside, "devices": devices})
