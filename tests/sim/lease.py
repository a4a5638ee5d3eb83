"""The lease process of a simulated machine: the production decisions, with the machine's clock, records and link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from nodeagent.lease.core import Core, Departure, State
from nodeagent.lease.order import Order, Server, Step
from nodeagent.lease.signs import Pulse
from nodeagent.model.timing import Timing, millis
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.store.calls import Calls
from nodeagent.store.keys import prefix
from tests.inprocess import server as inprocess
from tests.inprocess.lease import renew_lease
from tests.inprocess.server import CLUSTER, HereLinks
from tests.sim.machine import GRACE, SimMachine
from tests.sim.network import Gate, Link, LinkedStore
from tests.sim.virtual import SimClock

BACK = 0.1
"""Seconds until a lease process that was killed is there again: whoever supervises it starts it at once."""
_NOWHERE = Server(path="", host="", port=0, greeting=(), tls=None)
_NONE = Step(sha="", source="")


class LeaseSteps:
    """What a lease process asks of the store."""

    def __init__(self, server: inprocess.Server) -> None:
        links = HereLinks(server)
        self._calls = Calls(links, links, prefix(CLUSTER), 5.0)

    async def renew(self, order: Order, asks: bool) -> str:
        """Who waits for the node."""
        return await renew_lease(self._calls, order.node, order.life, order.era, millis(order.lease), asks=asks)

    async def leave(self, order: Order, why: str) -> None:
        about = {"node": order.node, "life": order.life, "start": order.start, "era": order.era, "why": why}
        await self._calls.step("leave", about)


class SimLease:
    """One machine's lease process, through any number of deaths. What is on its disk outlives them: the order, and the
    departure that it has decided on."""

    def __init__(
        self,
        machine: SimMachine,
        clock: SimClock,
        link: Link,
        server: inprocess.Server,
        timing: Timing,
        patience: float,
    ) -> None:
        self.machine, self.clock = machine, clock
        self._timing, self._patience = timing, patience
        self.gate = Gate()
        self._steps: Any = LinkedStore(LeaseSteps(server), link, self.gate, random.Random(machine.name))
        self.order: Order | None = None
        self.departure: Departure | None = None
        self.core: Core | None = None
        self._words = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pulse: Pulse | None = None

    @property
    def state(self) -> str:
        return self.core.state if self.core is not None else "dead"

    # --- the process

    def start(self) -> None:
        if self._task is None and self.machine.powered:
            granted = {uid: grant.until for uid, grant in self.machine.grants.items()}
            self.core = Core(self.clock.now(), self.departure, granted)
            self._task = asyncio.get_running_loop().create_task(self._run(self.core), name=f"lease {self.machine.name}")

    def kill(self) -> None:
        """SIGKILL; it is back in a moment."""
        self.end()
        self.machine.later(BACK, self.start)

    def end(self) -> None:
        """SIGKILL, and nobody starts it again."""
        if self._task is not None:
            self._task.cancel()
        self._task, self.core, self._pulse = None, None, None

    def cut_power(self) -> None:
        """Its files are gone with it."""
        self.end()
        self.order = self.departure = None

    async def _run(self, core: Core) -> None:
        while True:
            await self.gate.passed()
            core.take(self.clock.now(), self.order)
            obeyed = {uid: pod.obeyed for uid, pod in self.machine.pods.items()}
            call = core.look(self.clock.now(), obeyed)
            if call is not None and core.order is not None:
                await self._ask(core, core.order, call)
            self._write(core)
            wait = self.clock.true_delay(core.due()) if core.state in ("holding", "stopping", "giving up") else 60.0
            try:
                async with asyncio.timeout(min(max(wait, 0.001), self._timing.heartbeat)):
                    await self._words.wait()
            except TimeoutError:
                pass
            self._words.clear()

    async def _ask(self, core: Core, order: Order, call: str) -> None:
        sent = self.clock.now()
        try:
            if call == "renew":
                waits = await self._steps.renew(order, core.asks(sent))
                if self.order is order or (self.order is not None and self.order.life == order.life):
                    core.answered(sent, self.clock.now(), waits)
            else:
                assert core.departure is not None
                await self._steps.leave(order, core.departure.why)
                core.gave_back()
        except StoreUnavailableError as error:
            core.unanswered(sent, self.clock.now(), str(error))
        except StoreRefusedError as refusal:
            if refusal.code == "lost":
                core.refused(str(refusal))
            else:
                core.unanswered(sent, self.clock.now(), str(refusal))

    def _write(self, core: Core) -> None:
        self.departure = core.departure
        if core.state in ("holding", "stopping", "giving up"):
            for uid in self.machine.pods:
                if (grant := core.grant(uid)) != self.machine.grants.get(uid):
                    self.machine.grant(uid, grant)
        self._pulse = Pulse(self.clock.now(), core.renewed, core.until)

    # --- what the agent may say

    def tell(self, life: str, start: int, era: str) -> None:
        timing = self._timing
        order = Order(
            boot="", node=self.machine.name, life=life, start=start, era=era, heartbeat=timing.heartbeat,
            lease=timing.lease, fence=timing.fence, kill=timing.kill, promise=timing.promise,
            timeout=timing.store_timeout, patience=self._patience, grace=GRACE + 1, prefix="", record_version="",
            server=_NOWHERE, renew=_NONE, leave=_NONE,
        )  # fmt: skip
        if order != self.order:
            self.order = order
            self._words.set()

    def forget(self) -> None:
        self.order = None
        self._words.set()

    def wake(self) -> None:
        if self.core is not None:
            self.core.urge(self.clock.now())
        self._words.set()

    def hear(self) -> None:
        if self.core is not None:
            self.core.heard(self.clock.now())

    def lend(self, uid: str, until: float) -> None:
        if self.core is not None:
            self.core.lend(uid, until)
            self._words.set()

    def pulse(self) -> Pulse | None:
        return self._pulse


class SimLeaseProcess:
    """What one agent sees of it. The words of an agent that is dead or stopped are not said."""

    def __init__(self, lease: SimLease, gate: Gate) -> None:
        self._lease, self._gate = lease, gate
        self.dead = False

    def _say(self, word: Callable[[], None]) -> None:
        if not self.dead and not self._gate.closed:
            word()

    def tend(self, life: str, start: int, era: str) -> None:
        self._say(lambda: self._lease.tell(life, start, era))

    def wake(self) -> None:
        self._say(self._lease.wake)

    def alive(self) -> None:
        self._say(self._lease.hear)

    def lend(self, uid: str, until: float) -> None:
        self._say(lambda: self._lease.lend(uid, until))

    def end(self) -> None:
        self._say(self._lease.forget)

    def pulse(self) -> Pulse | None:
        return self._lease.pulse()

    def said(self) -> tuple[State, str]:
        core = self._lease.core
        return (core.state, core.away) if core is not None else ("idle", "")
