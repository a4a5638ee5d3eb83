"""What one node sees of its workers while their gang may hang: facts only, who hangs is ``plan/hang.py``'s.

A pod tells it when its workers have shown no progress for the job's limit, or when another pod of the gang did.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nodeagent.model.base import Record

RankState = Literal["stopped", "blocked", "zombie", "busy", "idle"]
"""``stopped``: by SIGSTOP. ``blocked``: uninterruptible (D), mostly on a disk or device. ``zombie``: its
main thread has ended and others have not. All three for several looks in a row. Else ``busy`` (uses CPU), ``idle``."""

Overdue = Literal["no", "yes", "long"]


class RankFacts(Record):
    """One worker, as seen when the facts were taken; ages are seconds up to then."""

    rank: int
    state: RankState
    step: int | None = None
    """The newest it told; None: it told none (in this generation)."""
    phase: str = ""
    """The phase it told it is in, unless training."""
    age: float = Field(default=0.0, ge=0)
    """Since it told a step, or without that since it last wrote output, or started."""
    overdue: Overdue | None = None
    """Of one that tells its progress: past its limit, or (``auto`` only) past the longer one that holds while some
    worker still computes. None: it tells none."""
    silent: bool = False
    """No output for the limit."""
    quiet: bool = False
    """Next to no CPU time for the limit."""
    frozen: bool = False
    """``stopped``, ``blocked`` or ``zombie`` for the limit."""
    waits: bool | None = None
    """Its stack waits for other workers (a collective); None: it could not be read."""
    site: str = ""
    """Where its main thread is, as ``function (file:line)``."""
    stacks: str = ""
    """The file on its node with all its stacks."""


class Stall(Record):
    """The living workers of one pod."""

    limit: float = Field(gt=0)
    """Seconds without progress that were allowed."""
    suspects: bool
    """This pod has seen no progress for the limit; False: it only answers for others that do."""
    ranks: tuple[RankFacts, ...]
