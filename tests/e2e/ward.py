"""Machines of their own for the repair tests: each with a driver, a boot id and a power button, under real agents.

Owns that a machine comes back from a reboot as a real one does: nothing of before runs, /run is empty, the kernel has a
new boot id, the disk is as it was.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.bare import Bare

BOOT_ID = "/proc/sys/kernel/random/boot_id"
GPUS = 2
REPAIR = """#!/bin/sh
# KIND NODE GPU: what a machine of the tests is asked to do, and how it answers
echo "$2 $3 $NODEAGENT_RULE" >> "$0.$1.asked"
[ -f "$0.$2.$1.told" ] && cat "$0.$2.$1.told"
exit "$(cat "$0.$2.$1.code" 2>/dev/null || echo 0)"
"""


def why_not() -> str:
    """Why it cannot be done here; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("cc") is None:
        return "no unshare, or no C compiler"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    return "" if done.returncode == 0 else "no mount namespaces for this user"


class Machines:
    """Nodes of one cluster. ``script`` is the command of every repair; what it was asked is in files beside it."""

    def __init__(self, cluster: Bare, library: Path) -> None:
        self.cluster, self._folder = cluster, cluster.home / "hw"
        self._folder.mkdir()
        self._sequence = 0
        self.script = self._folder / "repair"
        self.script.write_text(REPAIR)
        self.script.chmod(0o755)
        for kind in ("gpu_reset", "reboot", "service", "verify"):
            command = f'[{self.script}, {kind}, "{{node}}", "{{gpu}}"]'
            cluster.environ[f"NODEAGENT__HEALTH__REPAIR__{kind.upper()}"] = command
        cluster.environ["LD_LIBRARY_PATH"] = str(library.parent)

    def start(self, node: str) -> None:
        """Switch it on for the first time."""
        self._new_boot(node)
        self.driver(node)
        self._agent(node)

    def reboot(self, node: str) -> None:
        """What ``systemctl reboot`` leads to."""
        self.cluster.cut(node)
        self._new_boot(node)
        self.driver(node)
        self._agent(node)

    def driver(self, node: str, *lines: str) -> None:
        """What the node's driver says from now on."""
        draft = self._folder / f"{node}.new"
        names = [f"{i}.uuid {self.gpu(node, i)}" for i in range(GPUS)]
        draft.write_text("\n".join((f"gpus {GPUS}", "model H100", *names, *lines)) + "\n")
        draft.replace(self._folder / f"{node}.driver")

    def xid(self, code: int, *where: tuple[str, int]) -> None:
        """An Xid on each of these GPUs."""
        for node, gpu in where:
            self._sequence += 1
            self.driver(node, f"xid {self._sequence} {gpu} {code}")

    def gpu(self, node: str, number: int) -> str:
        return f"GPU-{node}-{number}"

    def asked(self, kind: str) -> list[str]:
        """``NODE GPU RULE`` of each time that it was asked to."""
        file = Path(f"{self.script}.{kind}.asked")
        return file.read_text().splitlines() if file.exists() else []

    def answers(self, node: str, kind: str, code: int, text: str = "") -> None:
        Path(f"{self.script}.{node}.{kind}.told").write_text(text)
        Path(f"{self.script}.{node}.{kind}.code").write_text(str(code))

    def _new_boot(self, node: str) -> None:
        (self._folder / f"{node}.boot").write_text(f"{uuid.uuid4()}\n")

    def _agent(self, node: str) -> None:
        gpus = ", ".join(self.gpu(node, i) for i in range(GPUS))
        own = {"FAKE_NVML": str(self._folder / f"{node}.driver"), "NODEAGENT__NODE__GPUS": f"[{gpus}]"}
        before = dict(self.cluster.environ)
        self.cluster.environ |= own
        self.cluster.start_agent(node, under=lambda command: self._inside(node, command))
        self.cluster.environ.clear()
        self.cluster.environ |= before

    def _inside(self, node: str, command: Sequence[str]) -> list[str]:
        mount = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(self._folder / f"{node}.boot"), *command]
