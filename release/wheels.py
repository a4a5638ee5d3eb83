"""The product's own wheel and sdist, and the wheels that it needs. Must never take anything but wheels: a node that
installs from them has no compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("manylinux_2_28_{0}", "manylinux_2_17_{0}", "manylinux2014_{0}", "manylinux1_{0}", "linux_{0}")
"""Newest first: glibc 2.28 is that of Debian 10, RHEL 8 and Ubuntu 18.10."""


def build(out: Path) -> Path:
    """Wheel and sdist into ``out``. Returns the wheel. Raises subprocess.CalledProcessError."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("nodeagent-*.whl")
    return wheel


def collect(wheel: Path, pythons: Sequence[str], machine: str, out: Path) -> None:
    """``wheel``, all that it needs on each of ``pythons`` ("3.12") and ``machine`` ("x86_64"), and pip itself, into
    ``out``. Raises subprocess.CalledProcessError."""
    platforms = [f"--platform={name.format(machine)}" for name in PLATFORMS]
    for python in pythons:
        command = [
            sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--only-binary=:all:",
            f"--python-version={python}", *platforms, f"--dest={out}", str(wheel), "pip",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
