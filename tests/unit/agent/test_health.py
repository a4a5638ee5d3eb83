"""What an agent's health monitor looks at: as much of the machine as its config says is its own."""

from __future__ import annotations

from pathlib import Path

from nodeagent.agent.health import machine
from nodeagent.hardware.discovery import SIGNS
from nodeagent.spec.agentconfig import AgentConfig, NodeConfig
from nodeagent.spec.healthconfig import HealthConfig

DRIVER = any(sign.exists() for sign in SIGNS)


def config(**node: object) -> AgentConfig:
    return AgentConfig(node=NodeConfig.model_validate(node))


def test_the_driver_is_asked_where_there_is_one_or_gpus_are_named() -> None:
    health = HealthConfig(folders=("/shared",))
    none, every = machine(config(gpus="none"), health, "b"), machine(config(), health, "b")
    assert (none.gpus, none.configured) == (False, ())
    assert (every.gpus, every.configured) == (DRIVER, None)
    named = machine(config(gpus=["GPU-a"], data_interface="eth1"), health, "b")
    assert (named.gpus, named.configured, named.interfaces) == (True, ("GPU-a",), ("eth1",))
    assert (named.folders, named.boot) == (("/shared",), "b")
    assert Path(named.kmsg) == Path("/dev/kmsg")
