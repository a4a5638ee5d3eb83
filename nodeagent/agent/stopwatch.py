"""How long each phase of a recovery takes, as this node sees it: from a fault, or the request for another gang, until
the workers run again; and of a job's first start until its workers have made their first step, if they report it.

Owns the measuring. The agent of group rank 0 tells of the whole gang; what only others can know (how long their workers
took to die) comes with their acknowledgements. Must never decide anything: a restart of the agent forgets it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.pods.base import PodStatus

STEPPED = "stepped"
"""The phase from the start to the first step, of workers that tell their steps."""

REPORT_AFTER = 1.0
"""Seconds from the start of the workers until it is reported: writing to the store must not disturb their first
steps."""
STEP_BOUND = 600.0
"""Seconds for which the first step is waited for, of a job that tells it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One that is over: a name of a phase to its seconds, in order; ``whole`` is from the fault to the start."""

    uid: str
    token: Token
    cause: str
    phases: dict[str, float]
    at: float
    """When it was over (this agent's clock): at the workers' first step, or their start."""
    first: bool = False
    """It is the job's first start: its devices' time until then is overhead, and it is no recovery."""

    @property
    def text(self) -> str:
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items() if name != "whole")
        return f"workers run{'' if self.first else ' again'} after {self.phases['whole']:.3f} s: {parts}"


@dataclass(slots=True)
class _Watch:
    number: int
    known: float
    """When this agent first knew of what led to it."""
    detected: float
    forming: float
    quiet: float | None = field(default=None, init=False)
    active: float | None = field(default=None, init=False)
    started: float | None = field(default=None, init=False)
    counted: bool = field(default=False, init=False)
    stepped: float | None = field(default=None, init=False)
    first: bool = field(default=False, init=False)
    """Of the job's first start: nobody knows yet whether its workers report steps."""

    @property
    def only_awaits_a_step(self) -> bool:
        """What may come next comes with the pod's status: nobody has to look."""
        return self.first and self.started is not None and self.stepped is None


class Stopwatch:
    """Times are of this agent's clock, in seconds."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._faults: dict[str, tuple[int, float, float]] = {}
        """Job to (generation at fault, when it was known here, seconds from the worker's death to its report)."""
        self._watches: dict[str, _Watch] = {}
        self._telling: set[str] = set()
        """Jobs whose workers here have reported a first step."""
        self._awaited: set[str] = set()
        """Jobs of whose generation, forming or active, this node is a member, and which is being watched."""

    def look(self, jobs: Mapping[str, JobRecord], statuses: Mapping[str, PodStatus], now: float) -> None:
        """Note what has changed since the last look."""
        self._faults = {uid: fault for uid, fault in self._faults.items() if uid in jobs}
        self._watches = {uid: watch for uid, watch in self._watches.items() if uid in jobs}
        self._telling &= jobs.keys()
        self._awaited.clear()
        for job in jobs.values():
            generation = job.generation
            if generation is None or generation.state == "ended":
                continue
            if generation.state == "active":
                self._active(job, statuses.get(job.uid), now)
            elif self._node in generation.members:
                self._forming(job, generation.number, statuses.get(job.uid), now)
            if self._node not in generation.members:
                self._watches.pop(job.uid, None)
            elif job.uid in self._watches:
                self._awaited.add(job.uid)

    def _forming(self, job: JobRecord, number: int, status: PodStatus | None, now: float) -> None:
        watch = self._watches.get(job.uid)
        if watch is None or watch.number != number:
            at_fault, known, detected = self._faults.pop(job.uid, (0, now, 0.0))
            if watch is not None and watch.active is None:  # formed anew, before it had become whole
                known, detected = watch.known, watch.detected
            elif at_fault != job.last_number:
                known, detected = now, _detected(job.last_reports)
            watch = self._watches[job.uid] = _Watch(number, known, detected, now)
        if watch.quiet is None and (status is None or status.quiet):
            watch.quiet = now

    def _active(self, job: JobRecord, status: PodStatus | None, now: float) -> None:
        assert job.generation is not None
        if any(report.seq for report in job.generation.reports.values()):
            self._faults.setdefault(job.uid, (job.generation.number, now, _detected(job.generation.reports)))
        mine = status if status is not None and status.generation == job.generation.token else None
        stepped = mine.stepped if mine is not None else None
        if stepped is not None:
            self._telling.add(job.uid)
        watch = self._watches.get(job.uid)
        if watch is None or watch.number != job.generation.number:
            return
        if watch.active is None:
            watch.active = now
        if mine is not None and mine.phase != "starting" and watch.started is None:
            watch.started = now
        if stepped is not None:  # the shim's word, which is the job's user's
            stepped = min(max(stepped, watch.active), now)
        watch.stepped, watch.first = stepped, job.restarts == 0

    @property
    def running(self) -> bool:
        """Some recovery of a gang with this node is not reported yet, and time alone may change that."""
        return any(uid in self._awaited and not watch.only_awaits_a_step for uid, watch in self._watches.items())

    def stamp(self, uid: str, token: Token, ack: Ack, now: float) -> Ack:
        """The acknowledgement, with how long this node took."""
        watch = self._watches.get(uid)
        if watch is None or watch.number != token.number or watch.quiet is None:
            return ack
        stopped, ready = round(watch.quiet - watch.forming, 4), round(now - watch.quiet, 4)
        return ack.model_copy(update={"stopped": stopped, "ready": ready})

    def over(self, jobs: Mapping[str, JobRecord]) -> list[Recovery]:
        """Recoveries to count now: each once, by the agent of group rank 0, and not the first start of a job. At once:
        the next fault may come before ``finished`` would tell of them."""
        out = []
        for uid, watch in self._watches.items():
            if watch.started is not None and not watch.counted and uid in jobs:
                watch.counted = True
                out.append(self._recovery(jobs[uid], watch))
        return [recovery for recovery in out if recovery is not None and not recovery.first]

    def finished(self, jobs: Mapping[str, JobRecord], now: float) -> list[Recovery]:
        """The same, to tell people of now: those after which the workers run undisturbed. Also first starts of workers
        that report their first step; of others nobody knows how long they needed."""
        out = []
        for uid, watch in list(self._watches.items()):
            if watch.active is None or watch.started is None or now < watch.started + REPORT_AFTER or uid not in jobs:
                continue
            recovery = self._recovery(jobs[uid], watch)
            awaited = uid in self._telling or (watch.first and recovery is not None)
            if awaited and watch.stepped is None and now < watch.started + STEP_BOUND:
                continue
            del self._watches[uid]
            if not watch.first or watch.stepped is not None:
                out.append(recovery)
        return [recovery for recovery in out if recovery is not None]

    def _recovery(self, job: JobRecord, watch: _Watch) -> Recovery | None:
        """None: it is not this node's to tell."""
        generation = job.generation
        assert watch.active is not None and watch.started is not None
        if generation is None or generation.number != watch.number or generation.ordered()[0].node != self._node:
            return None
        formed, started = watch.active - watch.known, watch.started - watch.active
        phases = {
            **({} if watch.first else {"detected": watch.detected}),
            "stopped": generation.stopped,
            "acknowledged": generation.ready,
            "formed": formed,
            "started": started,
            **({} if watch.stepped is None else {STEPPED: max(0.0, watch.stepped - watch.started)}),
            "whole": watch.detected + formed + started,
        }
        return Recovery(
            job.uid, generation.token, generation.cause.kind, phases, watch.stepped or watch.started, watch.first
        )


def _detected(reports: Mapping[str, PodReport]) -> float:
    """Of the first fault among them."""
    first = min((r for r in reports.values() if r.seq), key=lambda r: r.seq, default=None)
    return first.detected if first is not None else 0.0
