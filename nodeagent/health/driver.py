"""Whether there is a driver to ask on this machine. Looks at file names; must never call the driver."""

from __future__ import annotations

from pathlib import Path

from nodeagent.spec.agentconfig import AgentConfig

SIGNS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Without any of these there is no NVIDIA driver to ask, and an agent's restart need not wait for the answer."""


def asked_for_gpus(config: AgentConfig) -> bool:
    """The driver is asked where there is one, or where the config names GPUs."""
    if isinstance(config.node.gpus, tuple):
        return bool(config.node.gpus)
    return config.node.gpus == "auto" and any(sign.exists() for sign in SIGNS)
