"""What is known of one worker, from before its fork until its record.

Standard library only. Holds; who may change what is the gang's and its helpers' to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeagent.workers.shim_output import Capture, RotatingFile
from nodeagent.workers.shim_record import Farewell


@dataclass(slots=True)
class Worker:
    """One rank of one generation on this node. Without a ``pid`` it has not been forked yet."""

    rank: int
    local_rank: int
    error_file: Path
    log: RotatingFile
    captures: tuple[Capture, Capture]
    pid: int = 0
    pidfd: int = -1
    by_standby: bool = False
    ended: bool = False
    stopped: bool = False
    fenced: bool = False
    order: int = 0
    leave: Callable[[float], None] | None = None
    """Asks it to leave by itself within so many seconds, which it wants to be instead of a SIGTERM."""
    farewell: Farewell = field(default_factory=Farewell)
    record: dict[str, Any] | None = None
    step: int | None = None
    doing: str = ""
    """What it told of its progress, as last shown."""
    stepped: float | None = None
    """When (CLOCK_BOOTTIME) it told its first step."""
