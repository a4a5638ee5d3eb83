"""NVIDIA's driver, of which every answer is drawn from bytes: refusals, absurd numbers, GPUs that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

ERRORS = (1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 20, 25, 26, 999)
"""Of NVML, known and unknown."""
MOSTLY = 249
"""Of 255 answers: the others are errors."""
UUIDS = ("GPU-a", "GPU-b", "MIG-c", "", "GPU-\u00e9", "x" * 300)


class Driver:
    """Stands in for the module ``pynvml``: its names are the real ones, its functions answer as the bytes say."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def _number(self) -> int:
        """Small mostly, up to 64 bits."""
        size = (1, 1, 1, 4, 8)[self._byte() % 5]
        return sum(self._byte() << (8 * i) for i in range(size))

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not name.startswith("nvml") or not callable(real) or name == "nvmlMemory_v2":
            return real

        def call(*_arguments: Any) -> Any:
            if self._byte() > MOSTLY:
                raise pynvml.NVMLError(ERRORS[self._byte() % len(ERRORS)])
            return self._answer(name)

        return call

    def _answer(self, name: str) -> Any:
        if name.endswith("UUID"):
            return UUIDS[self._byte() % len(UUIDS)]
        if name.endswith(("Name", "Version")):
            return ("NVIDIA H100", "", "570.1", "\ufffd\n")[self._byte() % 4]
        if name.endswith("Count"):
            return self._byte() % 4
        if name.endswith("ProcessesInfo") or name.endswith("RunningProcesses"):
            return [
                SimpleNamespace(pid=self._number(), usedGpuMemory=(None, self._number())[self._byte() % 2])
                for _ in range(self._byte() % 4)
            ]
        if name.endswith("FieldValues"):
            return [SimpleNamespace(nvmlReturn=self._byte() % 3, value=SimpleNamespace(uiVal=self._number()))]
        if name.endswith(("EccMode", "MigMode")):
            return [self._byte() % 3, self._byte() % 3]
        if name.endswith("RemappedRows"):
            return [self._number() for _ in range(4)]
        if name.endswith("PciInfo"):
            return SimpleNamespace(domain=self._number(), bus=self._byte(), device=self._byte())
        if name.endswith("MemoryInfo"):
            return SimpleNamespace(used=self._number())
        return self._number()
