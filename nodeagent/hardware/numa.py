"""Which NUMA node a device on the PCIe bus is near to, as the kernel says. Used by the probes, in their own processes:
a broken driver can block whoever reads its files."""

from __future__ import annotations

from pathlib import Path


def numa_of(pci: str, root: Path = Path("/")) -> int | None:
    """``pci``: ``0000:3b:00``. None: the kernel does not say, or the machine has only one."""
    try:
        node = int((root / "sys/bus/pci/devices" / f"{pci}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
