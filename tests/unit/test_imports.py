"""What a program must not import: it would start late, or hold hundreds of megabytes on each node."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy")


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("nodeagent.agent.serve", HEAVY),
        ("nodeagent.ctl.main", (*HEAVY, "aiohttp", "redis", "pydantic", "yaml")),
        ("nodeagent.lease.main", (*HEAVY, "asyncio", "redis", "pydantic")),
        ("nodeagent.shim.main", (*HEAVY, "redis", "aiohttp")),
        ("nodeagent.train", HEAVY),
        ("nodeagent.train.progress", HEAVY),
        ("nodeagent.train.writeout", HEAVY),
    ],
)
def test_nothing_heavy_is_imported(module: str, without: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set(sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", code, *without], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
