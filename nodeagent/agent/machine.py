"""Facts about this machine: address, boot id, CPUs. Its GPUs are found by ``gpus.py``."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from nodeagent import __version__
from nodeagent.model.node import Gpu, NodeFacts
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.workers.linux import boot_id


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
