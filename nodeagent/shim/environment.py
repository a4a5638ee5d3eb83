"""What the node itself adds to a worker's environment: the user's login, the recorded shell, the site's environment
modules, the job's env_file; and which of two sources wins. RANK and the like come from ``pods/environment.py``.

A login shell of the job's user loads the modules, as on a terminal, once, before anything of the job runs on this node.
The environment that comes of it goes to fork server, workers and hooks alike, so no start of workers runs a shell.
Standard library only.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

DEFAULTS = frozenset(
    {
        "OMP_NUM_THREADS",
        "RES_OPTIONS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "PADDLE_DISTRI_BACKEND",
        "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL",
        "PADDLE_ELASTIC_JOB_ID",
        "PADDLE_ELASTIC_NP",
        "PADDLE_GLOO_RENDEZVOUS",
        "PADDLE_WITH_GLOO",
        "PYTHONUNBUFFERED",
    }
)
"""Variables of ours that give way to the job's own, also to those of its env_file."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOST_FOUND = 8 << 20
"""Bytes that a look at a job's folders may find; what is in the environment, twice at most, is nearly all of it. No
env_file may be larger."""
LOAD_BOUND = 15.0
"""Seconds for the login shell; less than the checks have."""
MOST_BYTES = 1 << 20
"""Of the environment that it prints."""
MARK = b"\0nodeagent: the environment\0"
"""A site's profile may print, too."""
NO_COMMAND, NOT_LOADED = 90, 91
SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
SCRIPT = f"""
while [ "$1" != -- ]; do export "$1"; shift; done
shift
type module >/dev/null 2>&1 || exit {NO_COMMAND}
for name; do
  module load "$name" >&2 || {{ echo "$name" >&2; exit {NOT_LOADED}; }}
done
printf '\\0nodeagent: the environment\\0'
exec env -0
"""
"""A profile may set PATH anew: what was recorded at submit is exported again before anything is loaded."""


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
    """Raises OSError, or ValueError naming file and line. A byte order mark, as editors write it, is no part of it."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_FOUND + 1)
    if len(data) > MOST_FOUND:
        raise ValueError(f"{path}: larger than {MOST_FOUND >> 20} MiB; name a file that holds only NAME=VALUE lines")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text") from None
    return parse_env_file(text, path)


class ModulesError(Exception):
    """``str()`` is the sentence for the person. Behind ``modules: `` its first colon begins what the user's own shell
    printed, which not everybody may read (plan/pods/report.py)."""


def with_modules(names: Sequence[str], base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with these modules loaded, in this order. Raises ModulesError."""
    bash = shutil.which("bash", path=os.pathsep.join([base["PATH"], os.defpath]))
    if bash is None:
        raise ModulesError("modules: there is no bash on this node to load them in")
    exports = [f"{key}={value}" for key, value in base.items() if key.isidentifier()]
    words = [bash, "--login", "-c", SCRIPT, "nodeagent", *exports, "--", *names]
    try:
        done = subprocess.run(
            words, env=dict(base), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=LOAD_BOUND,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ModulesError(f"modules: a login shell did not load {', '.join(names)} within {LOAD_BOUND:g} s") from None
    except OSError as error:
        raise ModulesError(f"modules: {bash} cannot be run ({error.strerror})") from None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == NO_COMMAND:
        raise ModulesError("modules: a login shell here (bash --login) knows no command `module`; install it, or Lmod")
    if done.returncode == NOT_LOADED:
        why = " ".join(line.strip() for line in lines[-4:-1]) or "module load failed and gave no reason"
        which = lines[-1] if lines and lines[-1] in names else ", ".join(names)  # a profile may print at the end, too
        raise ModulesError(f"modules: {which} cannot be loaded on this node: {why}")
    _, mark, text = done.stdout.partition(MARK)
    if done.returncode or not mark or len(text) > MOST_BYTES:
        last = lines[-1] if lines else "no word of it"
        raise ModulesError(f"modules: the login shell ended with exit code {done.returncode}: {last}")
    pairs = (entry.partition("=") for entry in os.fsdecode(text).split("\0") if "=" in entry)
    return {key: value for key, _, value in pairs if key not in SHELLS_OWN}
