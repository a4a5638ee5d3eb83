"""How the GPU probe is started: without ``site``, which costs it memory and time, so it is told where its packages are.
Must never import what the probe imports: an agent that loaded NVML's library could hang with the driver.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]


def nvml_command(python: str, pace: float) -> tuple[str, ...]:
    """The command; ``packages`` belongs into its PYTHONPATH."""
    return (python, "-S", "-m", "nodeagent.health.probe_nvml", str(pace))


def packages() -> str:
    """Where nodeagent and nvidia-ml-py are."""
    found = find_spec("pynvml")
    folders = [str(ROOT)]
    if found is not None and found.origin is not None:
        folders.append(str(Path(found.origin).parent))
    return os.pathsep.join(dict.fromkeys(folders))
