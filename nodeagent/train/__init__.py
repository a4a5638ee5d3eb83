"""Optional help for worker scripts: what nodeagent knows of this worker, and checkpoints that lose nothing.

Runs in the job's own Python and imports nothing else of nodeagent; torch only if a module needs it. Works under plain
torchrun too, with fewer functions. Must never be imported by the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nodeagent.train.batches import Plan, scale_with_world
from nodeagent.train.context import Context, context
from nodeagent.train.leaving import Leaving, goodbye
from nodeagent.train.link import Link, LinkError
from nodeagent.train.progress import progress
from nodeagent.train.sampler import ExactData

if TYPE_CHECKING:
    from nodeagent.train.checkpoints import Checkpoints, resume
    from nodeagent.train.snapshots import restore, snapshot

__all__ = [
    "Checkpoints",
    "Context",
    "ExactData",
    "Leaving",
    "Link",
    "LinkError",
    "Plan",
    "context",
    "goodbye",
    "progress",
    "restore",
    "resume",
    "scale_with_world",
    "snapshot",
]

_WITH_TORCH = {
    "Checkpoints": "checkpoints", "restore": "snapshots", "resume": "checkpoints", "snapshot": "snapshots",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import modules that need torch at their first use."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
