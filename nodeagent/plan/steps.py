"""The steps a job can take. Chooses none of them: that is ``gang.py``'s and its helpers'."""

from __future__ import annotations

from dataclasses import dataclass, field

from nodeagent.model.job import Control, Outcome, Phase, Spend
from nodeagent.model.world import Cause, Member, Token


@dataclass(frozen=True, slots=True)
class Propose:
    """Propose the next generation (its random id and the proposer's name are added on the way to the store)."""

    members: dict[str, Member]
    cause: Cause
    lost: tuple[str, ...]
    spend: Spend | None
    planned: bool
    form_ms: int
    outside: dict[str, str]
    keepers: dict[str, str]
    grace: float | None = None
    """If planned: seconds from SIGTERM to SIGKILL, other than the job's."""
    claims: tuple[str, ...] = ()
    """Queues with a capability of which it takes more than the job has."""


@dataclass(frozen=True, slots=True)
class End:
    """End the generation (if any) and go to ``phase``."""

    phase: Phase
    reason: str
    lost: tuple[str, ...] = ()
    outcome: Outcome | None = None
    spend: Spend | None = None
    planned: bool = False
    delay_ms: int = 0
    grace: float | None = None
    """Seconds from SIGTERM to SIGKILL; None: the job's own."""
    control: Control | None = None
    """What is wanted of the job from then on; None: nothing else than before."""
    by_policy: bool = False
    """If the job succeeds: a policy completes it, whatever its workers have reported."""


@dataclass(frozen=True, slots=True)
class Activate:
    """Everything is acknowledged: make the forming generation active."""

    token: Token


@dataclass(frozen=True, slots=True)
class Settle:
    """End a pending scale: the new control, and the event that tells of it."""

    control: Control
    event: str
    text: str


@dataclass(frozen=True, slots=True)
class Judge:
    """Write down what ended the generation ``number``, now that it is known better."""

    number: int
    spend: Spend


@dataclass(frozen=True, slots=True)
class Remove:
    """The job has ended, nothing runs, and its deletion was asked for."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A step to take (None: wait) and the sentences that say why."""

    step: Propose | End | Activate | Settle | Judge | Remove | None
    why: tuple[str, ...] = ()
    at: int = 0
    """For a wait with a known end: the served time (ms) at which it is worth deciding again; 0 if unknown."""
    steady: bool = field(default=False, compare=False)
    """It holds for as long as the view stays the same: until ``at``, or for ever if that is 0."""
