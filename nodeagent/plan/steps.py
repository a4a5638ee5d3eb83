"""The steps a job can take, and the three state machines as tables: a job's phases, a generation, and a node's pod of
a job: which step leads from where to where. The documents' diagrams are drawn from them, and the simulation checks each
change against them.

Chooses no step; which one is taken, and when, is decided in ``job/gang.py`` and ``pods/pod.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from nodeagent.model.job import BudgetEntry, Control, Outcome, Phase, Setback
from nodeagent.model.world import Cause, GenerationState, Member, Token
from nodeagent.pods.base import PodStatus


@dataclass(frozen=True, slots=True)
class Propose:
    """Propose the next generation (its random id and the proposer's name are added on the way to the store)."""

    members: dict[str, Member]
    cause: Cause
    lost: tuple[str, ...]
    spend: BudgetEntry | None
    planned: bool
    form_ms: int
    outside: dict[str, str]
    failsafe_members: dict[str, str]
    grace: float | None = None
    """If planned: seconds from SIGTERM to SIGKILL, other than the job's."""
    claims: tuple[str, ...] = ()
    """Queues with a capability of which it takes more than the job has."""
    setbacks: tuple[Setback, ...] | None = None
    """What the job remembers from now on of nodes that were no good to it; None: what it did."""


@dataclass(frozen=True, slots=True)
class End:
    """End the generation (if any) and go to ``phase``."""

    phase: Phase
    reason: str
    lost: tuple[str, ...] = ()
    outcome: Outcome | None = None
    spend: BudgetEntry | None = None
    planned: bool = False
    delay_ms: int = 0
    grace: float | None = None
    """Seconds from SIGTERM to SIGKILL; None: the job's own."""
    control: Control | None = None
    """What is wanted of the job from then on; None: nothing else than before."""
    by_policy: bool = False
    """If the job succeeds: a policy completes it, whatever its workers have reported."""
    setbacks: tuple[Setback, ...] | None = None
    """As of ``Propose``."""


@dataclass(frozen=True, slots=True)
class Activate:
    """Everything is acknowledged: make the forming generation active."""

    token: Token


@dataclass(frozen=True, slots=True)
class Settle:
    """End a pending scale, or note that jobs which this one comes after have ended: the new control, and its event."""

    control: Control
    event: str
    text: str


@dataclass(frozen=True, slots=True)
class JudgeFault:
    """Write down what ended the generation ``number``, now that it is known better."""

    number: int
    spend: BudgetEntry


@dataclass(frozen=True, slots=True)
class Remove:
    """The job has ended, nothing runs, and its deletion was asked for."""


Words = tuple[str, ...]
"""Sentences for people."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A step to take (None: wait) and the sentences that say why."""

    step: Propose | End | Activate | Settle | JudgeFault | Remove | None
    says: Words | Callable[[], Words] = ()
    """Why; of a wait it may be worked out when somebody asks: each agent decides on all jobs again and again, and words
    about hundreds of nodes cost more than most decisions."""
    at: int = 0
    """For a wait with a known end: the served time (ms) at which it is worth deciding again; 0 if unknown."""
    steady: bool = False
    """It holds for as long as the view stays the same: until ``at``, or for ever if that is 0."""

    @property
    def why(self) -> Words:
        """The sentences."""
        return self.says if isinstance(self.says, tuple) else self.says()

    def __eq__(self, other: object) -> bool:
        """The same is done, and said, for as long."""
        if not isinstance(other, Decision):
            return NotImplemented
        return (self.step, self.at, self.why) == (other.step, other.at, other.why)

    __hash__ = None  # type: ignore[assignment]


_State = TypeVar("_State", bound=str)
_Step = TypeVar("_Step", bound=str)

PhaseStep = Literal["propose", "activate", "hold", "pause", "paused", "succeed", "fail", "stop"]

TRANSITIONS: dict[tuple[Phase, PhaseStep], Phase] = {
    ("queued", "propose"): "forming",
    ("queued", "paused"): "paused",
    ("queued", "fail"): "failed",
    ("queued", "stop"): "stopped",
    ("forming", "propose"): "forming",
    ("forming", "activate"): "running",
    ("forming", "hold"): "holding",
    ("forming", "pause"): "pausing",
    ("forming", "succeed"): "succeeded",
    ("forming", "fail"): "failed",
    ("forming", "stop"): "stopped",
    ("running", "propose"): "forming",
    ("running", "hold"): "holding",
    ("running", "pause"): "pausing",
    ("running", "succeed"): "succeeded",
    ("running", "fail"): "failed",
    ("running", "stop"): "stopped",
    ("holding", "propose"): "forming",
    ("holding", "pause"): "pausing",
    ("holding", "paused"): "paused",
    ("holding", "succeed"): "succeeded",
    ("holding", "fail"): "failed",
    ("holding", "stop"): "stopped",
    ("pausing", "paused"): "paused",
    ("pausing", "propose"): "forming",
    ("pausing", "hold"): "holding",
    ("pausing", "stop"): "stopped",
    ("paused", "propose"): "forming",
    ("paused", "hold"): "holding",
    ("paused", "stop"): "stopped",
}
"""(phase, step) to the next phase; every pair not here is impossible. Terminal phases have no way out."""

MEANING: dict[PhaseStep, str] = {
    "propose": "enough nodes fit: a new generation is proposed",
    "activate": "every member acknowledged, nobody may still run an older one",
    "hold": "fewer than min nodes fit, a restart backs off, a fault is not judged yet, or it made room for another job",
    "pause": "an operator or a policy paused it; workers take their grace",
    "paused": "the last worker of a paused job is gone",
    "succeed": "every worker of the generation exited 0, whatever was asked for since; or a policy completed it",
    "fail": "failed at its start, spent its budget, or by a policy",
    "stop": "an operator or a policy stopped it",
}


GenerationStep = Literal["acknowledged", "end"]

GENERATION: dict[tuple[GenerationState, GenerationStep], GenerationState] = {
    ("forming", "acknowledged"): "active",
    ("forming", "end"): "ended",
    ("active", "end"): "ended",
}
"""One generation, from the proposal that makes it (forming) on. The next proposal replaces it, whatever its state."""

GENERATION_MEANING: dict[GenerationStep, str] = {
    "acknowledged": "every member has promised that nothing older runs on it, and nobody may still run an older one",
    "end": "its job ends, pauses or holds, and no newer generation is proposed",
}

PodStage = Literal["empty", "promised", "started", "stopped"]
PodStep = Literal["promise", "start", "refuse", "stop", "stop and promise", "retire", "lose"]

POD: dict[tuple[PodStage, PodStep], PodStage] = {
    ("empty", "promise"): "promised",
    ("promised", "promise"): "promised",
    ("promised", "start"): "started",
    ("promised", "refuse"): "stopped",
    ("promised", "retire"): "empty",
    ("started", "stop"): "stopped",
    ("started", "stop and promise"): "promised",
    ("started", "lose"): "empty",
    ("stopped", "promise"): "promised",
    ("stopped", "retire"): "empty",
}
"""A node's pod of one job. A start is of the generation that was promised last: nothing lower starts again."""

POD_MEANING: dict[PodStep, str] = {
    "promise": "the node writes to its disk that it starts nothing below this generation, and acknowledges it",
    "start": "the generation that it promised is active",
    "refuse": "it comes too late, or a hook of the job says no: no worker is started",
    "stop": "its workers have ended: by themselves, by the shim's fence, or since the gang is formed anew",
    "stop and promise": "the promise to the next generation is written while the workers of the last one end",
    "retire": "the job ended, or does not need this node",
    "lose": "the machine, or the shim with all that it runs, is gone",
}


def pod_state(status: PodStatus | None) -> PodStage:
    """What its host says of a pod, in the words of the table. A pod that was only prepared is empty: it holds nothing
    that another generation has to wait for."""
    if status is None:
        return "empty"
    if not status.quiet:
        return "started"
    if status.highest is not None and (status.generation is None or status.generation.number < status.highest.number):
        return "promised"
    return "empty" if status.generation is None else "stopped"


def may_become(table: Mapping[tuple[_State, _Step], _State], before: _State, after: _State) -> bool:
    """Whether some single step of this table leads from ``before`` to ``after``; staying is always allowed."""
    return before == after or after in {to for (state, _), to in table.items() if state == before}


def phase_may_become(before: Phase, after: Phase) -> bool:
    """The same of a job's phase; ``pausing`` may be too short to be seen."""
    return may_become(TRANSITIONS, before, after) or (after == "paused" and may_become(TRANSITIONS, before, "pausing"))


def diagram(table: Mapping[tuple[_State, _Step], _State], begins: _State, ends: Collection[_State] = ()) -> str:
    """A Mermaid state diagram of a table, for the documents."""
    lines = ["stateDiagram-v2", f"    [*] --> {begins}"]
    lines += [f"    {before} --> {after}: {step}" for (before, step), after in table.items()]
    return "\n".join([*lines, *(f"    {state} --> [*]" for state in ends)])
