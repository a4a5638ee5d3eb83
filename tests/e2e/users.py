"""The tool as another user of the machine (needs root, and a Python that every user can run)."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from tests.e2e.support import CALL_LIMIT, TOOL, UP_LIMIT, Cluster, cluster
from tests.readable import packages

STRANGER = "nobody"
SYSTEM_PYTHON = "/usr/bin/python3"


@cache
def why_not() -> str:
    """Why it cannot be done here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can become another user"
    if shutil.which(SYSTEM_PYTHON) is None:
        return f"no {SYSTEM_PYTHON}"
    probe = "import click, sys; import nodeagent.ctl.main; sys.exit(sys.version_info < (3, 11))"
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", probe], user=STRANGER, group=_gid(), extra_groups=[], env=_environ(), cwd="/",
        capture_output=True, timeout=CALL_LIMIT,
    )  # fmt: skip
    return "" if done.returncode == 0 else f"{STRANGER} cannot run the tool with {SYSTEM_PYTHON}"


def _gid() -> int:
    return pwd.getpwnam(STRANGER).pw_gid


def _environ() -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": str(packages()), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/",
    }  # fmt: skip


def ctl_as(cluster: Cluster, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """The tool as ``STRANGER``, against the cluster's first agent; the cluster's home must be open to them."""
    socket = next(iter(sorted(cluster.home.glob("local/run/*/*/api.sock"))))
    return subprocess.run(
        [SYSTEM_PYTHON, "-c", TOOL, "--agent", str(socket), *words], user=STRANGER, group=_gid(), extra_groups=[],
        env=_environ(), cwd="/", input=given, capture_output=True, text=True, timeout=CALL_LIMIT,
    )  # fmt: skip


@contextmanager
def open_cluster(nodes: int) -> Iterator[Cluster]:
    """A cluster whose agents' Python and folders every user can get at, as an installation's."""
    with cluster(0) as one:
        one.home.chmod(0o755)
        # What redis needs before Python 3.11.3; a newer Python that runs the tests has none to lend.
        (one.work / "async_timeout.py").write_text("from asyncio import timeout\n")
        one.environ["PYTHONPATH"] = f"{_environ()['PYTHONPATH']}:{one.work}"
        _compiled()
        one.up(nodes, SYSTEM_PYTHON)
        yield one


@cache
def _compiled() -> None:
    """As an installation is: else each agent compiles all that it imports anew, and so does each start of the tool."""
    subprocess.run([SYSTEM_PYTHON, "-m", "compileall", "-q", str(packages())], capture_output=True, timeout=UP_LIMIT)
