"""Facts about the machine: the address in its order of preference, GPUs as configured, slots."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest

from nodeagent.agent.machine import find_address, find_gpus, node_facts
from nodeagent.model.node import Gpu
from nodeagent.spec.agentconfig import AgentConfig, DirsConfig, NodeConfig
from nodeagent.workers.linux import boot_id


def config(run: Path = Path("/run/x"), **node: object) -> AgentConfig:
    dirs = DirsConfig(run=run, state=Path("/state"), logs=Path("/logs"))
    return AgentConfig(node=NodeConfig.model_validate(node), dirs=dirs)


def test_the_configured_address_goes_before_the_pods_and_both_before_the_routes() -> None:
    assert find_address(config(address="10.1.1.1"), {"POD_IP": "10.2.2.2"}) == "10.1.1.1"
    assert find_address(config(), {"POD_IP": "10.2.2.2"}) == "10.2.2.2"
    ipaddress.ip_address(find_address(config(), {}))


async def test_no_gpus_means_that_none_is_asked_for() -> None:
    assert await find_gpus(config(gpus="none")) == ((), "")


def test_facts() -> None:
    gpus = (Gpu(uuid="GPU-1", index=0),)
    facts = node_facts(
        config(cpu_slots=3, labels={"rack": "7"}, data_interface="eth1"), "10.0.0.1", gpus, 5.0, "10.0.0.1:29400"
    )
    assert (facts.address, facts.cpu_slots, facts.gpus, facts.started) == ("10.0.0.1", 3, gpus, 5.0)
    assert (facts.labels, facts.data_interface, facts.agent_pid) == ({"rack": "7"}, "eth1", os.getpid())
    assert facts.peer == "10.0.0.1:29400"
    assert (facts.api_socket, facts.boot_id) == ("/run/x/api.sock", boot_id())
    assert node_facts(config(), "a", (), 0.0, "").cpu_slots == (os.cpu_count() or 1)


@pytest.mark.parametrize("slots", [0, 4096])
def test_slots_may_be_none(slots: int) -> None:
    assert node_facts(config(cpu_slots=slots), "a", (), 0.0, "").cpu_slots == slots
