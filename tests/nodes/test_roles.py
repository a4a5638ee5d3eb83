"""What the collection's roles write, as far as that needs no node: Ansible on this machine, in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nodes.image import ROOT
from tests.nodes.rollout import LIMIT, program, why_not

pytestmark = [pytest.mark.nodes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

ROLES = ROOT / "ansible/roles"
NAMES: dict[str, dict[str, str]] = {
    "gpu1": {},
    "gpu2.example.org": {},
    "gpu3": {"nodeagent_address": "10.0.0.3"},
    "10.0.0.4": {"nodeagent_node": "gpu4"},
    "gpu5": {"nodeagent_address": "fd00::5"},
}
"""The hosts of an inventory."""


def played(folder: Path, *tasks: Mapping[str, Any], **variables: Any) -> None:
    """Play tasks on this machine for each of ``NAMES``, with these variables where a host has none of its own."""
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = {"nodeagent": {"hosts": NAMES, "vars": here | variables}}
    play = {"hosts": "nodeagent", "gather_facts": False, "tasks": list(tasks)}
    for name, document in (("inventory.yml", inventory), ("play.yml", [play])):
        (folder / name).write_text(yaml.safe_dump(document))
    command = [program("ansible-playbook") or "", "-i", str(folder / "inventory.yml"), str(folder / "play.yml")]
    environ = os.environ | {"ANSIBLE_HOME": str(folder / "ansible")}
    subprocess.run(command, check=True, timeout=LIMIT, stdin=subprocess.DEVNULL, env=environ)


def test_prometheus_asks_for_what_is_an_address(tmp_path: Path) -> None:
    """Of IPv6 there were no brackets."""
    to = tmp_path / "prometheus.yml"
    words = {"src": str(ROLES / "monitoring/templates/prometheus.yml.j2"), "dest": str(to)}
    write = {"ansible.builtin.template": words, "run_once": True}
    played(tmp_path, write, monitoring_port=9470, monitoring_cluster="one", monitoring_ca_file="ca.pem")
    (job,) = yaml.safe_load(to.read_text())["scrape_configs"]
    (static,) = job["static_configs"]
    assert sorted(static["targets"]) == sorted(
        ["gpu1:9470", "gpu2.example.org:9470", "10.0.0.3:9470", "10.0.0.4:9470", "[fd00::5]:9470"]
    )


def test_what_has_not_run_here_is_left_again(tmp_path: Path) -> None:
    """A run that completed one which had stopped left a node without an agent. What ran before stays, and so does what
    a rollback came to."""
    load = {"ansible.builtin.include_vars": str(ROLES / "nodeagent/vars/main.yml")}
    words = {"content": "{{ nodeagent_untried | bool }}", "dest": str(tmp_path / "{{ inventory_hostname }}.untried")}
    here = "nodeagent: 2 is in use"
    stopped = f"{here}, but the agent still runs 1: systemctl restart nodeagent"
    changed, skipped = {"changed": True}, {"changed": False, "skipped": True}
    runs: dict[str, dict[str, Any]] = {
        "gpu1": {"nodeagent_installed": changed, "nodeagent_status": {"stdout": "nodeagent: 2 is not in use, 1 is"}},
        "gpu2.example.org": {"nodeagent_installed": skipped, "nodeagent_status": {"stdout": stopped}},
        "gpu3": {"nodeagent_installed": skipped, "nodeagent_status": {"stdout": here}},
        "10.0.0.4": {"nodeagent_status": {"stdout": stopped}},
        "gpu5": {"nodeagent_installed": changed, "nodeagent_status": {"stdout": "2 is not in use, nothing is"}},
    }
    facts = [
        {"ansible.builtin.set_fact": {name: f"{{{{ runs[inventory_hostname]['{name}'] }}}}"},
         "when": f"'{name}' in runs[inventory_hostname]"}
        for name in ("nodeagent_installed", "nodeagent_status")
    ]  # fmt: skip
    played(tmp_path, load, *facts, {"ansible.builtin.copy": words}, runs=runs)
    assert {name: (tmp_path / f"{name}.untried").read_text() for name in NAMES} == {
        "gpu1": "True",
        "gpu2.example.org": "True",
        "gpu3": "False",
        "10.0.0.4": "False",
        "gpu5": "False",
    }


def test_a_nodes_certificate_has_the_name_that_prometheus_asks_for(tmp_path: Path) -> None:
    """Where the inventory has full names it had the short one alone, and no scrape was let through."""
    load = {"ansible.builtin.include_vars": str(ROLES / "nodeagent/vars/main.yml")}
    words = {"content": "{{ nodeagent_api_subjects }}", "dest": str(tmp_path / "{{ inventory_hostname }}.names")}
    played(
        tmp_path, load, {"ansible.builtin.copy": words},
        **yaml.safe_load((ROLES / "nodeagent/defaults/main.yml").read_text()),
    )  # fmt: skip
    assert {name: (tmp_path / f"{name}.names").read_text() for name in NAMES} == {
        "gpu1": "DNS:gpu1",
        "gpu2.example.org": "DNS:gpu2,DNS:gpu2.example.org",
        "gpu3": "IP:10.0.0.3,DNS:gpu3",
        "10.0.0.4": "DNS:gpu4,IP:10.0.0.4",
        "gpu5": "IP:fd00::5,DNS:gpu5",
    }
