"""Facts about this machine: address, boot id, CPUs, GPUs. The GPU query runs in a process of its own with a
deadline, since NVML can hang."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping

from nodeagent import __version__
from nodeagent.health.driver import asked_for_gpus
from nodeagent.model.node import Gpu, NodeFacts
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.workers.linux import boot_id

GPU_DEADLINE = 5.0
"""Seconds for the GPU query; no answer means that GPUs are unknown, so none is offered."""

_GPU_QUERY = """
import json, pynvml
pynvml.nvmlInit()
out = []
for i in range(pynvml.nvmlDeviceGetCount()):
    h = pynvml.nvmlDeviceGetHandleByIndex(i)
    out.append([pynvml.nvmlDeviceGetUUID(h), i, pynvml.nvmlDeviceGetName(h)])
print(json.dumps(out))
"""


def find_address(config: AgentConfig, environ: Mapping[str, str]) -> str:
    """The address peers use: configured, POD_IP, the data interface's, or the source address of the default route."""
    if config.node.address:
        return config.node.address
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: chooses a route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


async def find_gpus(config: AgentConfig) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs this node offers, and a sentence if they could not be read."""
    if not asked_for_gpus(config):
        return (), ""
    found, problem = await _query_gpus()
    if config.node.gpus == "auto":
        return found, problem
    by_uuid = {g.uuid: g for g in found}
    wanted = config.node.gpus
    missing = [u for u in wanted if u not in by_uuid]
    gpus = tuple(by_uuid.get(u) or Gpu(uuid=u, index=i, healthy=False, why="not found") for i, u in enumerate(wanted))
    return gpus, problem or (f"GPUs of the config not found: {', '.join(missing)}" if missing else "")


async def _query_gpus() -> tuple[tuple[Gpu, ...], str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _GPU_QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(GPU_DEADLINE):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()  # not waited for: a process stuck in the driver does not die
        return (), f"the GPU query did not answer within {GPU_DEADLINE:g} s: GPUs are unknown, none is offered"
    if process.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        absent = any("NVMLError_LibraryNotFound" in line or "NVMLError_DriverNotLoaded" in line for line in last)
        return (), "" if absent else f"the GPU query failed: {''.join(last)}"
    return tuple(Gpu(uuid=u, index=i, name=n) for u, i, n in json.loads(out)), ""


def node_facts(config: AgentConfig, address: str, gpus: tuple[Gpu, ...], started: float, peer: str) -> NodeFacts:
    """Everything an agent tells about its machine."""
    slots = config.node.cpu_slots
    return NodeFacts(
        address=address,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        agent_pid=os.getpid(),
        agent_version=__version__,
        started=started,
        cpu_slots=slots if slots is not None else os.cpu_count() or 1,
        gpus=gpus,
        labels=dict(config.node.labels),
        data_interface=config.node.data_interface,
        api_socket=str(config.dirs.run / "api.sock"),
        peer=peer,
    )
