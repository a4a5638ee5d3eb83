"""What each worker sees of its generation: variables for torch, Paddle, MindSpore, TensorFlow, JAX, and our own.

Pure. The shim adds what only it knows: login variables, the recorded shell, env_file (whose values beat our
``DEFAULTS``), TORCHELASTIC_ERROR_FILE, NODEAGENT_SOCKET and its mark. Precedence, the later winning: recorded shell,
env_file, the job's ``env``, ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.world import Head, Member
from nodeagent.shim.checks import DEFAULTS


def worker_environments(
    job: JobRecord, head: Head, node: NodeRecord, nodes: Mapping[str, NodeRecord]
) -> tuple[dict[str, str], ...]:
    """One environment per local rank of ``node``'s pod. ``nodes``: the record of every member.

    Raises KeyError if the node is no member or a record is missing, ValueError if the head has no address yet.
    """
    member = head.members[node.id]
    faulty = _faulty(head, nodes)
    common = _defaults(member, node) | job.spec.env | _common(job, head, member, node, faulty)
    endpoints, spare = _endpoints(head, {n: nodes[n].facts.address for n in head.members})
    # Torch's store is served at the address of the rendezvous already: JAX's coordinator needs one of its own.
    common["JAX_COORDINATOR_ADDRESS"] = spare if head.store_hosted else head.address
    ranks = [common | _of_rank(member, local, endpoints) for local in range(member.workers)]
    if job.spec.role.virtual_local_rank:
        ranks = [env | _own_device(member, local) for local, env in enumerate(ranks)]
    return tuple(ranks)


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _defaults(member: Member, node: NodeRecord) -> dict[str, str]:
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
    assert set(env) <= DEFAULTS
    return env


def _common(job: JobRecord, head: Head, member: Member, node: NodeRecord, faulty: str) -> dict[str, str]:
    host, port = split_address(head.address)
    size = str(head.world_size)
    env = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(member.workers),
        "GROUP_RANK": str(member.group_rank),
        "GROUP_WORLD_SIZE": str(len(head.members)),
        "ROLE_NAME": job.spec.role.name,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job.uid,
        "TORCHELASTIC_RESTART_COUNT": str(job.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.spec.restarts.max),
        "TORCHELASTIC_USE_AGENT_STORE": str(head.store_hosted),
        "PADDLE_MASTER": head.address,
        "PADDLE_TRAINERS_NUM": size,
        "PADDLE_GLOBAL_SIZE": size,
        "PADDLE_LOCAL_SIZE": str(member.workers),
        "PADDLE_NNODES": str(len(head.members)),
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
        "NODEAGENT_GENERATION": str(head.number),
        "NODEAGENT_RESTARTS": str(job.restarts),
        "NODEAGENT_REASON": head.cause.text,
        "NODEAGENT_FAULTY": faulty,
    }
    if gpus := _gpus(member):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if job.checkpoint is not None:
        env["NODEAGENT_CHECKPOINT"] = job.checkpoint.name
    if job.spec.role.numa_binding is not None:
        env["NODEAGENT_NUMA_BINDING"] = job.spec.role.numa_binding
    if job.spec.checkpoint_dir is not None:
        env["NODEAGENT_CHECKPOINT_DIR"] = str(PurePosixPath(job.spec.working_dir, job.spec.checkpoint_dir))
    return env


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
        "RANK_ID": str(rank),
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


def _own_device(member: Member, local: int) -> dict[str, str]:
    """LOCAL_RANK is 0 for all, and of the node's GPUs a worker sees its own."""
    env = {"LOCAL_RANK": "0", "PADDLE_LOCAL_RANK": "0", "PADDLE_RANK_IN_NODE": "0"}
    if gpus := _gpus(member):
        each = len(gpus) // member.workers
        mine = gpus[local * each : (local + 1) * each]
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(mine)} | _numbers_of_gpus(range(each))
    return env


def _gpus(member: Member) -> list[str]:
    return [device for device in member.devices if not device.startswith("cpu")]


def _endpoints(head: Head, addresses: Mapping[str, str]) -> tuple[list[str], str]:
    """One host:port per rank, and one more on rank 0's node.

    They count up from the rendezvous port, at each address by itself: nodes may share one. Only rank 0's port is held.
    """
    _, first = split_address(head.address)
    taken: Counter[str] = Counter()

    def another(node: str) -> str:
        host = addresses[node]
        port = first + taken[host]
        taken[host] += 1
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    members = head.ordered()
    endpoints = [another(member.node) for member in members for _ in range(member.workers)]
    return endpoints, another(members[0].node)


def _faulty(head: Head, nodes: Mapping[str, NodeRecord]) -> str:
    """Nodes left out, and the members' devices left out, with why: the same for every worker."""
    devices = {
        name: out
        for name in sorted(head.members)
        if (out := {gpu.uuid: gpu.why for gpu in nodes[name].facts.gpus if not gpu.healthy})
    }
    return json.dumps({"nodes": head.outside, "devices": devices})
