"""What a job's script imports and takes long to, found by reading it: preloaded where the job does not say what to
preload.

A guess: a package that is not there is left out, and so is one with which forking is unsafe. Never runs the script.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodeagent.model.jobspec import JobSpec

PYTHON = r"python(3(\.\d+)?)?"
"""Pattern of the names of interpreters."""


def script_of(command: tuple[str, ...]) -> Path | None:
    """SCRIPT of ``python [options] SCRIPT ...``."""
    if not command or not re.fullmatch(PYTHON, Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word in ("-m", "-c", "-"):
            return None
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return Path(word)
    return None


def module_of(command: tuple[str, ...], folder: Path = Path()) -> Path | None:
    """The file of ``python [-u] -m MODULE ...``, if it is in the folder; else the path where it would be."""
    words = command[1:][command[1:2] == ("-u",) :]
    if words[:1] != ("-m",) or len(words) < 2 or not re.fullmatch(PYTHON, Path(command[0]).name):
        return None
    path = Path(*words[1].split("."))
    return path / "__main__.py" if (folder / path).is_dir() else path.with_suffix(".py")


HEAVY = (
    "torch", "transformers", "lightning", "pytorch_lightning", "accelerate", "deepspeed", "paddle", "jax", "tensorflow",
    "mindspore",
)  # fmt: skip
"""Packages whose import costs seconds: each is preloaded if the script imports it, in this order."""
MOST_SOURCE = 1 << 20
"""Bytes of a script that is looked at."""


def guess_preload(command: tuple[str, ...], folder: Path = Path()) -> tuple[str, ...]:
    """The packages of ``HEAVY`` that the command's script imports; none for a command that is no Python script.
    ``folder``: where the command is run."""
    import ast

    from nodeagent.osutil.untrusted import UntrustedError, UntrustedFolder

    script = script_of(command) or module_of(command, folder)
    if script is None:
        return ()
    try:
        path = (folder / script).resolve(strict=True)
        with UntrustedFolder(path.parent) as its, its.open(path.name, also=path.stat().st_uid) as file:
            source = file.read(MOST_SOURCE + 1)
        tree = ast.parse(source if len(source) <= MOST_SOURCE else b"")
    except (OSError, UntrustedError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # the worker will report the error, in better words
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
    return tuple(name for name in HEAVY if name in found)


def guess_for(spec: JobSpec) -> JobSpec:
    """The job with what the scripts of its roles import. They are looked for where the job will look, on this machine;
    one that is not here adds nothing."""
    found = {name for role in spec.roles for name in guess_preload(role.command, Path(spec.working_dir))}
    return spec.model_copy(update={"guessed": tuple(name for name in HEAVY if name in found)})
