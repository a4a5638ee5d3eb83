"""Nodes on a switch, for tests and by hand: ``python -m tests.nodes.lab --nodes 3`` boots three and says how to get in.

Owns the disks, the key, and the end of all of it. What is installed on the nodes is the caller's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e import netns
from tests.nodes import image
from tests.nodes.net import HUB, Network
from tests.nodes.node import ENVIRONMENT, EXEC_LIMIT, Keeper, Node

SHARED = Path("/shared")
"""One folder on all nodes, as NFS would be; writable by everybody."""
WHEELS = Path("/mnt/wheels")
"""On all nodes: what nodeagent needs, for ``pip install --no-index --find-links``."""


def why_not() -> str:
    """Why no nodes can be had here; empty if they can."""
    if shutil.which("systemd-nspawn") is None:
        return "no systemd-nspawn here: install systemd-container"
    return image.why_not() or netns.why_not()


class Lab:
    """Nodes by name. Made by ``lab()``."""

    def __init__(self, folder: Path, net: Network) -> None:
        self.folder, self.net = folder, net
        self.nodes: dict[str, Node] = {}
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.key = folder / "key"
        image.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)])
        self.base = image.base()
        self.deps, self.wheels = image.dependencies(self.base)

    def add(self, name: str, layers: Sequence[Path] | None = None) -> Node:
        """A new node, not yet booted. ``layers`` lie on the base; default: all that nodeagent needs."""
        address = self.net.machine(name)
        above = [self.deps] if layers is None else list(layers)
        node = Node(name, address, self.net.space(name), [*above, self.base], self.folder / "disks" / name)
        node.binds[self.wheels] = WHEELS
        for place in python_folders():  # workers run in this machine's Python, which has torch
            node.binds[place] = place
        node.binds[image.ROOT] = image.ROOT
        node.shared[self.shared] = SHARED
        self.nodes[name] = node
        self.prepare(node)
        return node

    def prepare(self, node: Node) -> None:
        """What a fresh disk needs: our key, and everybody's names."""
        node.write("/root/.ssh/authorized_keys", self.key.with_suffix(".pub").read_text(), 0o600)
        (node.disk / "root").chmod(0o711)
        (node.disk / "root/.ssh").chmod(0o700)
        for one in self.nodes.values():
            one.write("/etc/hosts", self._hosts())

    def _hosts(self) -> str:
        lines = [f"{node.address} {node.name}" for node in self.nodes.values()]
        return "\n".join(["127.0.0.1 localhost", f"{self.net.address(HUB)} {HUB}", *lines, ""])

    def boot(self, *names: str) -> None:
        """These nodes, or all that are down, at once; until they are up."""
        chosen = [self.nodes[name] for name in names] or [node for node in self.nodes.values() if not node.is_up]
        for node in chosen:
            node.boot()
        for node in chosen:
            node.wait_up()

    def ssh(self, name: str, *command: str) -> list[str]:
        """The command line that runs a command on a node over ssh; for ``from_hub``."""
        flags = [f"-i{self.key}", "-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null", "-oLogLevel=ERROR"]
        return ["ssh", *flags, f"root@{self.nodes[name].address}", *command]

    def from_hub(self, *command: str, limit: float = EXEC_LIMIT) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine on the nodes' network: Ansible, say, or ssh."""
        with self.net.inside(HUB):
            return subprocess.run(
                command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL,
                env=os.environ | {"PATH": f"{os.environ['PATH']}:{ENVIRONMENT['PATH']}"},
            )  # fmt: skip


def python_folders() -> list[Path]:
    """Where the Python of these tests lives, as far as a node has none of it; packages of another one that a ``.pth``
    file adds, too."""
    packages = [p for p in sys.path if p.endswith("site-packages")]
    found = dict.fromkeys(Path(p).resolve() for p in (sys.prefix, sys.base_prefix, *packages))
    return [p for p in found if p != Path("/usr") and not any(above in found for above in p.parents)]


@contextmanager
def lab() -> Iterator[Lab]:
    """An empty lab; all nodes end with it."""
    with tempfile.TemporaryDirectory(prefix="na-nodes-") as folder, Network() as net:
        one, keeper = Lab(Path(folder), net), Keeper()
        try:
            yield one
        finally:
            for node in one.nodes.values():
                node.remove()
            keeper.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description="Boot nodes and keep them until Ctrl-C.")
    arguments.add_argument("--nodes", type=int, default=3)
    arguments.add_argument("--bare", action="store_true", help="nothing of nodeagent on them, not what it needs either")
    chosen = arguments.parse_args()
    if problem := why_not():
        sys.exit(problem)
    with lab() as one:
        for number in range(1, chosen.nodes + 1):
            one.add(f"n{number}", [] if chosen.bare else None)
        one.boot()
        print(f"{len(one.nodes)} nodes are up. A shell on the switch, for ssh and Ansible:")
        print(f"    nsenter --net={one.net.space(HUB)}")
        print(f"    ssh -i {one.key} -oStrictHostKeyChecking=no root@{one.nodes['n1'].address}")
        for node in one.nodes.values():
            print(f"{node.name} {node.address}: {' '.join(node.inside('bash'))}")
        print("Ctrl-C ends them.", flush=True)
        signal.sigwait([signal.SIGINT, signal.SIGTERM])


if __name__ == "__main__":
    main()
