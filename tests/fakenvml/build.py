"""Builds the fake driver's library, and holds its state."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fakenvml.c")
FUNCTIONS = frozenset(re.findall(r"^int (nvml\w+)\(", SOURCE.read_text(), re.MULTILINE))
"""What the fake driver has: nothing else of it can fail or hang."""


def build(folder: Path, *flags: str) -> Path:
    """The library in a folder of its own, for LD_LIBRARY_PATH. Skips the test where nothing would read it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py, which reads the driver, is not installed")
    folder.mkdir(exist_ok=True)
    out = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", *flags, "-o", str(out), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def write_state(file: Path, *lines: str) -> None:
    """Replace the driver's state as a whole.

    Raises:
        ValueError: a function is to fail or hang that the driver lacks, so that nobody would notice.
    """
    for kind, function, *_ in (words for line in lines if (words := line.split())[:1] in (["error"], ["hang"])):
        if function not in FUNCTIONS:
            raise ValueError(f"{kind} {function}: the fake driver has no such function")
    new = file.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(file)
