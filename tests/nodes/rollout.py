"""Ansible, as an operator runs it: the collection from this repository, an inventory, and the playbooks' recaps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.nodes.image import ROOT
from tests.nodes.lab import Lab

LIMIT = 600.0
"""Seconds for one playbook."""
SECRETS = {"redis_password": "agents-secret", "redis_admin_password": "admins-secret"}


def why_not() -> str:
    """Why there is no Ansible here; empty if there is."""
    return "" if program("ansible-playbook") else "no ansible-playbook here: pip install ansible-core"


def program(name: str) -> str | None:
    """One of Ansible's commands; None where it is not installed."""
    return shutil.which(name, path=_path())


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@dataclass(frozen=True)
class Recap:
    """How a playbook went: exit code, everything it said, and per host its counts (``ok``, ``changed``, ...)."""

    code: int
    text: str
    hosts: Mapping[str, Mapping[str, int]]

    @property
    def changed(self) -> int:
        """Changes on all hosts together."""
        return sum(counts["changed"] for counts in self.hosts.values())


class Rollout:
    """The operator's folder: collection, inventory and keys."""

    def __init__(self, lab: Lab, folder: Path, bundle: Path) -> None:
        self._lab, self.folder = lab, folder
        self.variables: dict[str, Any] = {
            "ansible_user": "root", "ansible_ssh_private_key_file": str(lab.key), "nodeagent_bundle": str(bundle),
            "ansible_python_interpreter": "/usr/bin/python3",
            "nodeagent_cluster_key_file": str(folder / "cluster.key"),
            "nodeagent_redis_password": "{{ redis_password }}",
            **SECRETS,
        }  # fmt: skip
        self._install()
        key = folder / "cluster.key"
        subprocess.run([sys.executable, "-m", "nodeagent.agent.main", "keygen", str(key)], check=True, cwd=ROOT)

    def _install(self) -> None:
        """The collection, as ansible/README.md says: what it brings along must be in it."""
        galaxy = program("ansible-galaxy")
        assert galaxy is not None
        words = ["collection", "install", "--offline", "-p", str(self.folder / "collections"), str(ROOT / "ansible")]
        subprocess.run([galaxy, *words], check=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
                       env=os.environ | {"ANSIBLE_HOME": str(self.folder / "ansible"), "PATH": _path()})  # fmt: skip

    def inventory(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Write who is in which group."""
        nodes = self._lab.nodes
        children = {
            group: {"hosts": {name: {"ansible_host": nodes[name].address, "nodeagent_address": nodes[name].address,
                                     "redis_address": nodes[name].address} for name in names}}
            for group, names in groups.items()
        }  # fmt: skip
        text = yaml.safe_dump({"all": {"vars": self.variables, "children": children}})
        (self.folder / "inventory.yml").write_text(text)

    def lint(self) -> subprocess.CompletedProcess[str]:
        """ansible-lint's judgement of the collection."""
        return subprocess.run(
            [program("ansible-lint") or "ansible-lint", "--offline", "--nocolor", "--profile", "production"],
            cwd=ROOT / "ansible", capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
            env=os.environ | {"ANSIBLE_COLLECTIONS_PATH": str(self.folder / "collections"), "PATH": _path()},
        )  # fmt: skip

    def play(self, playbook: str, *options: str, **variables: object) -> Recap:
        """Run ``nodeagent.cluster.PLAYBOOK``; never raises for a play that failed."""
        ansible = program("ansible-playbook")
        assert ansible is not None
        settings = {
            "ANSIBLE_COLLECTIONS_PATH": self.folder / "collections", "ANSIBLE_PIPELINING": "1", "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_HOST_KEY_CHECKING": "0", "ANSIBLE_HOME": self.folder / "ansible", "ANSIBLE_FORKS": "8",
            "ANSIBLE_SSH_ARGS": "-oControlMaster=auto -oControlPersist=60s -oUserKnownHostsFile=/dev/null",
            "ANSIBLE_TIMEOUT": "5", "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml", "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "0",
        }  # fmt: skip
        extra = [f"-e{name}={value}" for name, value in variables.items()]
        environment = [f"{name}={value}" for name, value in settings.items()]
        done = self._lab.from_hub(
            "env", *environment, ansible, "-i", str(self.folder / "inventory.yml"), f"nodeagent.cluster.{playbook}",
            *options, *extra, limit=LIMIT,
        )  # fmt: skip
        return Recap(done.returncode, done.stdout + done.stderr, _recap(done.stdout))


def _recap(text: str) -> dict[str, dict[str, int]]:
    lines = re.findall(r"^(\S+)\s*: (ok=\d.*)$", text.partition("PLAY RECAP")[2], re.MULTILINE)
    return {host: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in lines}
