"""Which Redis servers this machine has."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from nodeagent.local.privateredis import PROGRAMS, bundled_server

_VERSION = re.compile(r"(Redis|Valkey) server v=(\S+)")


@cache
def others() -> dict[str, Path]:
    """Programs beside the one that ``PrivateRedis`` starts, one of each version: name and version to path."""
    named: dict[str, Path] = {}
    for path in [*(Path(found) for name in PROGRAMS if (found := shutil.which(name))), bundled_server()]:
        if path is None:
            continue
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
        version = _VERSION.search(shown)
        assert version is not None, f"{path} --version prints {shown!r}"
        named.setdefault("-".join(version.groups()).lower(), path)
    return dict(list(named.items())[1:])
