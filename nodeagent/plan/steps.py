"""The steps a job can take, and the way each of them is put together. Chooses none of them: that is ``gang.py``'s
and its helpers'."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nodeagent.model.job import Control, JobRecord, Outcome, Phase, Spend
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, Member, Token
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.keepers import choose
from nodeagent.plan.placement import Placement, arranged, gang_of, place
from nodeagent.plan.world import make_world


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


def propose_or_hold(
    cluster: Cluster,
    job: JobRecord,
    cause: Cause,
    gone: tuple[str, ...],
    spend: Spend | None,
    planned: bool,
    without: Collection[str] = (),
    grace: float | None = None,
) -> Decision:
    placement = place(cluster, job, without)
    if placement.fits:
        return propose(cluster, job, cause, gone, spend, placement, planned, grace)
    text = f"{cause.text}; holds: {placement.missing}"
    return Decision(End("holding", text, gone, spend=spend, planned=planned), (text,))


def propose(
    cluster: Cluster,
    job: JobRecord,
    cause: Cause,
    gone: tuple[str, ...],
    spend: Spend | None,
    placement: Placement,
    planned: bool,
    grace: float | None = None,
) -> Decision:
    """``grace``: of a planned stop, None for the job's."""
    facts = {c.node: cluster.nodes[c.node].facts for c in placement.chosen}
    gang = gang_of(cluster, job.spec) if arranged(cluster, job.spec) else None
    paths, segment = (gang.paths, gang.segment) if gang is not None else (None, 0)
    members = make_world(job.head, placement.chosen, job.spec.role, facts, placement.places, paths, segment)
    stop = job.spec.grace if grace is None else grace
    form = cluster.timing.form_margin + (stop if planned else 0.0)
    keepers = choose(cluster, members.values())
    step = Propose(members, cause, gone, spend, planned, millis(form), placement.outside(), keepers, grace)
    return Decision(step, (cause.text,))
