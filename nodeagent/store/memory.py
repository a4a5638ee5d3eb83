"""The in-memory store: ``MemoryServer`` holds the state, ``MemoryStore`` is one client of it.

For the simulation and for tests: the same contract as Redis, time only from the clock that is passed in, no threads,
nothing random. Must never do a step itself: the steps are in ``twin/``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from nodeagent.model.event import Event
from nodeagent.model.job import Admission, Control, JobRecord, Quota, first_control
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing
from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.store.messages import (
    Answer,
    Beat,
    BeatReply,
    Ending,
    Forgotten,
    JoinReply,
    Judgement,
    Offer,
    Proposal,
    Restored,
    Saves,
    Settlement,
)
from nodeagent.store.twin import commits, generation, lease, operator, restore
from nodeagent.store.twin.state import State, event_order

Written = TypeVar("Written", JobRecord, NodeRecord)


class MemoryServer:
    """The server: state, run id, and the bell that wakes waiters.

    ``clock`` gives the server's time in seconds; it may stand still or jump, as a real one may.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._starts = 1
        self._promoted = 0
        self._bell = asyncio.Event()
        self._rung = ("0-0", 0)
        self.state = State("memory-1")

    @property
    def run_id(self) -> str:
        """Identity of the server process, and of the history of writes that it is in."""
        return f"run-{self._starts}" + (f"-{self._promoted}" if self._promoted else "")

    def restart(self, keep_data: bool = True) -> None:
        """A new server process, with the old data or (``keep_data=False``) emptied."""
        self._starts += 1
        if not keep_data:
            self.state = State(f"memory-{self._starts}")
            self._rung = ("0-0", 0)

    def put_back(self, state: State) -> None:
        """A new server process with older data."""
        self.restart()
        self.state = state
        self._rung = (state.newest_event, state.saves)

    def fail_back(self, state: State) -> None:
        """The very same process, which was a replica in between, with the data that it had."""
        self._promoted += 1
        self.state = state
        self._rung = (state.newest_event, state.saves)

    def now(self) -> int:
        """The server's clock in whole milliseconds."""
        return int(self._clock() * 1000)

    def step(self) -> State:
        """Enter a step: the state, its served clock advanced."""
        self.state.enter(self.run_id, self.now())
        return self.state

    def settled(self) -> State:
        """Enter a step that decides something: refused while the store is recovering."""
        state = self.step()
        state.check_settled()
        return state

    def ring(self) -> None:
        """Wake waiters if events were written, or saves told on, since."""
        newest = (self.state.newest_event, self.state.saves)
        if newest != self._rung:
            self._rung = newest
            self._bell.set()
            self._bell = asyncio.Event()

    async def rung(self) -> None:
        """Until the next event is written, or save told on."""
        await self._bell.wait()


class MemoryStore:
    """One client. See ``Store`` for what each method means."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def join(
        self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing, regroup: int = 0
    ) -> JoinReply:
        reply = lease.join(self._server.step(), node, incarnation, facts, timing, regroup)
        self._server.ring()
        return reply

    async def beat(self, beat: Beat) -> BeatReply:
        reply = lease.beat(self._server.step(), beat)
        self._server.ring()
        return reply

    async def restore(self, offer: Offer) -> Restored:
        reply = restore.restore(self._server.step(), offer)
        self._server.ring()
        return reply

    async def leave(self, node: str, incarnation: Incarnation) -> None:
        lease.leave(self._server.settled(), node, incarnation)
        self._server.ring()

    async def propose(self, proposal: Proposal) -> JobRecord:
        return self._done(generation.propose(self._server.settled(), proposal))

    async def ack(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, ack: Ack, last: PodReport | None
    ) -> JobRecord:
        return self._done(generation.ack(self._server.settled(), uid, token, node, incarnation, ack, last))

    async def activate(self, uid: str, token: Token) -> JobRecord:
        return self._done(generation.activate(self._server.settled(), uid, token))

    async def report(self, uid: str, token: Token, node: str, incarnation: Incarnation, report: PodReport) -> JobRecord:
        return self._done(generation.report(self._server.settled(), uid, token, node, incarnation, report))

    async def commit(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        name: str,
        step: int,
        order: int,
        signature: str = "",
    ) -> JobRecord:
        return self._done(
            commits.commit(self._server.settled(), uid, token, node, incarnation, name, step, order, signature)
        )

    async def end(self, ending: Ending) -> JobRecord:
        return self._done(generation.end(self._server.settled(), ending))

    async def submit(
        self,
        uid: str,
        spec: JobSpec,
        owner: int,
        wall: float,
        by: str,
        request: str,
        *,
        control: Control | None = None,
        admission: Admission | None = None,
        quota: Quota | None = None,
    ) -> JobRecord:
        signed = first_control(spec, by, control), admission
        job = operator.submit(self._server.settled(), uid, spec, owner, wall, by, request, *signed, quota)
        return self._asked(job)

    async def control(
        self, uid: str, expect_rev: int, control: Control | None, request: str, event: str, text: str, did: str = ""
    ) -> JobRecord:
        job = operator.control(self._server.settled(), uid, expect_rev, control, request, event, text, did)
        return self._asked(job)

    async def renew(self, uid: str, expect: str, admission: Admission) -> JobRecord:
        return self._done(operator.renew(self._server.settled(), uid, expect, admission))

    async def request(self, request: str) -> Answer | None:
        return self._server.state.requests.get(request)

    async def settle(self, settlement: Settlement) -> JobRecord:
        return self._done(generation.settle(self._server.settled(), settlement))

    async def judge(self, judgement: Judgement) -> JobRecord:
        return self._done(generation.judge(self._server.settled(), judgement))

    async def keep(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        expect: Mapping[str, str],
        keepers: Mapping[str, str],
    ) -> JobRecord:
        step = generation.keep(self._server.settled(), uid, token, node, incarnation, expect, keepers)
        return self._done(step)

    async def forget(self, node: str, by: str) -> Forgotten:
        forgotten = lease.forget(self._server.settled(), node, by)
        self._asked(forgotten.node)
        return forgotten

    async def remove(self, uid: str) -> None:
        operator.remove(self._server.settled(), uid)
        self._server.ring()

    async def cordon(self, node: str, cordon: Cordon | None, request: str) -> NodeRecord:
        return self._asked(lease.cordon(self._server.settled(), node, cordon, request))

    async def pods(self, uid: str) -> tuple[PodState, ...]:
        state, now = self._server.state, self._server.now()
        for key in [key for key, (_, until) in state.pods.items() if until <= now]:
            del state.pods[key]
        return tuple(state.pods[key][0] for key in sorted(state.pods) if key[0] == uid and key[1] in state.nodes)

    async def events(self, after: str, limit: int) -> tuple[Event, ...]:
        newer = [e for e in self._server.state.events if event_order(e.id) > event_order(after)]
        return tuple(newer[:limit] if limit >= 0 else newer[limit:])

    async def wait(self, after: str, timeout: float) -> str:
        try:
            async with asyncio.timeout(timeout):
                while event_order(self._server.state.newest_event) <= event_order(after):
                    await self._server.rung()
        except TimeoutError:
            return after
        return self._server.state.newest_event

    async def saved(self, after: str, timeout: float) -> Saves:
        try:
            async with asyncio.timeout(timeout):
                while after and f"{self._server.state.saves}-0" == after:
                    await self._server.rung()
        except TimeoutError:
            pass
        state = self._server.state
        return Saves(at=f"{state.saves}-0", nodes=dict(state.saved))

    async def close(self) -> None:
        return None

    def _asked(self, record: Written) -> Written:
        """An operator wrote: somebody waits until it is on the disks of nodes."""
        self._server.state.asked = self._server.state.rev
        self._server.ring()
        return record

    def _done(self, job: JobRecord) -> JobRecord:
        self._server.ring()
        return job
