"""The site's environment modules: what loading them makes of an environment, seen once, before anything of the job
runs on this node.

A login shell of the job's user loads them, as on a terminal; the environment that comes of it goes to fork server,
workers and hooks alike, so no start of workers runs a shell. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

LOAD_BOUND = 15.0
"""Seconds for the shell; less than the checks have."""
MOST_BYTES = 1 << 20
"""Of the environment."""
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


class ModulesError(Exception):
    """``str()`` is the sentence for the person."""


def loaded(names: Sequence[str], base: Mapping[str, str]) -> dict[str, str]:
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
        raise ModulesError(f"modules: {bash} cannot be run: {error.strerror}") from None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == NO_COMMAND:
        raise ModulesError("modules: a login shell here (bash --login) knows no command `module`; install it, or Lmod")
    if done.returncode == NOT_LOADED:
        why = " ".join(line.strip() for line in lines[-4:-1]) or "module load failed and gave no reason"
        raise ModulesError(f"modules: {lines[-1]} cannot be loaded on this node: {why}")
    _, mark, text = done.stdout.partition(MARK)
    if done.returncode or not mark or len(text) > MOST_BYTES:
        last = lines[-1] if lines else "no word of it"
        raise ModulesError(f"modules: the login shell ended with exit code {done.returncode}: {last}")
    pairs = (entry.partition("=") for entry in os.fsdecode(text).split("\0") if "=" in entry)
    return {key: value for key, _, value in pairs if key not in SHELLS_OWN}
