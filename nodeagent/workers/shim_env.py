"""What the node itself adds to a worker's environment: the user's login, the recorded shell, the job's env_file.

Standard library only, and pure but for the two functions that say what they read.
"""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from pathlib import Path

DEFAULTS = frozenset(
    {
        "OMP_NUM_THREADS",
        "RES_OPTIONS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "PYTHONUNBUFFERED",
    }
)
"""Variables of ours that give way to the job's own, also to those of its env_file."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_environment(uid: int, recorded: Mapping[str, str], own_user: bool) -> dict[str, str]:
    """The login variables of the user database, then what was recorded at submit (its HOME only if the submitter is
    the user). Reads the user database."""
    env = {"PATH": _PATH, "LANG": "C.UTF-8"}
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        env |= {"HOME": "/", "SHELL": "/bin/sh"}
    else:
        env |= {"HOME": entry.pw_dir, "SHELL": entry.pw_shell or "/bin/sh"}
        env |= {"USER": entry.pw_name, "LOGNAME": entry.pw_name}
    for key, value in recorded.items():
        if key in ("USER", "LOGNAME", "SHELL") or (key == "HOME" and not own_user):
            continue
        env[key] = value
    return env


def compose(
    base: Mapping[str, str], from_file: Mapping[str, str], job: Mapping[str, str], ours: Mapping[str, str]
) -> dict[str, str]:
    """One environment, the later source winning: base, env_file, the job's env, ours (``ours`` holds the job's env
    too)."""
    kept = {key: value for key, value in from_file.items() if key in DEFAULTS and key not in job}
    return {**base, **from_file, **ours, **kept}


def parse_env_file(text: str, name: str) -> dict[str, str]:
    """Lines ``KEY=VALUE``, ``export KEY=VALUE``, comments, blanks; one pair of quotes around a value is taken off.

    Raises ValueError naming file and line.
    """
    env: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.removeprefix("export ").partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key.isidentifier():
            raise ValueError(f"{name}:{number}: not KEY=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        env[key] = value
    return env


def read_env_file(path: str) -> dict[str, str]:
    """Raises OSError or ValueError."""
    return parse_env_file(Path(path).read_text(), path)
