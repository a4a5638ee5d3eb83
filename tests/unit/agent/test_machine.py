"""Facts about the machine: the address in its order of preference, slots."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest

from nodeagent.agent.machine import (
    find_address,
    gloo_interface,
    is_named,
    moved_address,
    node_facts,
    resolve_hostname,
)
from nodeagent.model.node import Gpu
from nodeagent.osutil.linux import boot_id
from nodeagent.spec.agentconfig import AgentConfig, DirsConfig, NodeConfig


def config(run: Path = Path("/run/x"), **node: object) -> AgentConfig:
    dirs = DirsConfig(run=run, state=Path("/state"), logs=Path("/logs"))
    return AgentConfig(node=NodeConfig.model_validate(node), dirs=dirs)


def test_the_configured_address_goes_before_the_pods_and_both_before_the_routes() -> None:
    assert find_address(config(address="10.1.1.1"), {"POD_IP": "10.2.2.2"}) == "10.1.1.1"
    assert find_address(config(), {"POD_IP": "10.2.2.2"}) == "10.2.2.2"
    ipaddress.ip_address(find_address(config(), {}))


INTERFACES = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.7",), "ib0": ("10.9.0.7", "10.0.0.8")}


@pytest.mark.parametrize(
    ("address", "named", "interface"),
    [
        ("10.0.0.7", ("127.0.1.1",), "eth0"),  # Debian's /etc/hosts
        ("10.0.0.8", ("127.0.1.1", "::1"), "ib0"),
        ("10.0.0.7", (), "eth0"),  # the name resolves to nothing: gloo would take loopback
        ("10.0.0.7", ("10.9.0.7",), None),  # gloo finds the fast network by the name: leave it alone
        ("10.0.0.7", ("127.0.1.1", "10.0.0.7"), None),
        ("127.0.0.1", ("127.0.1.1",), None),  # one machine by itself
        ("10.5.5.5", ("127.0.1.1",), None),  # an address that is translated on the way
    ],
)
def test_gloo_is_given_an_interface_where_the_hosts_name_leads_to_loopback(
    address: str, named: tuple[str, ...], interface: str | None
) -> None:
    assert gloo_interface(address, named, INTERFACES) == interface


@pytest.mark.parametrize(
    ("address", "interface", "routed", "now"),
    [
        ("10.0.0.7", "eth0", "10.9.0.7", "10.0.0.7"),  # still its own, wherever the default route leads
        ("10.0.0.3", "eth0", "10.0.0.7", "10.0.0.7"),  # DHCP
        ("10.0.0.3", "eth0", "", "10.0.0.7"),  # a private network
        ("10.0.0.3", "ib0", "10.0.0.7", "10.9.0.7"),  # the same network as before
        ("10.0.0.3", "ib0", "10.0.0.8", "10.0.0.8"),  # of that interface's the one that is used
        ("10.0.0.3", "eth9", "10.0.0.7", "10.0.0.7"),  # its interface has gone
        ("10.0.0.3", "eth9", "", "10.0.0.3"),  # that of any other interface may be a bridge's
        ("fd00::3", "eth0", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "lo", "10.0.0.7", "10.0.0.7"),  # the agent started before there was a network
        ("127.0.0.1", "lo", "", "127.0.0.1"),
        ("10.0.0.3", "lo", "127.0.0.1", "10.0.0.3"),
    ],
)
def test_where_a_node_is_reached_whose_address_has_gone(address: str, interface: str, routed: str, now: str) -> None:
    assert moved_address(address, interface, INTERFACES, routed) == now


def test_who_names_an_address() -> None:
    assert is_named(config(address="10.1.1.1"), {}) and is_named(config(), {"POD_IP": "10.2.2.2"})
    assert not is_named(config(), {})


def test_a_name_that_does_not_resolve_gives_nothing() -> None:
    assert resolve_hostname("no-such-host.invalid", bound=5.0) == ()
    assert "127.0.0.1" in resolve_hostname("localhost", bound=5.0)


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
