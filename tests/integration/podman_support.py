"""A podman for the tests of containers: the machine's own, a folder as its image, and why there is none."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

HYBRID = Path("/sys/fs/cgroup/unified/cgroup.controllers")
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "run", "tmp", "var")
SECONDS = 60


@functools.cache
def why_not() -> str:
    """Why nothing can be run in a container here; "" if it can."""
    missing = [name for name in ("podman", "catatonit", "crun") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if _hybrid() and os.geteuid() != 0:
        return "crun needs cgroup v2 alone, or v1 alone, and only root can show podman such a hierarchy"
    return ""


def _hybrid() -> bool:
    """crun refuses both versions side by side."""
    try:
        return bool(HYBRID.read_text().strip())
    except OSError:
        return False


def podman_path(folder: Path) -> str:
    """A PATH with a podman that works here: where cgroups are in hybrid mode, one that sees version 2 alone, in a mount
    namespace of its own."""
    if not _hybrid():
        return os.environ["PATH"]
    folder.mkdir(exist_ok=True)
    program = folder / "podman"
    script = f'mount -t cgroup2 none /sys/fs/cgroup && exec {shutil.which("podman")} "$@"'
    program.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{script}' podman \"$@\"\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def make_image(folder: Path) -> Path:
    """A folder that is a container's root: empty but for the links to /usr, which is bound from the machine."""
    folder.mkdir()
    for name in FOLDERS:
        (folder / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    return folder


def containers_of(path: str, folder: str) -> list[str]:
    """Names of the containers in podman's store that belong to pods in this folder."""
    shown = '--format={{.Names}} {{index .Labels "nodeagent"}}'
    done = subprocess.run(
        ["podman", "ps", "--all", "--filter=label=nodeagent", shown], env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    rows = [line.partition(" ") for line in done.stdout.splitlines()]
    return sorted(name for name, _, pod in rows if f":{folder}/" in pod)
