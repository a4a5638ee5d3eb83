"""What a worker's environment says of its place: job, node, generation, ranks, why it was started.

Standard library only; the same values under plain torchrun, as far as it has them. Must never ask anybody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Context:
    """One worker of one generation."""

    job: str = ""
    """Empty when nodeagent did not start this process."""
    uid: str = ""
    """The job's id: another one for each submit. Under torchrun its run id."""
    node: str = ""
    generation: int = 0
    """0 without nodeagent."""
    restarts: int = 0
    reason: str = ""
    """Why this generation was formed, in words."""
    faulty: Mapping[str, Any] = field(default_factory=dict)
    """``nodes`` and ``devices`` that were left out, and why."""
    rank: int = 0
    local_rank: int = 0
    group_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    checkpoint_dir: Path | None = None
    checkpoint: str = ""
    """Name of the one that was committed last, when this generation was formed."""

    time_left: float | None = None
    """Seconds of the job's time limit that were left when this generation started; None without a limit."""

    @property
    def managed(self) -> bool:
        """Started by nodeagent."""
        return bool(self.job)


def context(environ: Mapping[str, str] = os.environ) -> Context:
    """As the environment has it now. Raises ValueError for one that is broken."""
    folder = environ.get("NODEAGENT_CHECKPOINT_DIR")

    def number(name: str, missing: int = 0) -> int:
        text = environ.get(name) or missing
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} in the environment is not a number") from None

    return Context(
        job=environ.get("NODEAGENT_JOB", ""),
        uid=environ.get("TORCHELASTIC_RUN_ID", ""),
        node=environ.get("NODEAGENT_NODE", ""),
        generation=number("NODEAGENT_GENERATION"),
        restarts=number("NODEAGENT_RESTARTS" if "NODEAGENT_RESTARTS" in environ else "TORCHELASTIC_RESTART_COUNT"),
        reason=environ.get("NODEAGENT_REASON", ""),
        faulty=json.loads(environ.get("NODEAGENT_FAULTY") or "{}"),
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK"),
        group_rank=number("GROUP_RANK"),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        checkpoint_dir=Path(folder) if folder else None,
        checkpoint=environ.get("NODEAGENT_CHECKPOINT", ""),
        time_left=float(environ["NODEAGENT_TIME_LEFT"]) if "NODEAGENT_TIME_LEFT" in environ else None,
    )
