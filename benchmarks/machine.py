"""What the figures were taken on: machine, versions, date. Says nothing that names this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path

from nodeagent import __version__
from nodeagent.local.privateredis import find_server


def describe() -> dict[str, str]:
    """For the head of the report."""
    cpus = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpus.splitlines() if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, everything on loopback, no GPU used",
        "system": f"Linux {'.'.join(platform.release().split('.')[:2])}, Python {platform.python_version()}",
        "versions": f"nodeagent {__version__}, torch {importlib.metadata.version('torch')} (gloo), {_redis()}",
        "load": f"{os.getloadavg()[0]:.1f} before the run",
    }


def _redis() -> str:
    output = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True).stdout
    name, version = output.split()[0], re.search(r"v=(\S+)", output)
    return f"{name} {version[1] if version else '?'}"
