"""Which NUMA node a device is near to."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.hardware.accelerator import numa_of


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("x", None), (None, None)])
def test_as_the_kernel_says(tmp_path: Path, text: str | None, node: int | None) -> None:
    if text is not None:
        folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert numa_of("0000:3b:00", str(tmp_path)) == node
