"""A worker's place, from its environment: job, node, generation, ranks, why it was started.

Standard library only. Under plain torchrun the values are the same, as far as it sets them. Must never ask another
process.
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
    """Empty if nodeagent did not start this process."""
    uid: str = ""
    """The job's id, a new one for each submit. Under torchrun its run id."""
    node: str = ""
    generation: int = 0
    """0 without nodeagent."""
    restarts: int = 0
    reason: str = ""
    """Why this generation was formed, in words."""
    faulty: Mapping[str, Any] = field(default_factory=dict)
    """``nodes`` and ``devices`` that were left out, and the reasons."""
    rank: int = 0
    local_rank: int = 0
    group_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    checkpoint_dir: Path | None = None
    checkpoint: str = ""
    """Name of the newest committed checkpoint when this generation was formed."""

    time_left: float | None = None
    """Seconds of the job's time limit that were left when this generation started; None without a limit."""

    @property
    def managed(self) -> bool:
        """Returns whether nodeagent started this process."""
        return bool(self.job)


def context(environ: Mapping[str, str] = os.environ) -> Context:
    """The context from the present environment. Raises ValueError if a variable is broken."""
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
