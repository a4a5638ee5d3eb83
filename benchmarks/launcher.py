"""What a benchmark needs of a launcher, the same for both: a gang that steps, nodes to kill, to bring back, to add."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.steplog import StepLog

PYTHON = sys.executable
MAX_RESTARTS = 50
"""More than there are trials: no budget must end a measurement."""
TRAIN = Path(__file__).with_name("train.py")


@dataclass(frozen=True, slots=True)
class Shape:
    """One training: how many nodes it may have, how many start, and how fast it steps."""

    nodes: int = 2
    least: int = 2
    most: int = 2
    workers: int = 2
    """Per node."""
    step_delay: float = 0.02
    """Seconds of sleep after each step: the machine's few cores are then not full before the fault."""
    ckpt_every: int = 10
    helped: bool = False
    """The script uses ``nodeagent.train``."""
    hang: float | None = None
    """Seconds without progress that are a hang; None: nobody looks."""
    auto: bool = False
    """It starts with ``least`` nodes and borrows idle ones; nodeagent only."""
    shared: bool = False
    """It fills its nodes, in a queue of its own beside another of the same weight; nodeagent only."""
    gpus: bool = False
    """Each worker has a GPU, of a driver that is not real; nodeagent only."""

    @property
    def world(self) -> int:
        return self.nodes * self.workers

    def command(self, folder: Path) -> list[str]:
        """The script and its arguments, without the interpreter."""
        return [
            str(TRAIN),
            *("--folder", str(folder)),
            *("--step-delay", str(self.step_delay)),
            *("--ckpt-every", str(self.ckpt_every)),
            *(("--helped",) if self.helped else ()),
        ]


class Launcher(Protocol):
    """A running training under one launcher."""

    log: StepLog

    def processes(self) -> set[int]:
        """Everything that runs for this training, all nodes and what they share."""
        ...

    def check(self) -> None:
        """Raises LaunchError when the training has ended."""
        ...

    def evidence(self) -> str:
        """What to read when something went wrong."""
        ...

    def killable(self) -> list[str]:
        """The nodes whose death the launcher claims to survive."""
        ...

    def kill_node(self, node: str) -> float:
        """SIGKILL every process of a node at once. Returns the moment before the first signal."""
        ...

    def start_node(self, node: str) -> None:
        """Bring a killed node back, or start one that was never there; returns without waiting for it to join."""
        ...


class LaunchError(Exception):
    """A launcher ended, or could not do what was asked; the text has the end of its log."""


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for an error."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) or "(empty)"
    except OSError as error:
        return f"({log}: {error.strerror})"
