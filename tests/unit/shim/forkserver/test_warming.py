"""What the fork server does to make forks fast, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.shim.forkserver import warming

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import warming
def huge():
    return sum(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("AnonHugePages:"))
kept = [bytes([i % 251]) * 4000 for i in range(6000)]
before = huge()
warming.huge_pages()
assert all(piece == bytes([i % 251]) * 4000 for i, piece in enumerate(kept))
print(before, huge())
"""
KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(
    KERNEL < (6, 1) or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux 6.1, huge pages"
)
def test_memory_moves_to_large_pages_and_keeps_its_content() -> None:
    folder = str(Path(warming.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, check=True, timeout=60
    )
    before, after = map(int, done.stdout.split())
    assert after > before


def test_without_a_framework_there_is_nothing_to_warm_up() -> None:
    """Nor is one imported for it."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import warming; before = set(sys.modules)\n"
    script += "warming.warm_up(); print(sorted(set(sys.modules) - before))"
    folder = str(Path(warming.__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_backward_pass_is_left_out_where_it_would_look_for_devices() -> None:
    class Version:
        def __init__(self, **backends: str) -> None:
            self.__dict__.update({"cuda": None, "hip": None} | backends)

    class Torch:
        def __init__(self, version: Version) -> None:
            self.version = version

    assert not warming.has_devices(Torch(Version()))
    assert warming.has_devices(Torch(Version(cuda="12.8")))
    assert warming.has_devices(Torch(Version(hip="6.2")))
