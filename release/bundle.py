"""The offline bundle: a folder with everything that ``setup.sh`` installs, and its archive."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from release.wheels import ROOT, collect

COPIES = (
    "release/setup.sh",
    "systemd/nodeagent.service",
    "systemd/nodeagent.slice",
    "systemd/nodeagent.sysusers.conf",
    "systemd/nodeagent.tmpfiles.conf",
    "systemd/nodeagent.needrestart.conf",
    "config/nodeagent.yaml",
    "LICENSE",
    "CHANGELOG.md",
)


def lay_out(wheel: Path, pythons: Sequence[str], machine: str, folder: Path) -> None:
    """The bundle as a new folder. Raises subprocess.CalledProcessError where a wheel cannot be had."""
    (folder / "wheels").mkdir(parents=True)
    collect(wheel, pythons, machine, folder / "wheels")
    subprocess.run([sys.executable, "-m", "release.pages", str(folder)], cwd=ROOT, check=True)
    for name in COPIES:
        shutil.copy2(ROOT / name, folder)


def pack(folder: Path, archive: Path) -> None:
    """``folder`` as a .tar.gz, owned by root; ``setup.sh`` comes last: where it was unpacked, all was."""
    last = f"{folder.name}/setup.sh"

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name, filter=lambda entry: None if entry.name == last else plain(entry))
        tar.add(folder / "setup.sh", arcname=last, filter=plain)
