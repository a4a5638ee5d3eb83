"""A GPU driver that is not real under agents that are: the fake NVML library, built, and the state that it tells."""

from __future__ import annotations

from pathlib import Path

from tests.fakenvml.build import build, write_state


class Driver:
    """The fake driver's state, for all nodes of a local cluster: they share the GPUs of one machine."""

    def __init__(self, state: Path, gpus: int) -> None:
        self.state, self._gpus, self._sequence = state, gpus, 0
        self.set()

    def set(self, *lines: str) -> None:
        write_state(self.state, f"gpus {self._gpus}", "model H100", *lines)

    def xid(self, code: int, *gpus: int) -> None:
        """An Xid on each of these GPUs, at once."""
        lines = []
        for gpu in gpus:
            self._sequence += 1
            lines.append(f"xid {self._sequence} {gpu} {code}")
        self.set(*lines)

    def environ(self, folder: Path) -> dict[str, str]:
        """What makes a process take this driver for the machine's. The library is built in ``folder``."""
        return {"LD_LIBRARY_PATH": str(build(folder)), "FAKE_NVML": str(self.state)}
