"""`make demo` keeps its promise: faults, scaling, the right losses, the right accuracy, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.support import ROOT, cluster

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis]

DEMO_LIMIT = 1200.0
"""Seconds: it takes 80 on an idle machine of two cores."""


@pytest.mark.timeout(DEMO_LIMIT + 60)
def test_the_demo_tells_its_story() -> None:
    with cluster(0) as home:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "demo" / "demo.py")], env=home.environ, cwd=ROOT,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEMO_LIMIT,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "kill -9 of the worker",
        "power cut of node",
        "not one step was disturbed",
        "scale up to 3 nodes",
        "scale down to 2 nodes",
        "all 600 losses equal the undisturbed run's",
        "never two at the same time",
        "the restart budget paid for the killed worker only",
    ):
        assert words in done.stdout, f"{words!r} is missing:\n{done.stdout}"
