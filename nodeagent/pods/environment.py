"""What each worker sees of its generation: variables for torch, Paddle, MindSpore, TensorFlow, and our own.

Pure. The shim adds what only it knows: login variables, the recorded shell, env_file (whose values beat our
``DEFAULTS``), TORCHELASTIC_ERROR_FILE, NODEAGENT_SOCKET and its mark. Precedence, the later winning: recorded shell,
env_file, the job's ``env``, ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Gpu, NodeRecord
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
    endpoints = _endpoints(head, {n: nodes[n].facts.address for n in head.members})
    ranks = [common | _of_rank(member, local, endpoints) for local in range(member.workers)]
    if job.spec.role.virtual_local_rank:
        ranks = [env | _own_device(member, node, local) for local, env in enumerate(ranks)]
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
        "PADDLE_TRAINERS_NUM": size,
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
    env |= _visible(member.devices, node)
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
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "ROLE_RANK": str(rank),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "RANK_ID": str(rank),
        "DEVICE_ID": str(local * (len(member.devices) // member.workers)),
        "TF_CONFIG": json.dumps(task),
    }


def _own_device(member: Member, node: NodeRecord, local: int) -> dict[str, str]:
    """LOCAL_RANK is 0 for all, and of the node's GPUs a worker sees its own."""
    each = len(member.devices) // member.workers
    none = dict.fromkeys(_visible(member.devices, node), "")
    return {"LOCAL_RANK": "0"} | none | _visible(member.devices[local * each : (local + 1) * each], node)


def _visible(devices: Sequence[str], node: NodeRecord) -> dict[str, str]:
    """What shows a program these devices of the node alone: a variable for each vendor's."""
    known = {gpu.uuid: gpu for gpu in node.facts.gpus}
    shown: dict[str, list[str]] = {}
    for device in devices:
        if not device.startswith("cpu"):
            gpu = known.get(device) or Gpu(uuid=device, index=0)
            shown.setdefault(gpu.variable or "CUDA_VISIBLE_DEVICES", []).append(gpu.visible or device)
    return {variable: ",".join(values) for variable, values in shown.items()}


def _endpoints(head: Head, addresses: Mapping[str, str]) -> list[str]:
    """One host:port per rank: the rendezvous port plus the local rank (rank 0's is the port held for it)."""
    _, port = split_address(head.address)
    endpoints = []
    for member in head.ordered():
        host = addresses[member.node]
        host = f"[{host}]" if ":" in host else host
        endpoints += [f"{host}:{port + local}" for local in range(member.workers)]
    return endpoints


def _faulty(head: Head, nodes: Mapping[str, NodeRecord]) -> str:
    """Nodes left out, and the members' devices left out, with why: the same for every worker."""
    devices = {
        name: out
        for name in sorted(head.members)
        if (out := {gpu.uuid: gpu.why for gpu in nodes[name].facts.gpus if not gpu.healthy})
    }
    return json.dumps({"nodes": head.outside, "devices": devices})
