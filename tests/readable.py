"""nodeagent, and what it imports, where every user of the machine can read it: for tests that become another user.

A clone may lie where nobody else may enter (root's home, a private temporary folder). Must never be used to see whether
a clone can be read, only to do without that.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@cache
def packages() -> Path:
    """A folder for PYTHONPATH with nodeagent and its dependencies, one for each process of the tests; it goes with
    that."""
    folder = Path(tempfile.mkdtemp(prefix="na-readable-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    shutil.copytree(ROOT / "nodeagent", folder / "nodeagent", ignore=shutil.ignore_patterns("__pycache__"))
    for found in _dependencies("nodeagent", "embedded"):
        for file in found.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(found.locate_file(file)), target)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)
    return folder


def program(folder: Path, python: str) -> str:
    """An "interpreter" in this folder: this Python, which takes nodeagent from the copy whatever it is started with."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={packages()} exec {python} "$@"\n')
    file.chmod(0o755)
    return str(file)


def _dependencies(name: str, extra: str) -> list[Distribution]:
    """What this distribution needs, with an extra of it, and what that needs in turn, as far as it is installed."""
    found: dict[str, Distribution] = {}
    todo = [(name, extra)]
    while todo:
        of, with_extra = todo.pop()
        for requirement in map(Requirement, distribution(of).requires or ()):
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": with_extra}):
                continue
            if key not in found and (there := _installed(key)) is not None:
                found[key] = there
                todo.append((key, ""))
    return list(found.values())


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:  # an optional one; what needs the others says so when it is imported
        return None
