"""A gang whose workers are in containers, on real agents: training in step, a worker killed, a node without power."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.support import DIGITS, ROOT, Cluster, check_steps, cluster, digits_job, is_alive, read_steps
from tests.integration.podman_support import make_image, podman_path, why_not

pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]  # fmt: skip
FIRST = 120.0
"""Seconds for a start without a fork server: containers, and torch's import, on a busy machine."""


@pytest.fixture
def two() -> Iterator[Cluster]:
    with cluster(0) as one:
        one.environ["PATH"] = podman_path(one.home / "bin") + os.pathsep + one.environ["PATH"]
        one.up(2)
        yield one


def contained_job(work: Path, steps: int) -> str:
    """The digits example in an image that has nothing but the machine's /usr and this installation."""
    image = make_image(work / "image")
    installed = {Path(find_spec(name).origin or "").parents[1] for name in ("torch", "numpy")}  # type: ignore[union-attr]
    seen = sorted({Path("/usr"), ROOT, Path(sys.prefix), Path(sys.base_prefix), *installed})
    container = {"image": str(image), "binds": [f"{path}:ro" for path in seen]}
    lines = digits_job(work, nodes="1:2", steps=steps, workers=1, delay=0.05).splitlines()
    kept = [line for line in lines if not line.startswith("preload")]
    return "\n".join([*kept, f"container: {json.dumps(container)}", f"env: {{PYTHONPATH: {ROOT}}}"]) + "\n"


def test_a_gang_in_containers(two: Cluster, reference: dict[int, float]) -> None:
    two.submit(contained_job(two.work, 600))
    two.until_running("digits", 2, FIRST)
    two.until_steps("digits", 10, FIRST)

    before = two.job("digits")["generation"]
    os.kill(two.workers("digits", "n2")[1], signal.SIGKILL)  # the runtime: its container is left to the shim
    two.until_running("digits", 2, FIRST, above=before)
    two.until_steps("digits", 10, FIRST)
    assert two.restarts_counted("digits") == 1

    before = two.job("digits")["generation"]
    inside = [pid for pid in _of_digits() if is_alive(pid)]
    assert len(inside) >= 2
    two.ctl("local", "kill", "n2")
    two.until_running("digits", 1, FIRST, above=before)
    assert not [pid for pid in inside if is_alive(pid)], "the gang is formed anew when all of the older one is gone"
    two.until_steps("digits", 5, FIRST)
    two.ctl("stop", "digits")
    two.until_phase("digits", "stopped", FIRST)
    assert not [pid for pid in _of_digits() if is_alive(pid)]
    check_steps(read_steps(two.work), reference)


def _of_digits() -> list[int]:
    """Processes that run the example in a container: other tests run it beside this one, too."""
    found, here = [], Path("/proc/self/ns/mnt").readlink()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                inside = (entry / "ns" / "mnt").readlink() != here
            except OSError:
                continue
            if inside and os.fsencode(DIGITS) in words and b"podman" not in words[0]:
                found.append(int(entry.name))
    return found
