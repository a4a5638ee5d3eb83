"""The lease process of a simulated machine: the production decisions, with the machine's clock, records and link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from nodeagent.lease.core import NOBODY_WAITS, Core, Departure, LeaseState
from nodeagent.lease.failsafe import Failsafe
from nodeagent.lease.lending import Ask, LoanAnswer, LoanRow, Promises, Table
from nodeagent.lease.links import MOST_LINKS
from nodeagent.lease.order import LeaseOrder, LeasePort, Server
from nodeagent.lease.peers import Message
from nodeagent.lease.statefiles import NOT_BRIDGED, Bridged, Pulse
from nodeagent.lease.whichstore import LeaseAnswer, LeaseAsk, lease_answer
from nodeagent.lease.withdrawals import NOTHING_WITHDRAWN, jobs_and_numbers
from nodeagent.model.timing import Timing, millis
from nodeagent.pods.folder import folder_name
from nodeagent.store.base import StoreError, StoreRefusedError, StoreUnavailableError
from tests.inprocess import server as inprocess
from tests.inprocess.lease import Renewed, renew_lease
from tests.inprocess.server import HereCalls
from tests.sim.machine import GRACE, SimMachine
from tests.sim.network import Gate, Link, LinkedStore, PeerEnd, PeerNet
from tests.sim.virtual import SimClock

BACK = 0.1
"""Seconds until a lease process that was killed is there again: whoever supervises it starts it at once."""
_NOWHERE = Server(path="", host="", port=0, greeting=(), tls=None)
_DOOR = LeasePort(address="", ports=(0, 0), secret="")


class LeaseSteps:
    """What a lease process asks of the store."""

    def __init__(self, server: inprocess.Server) -> None:
        self._calls = HereCalls(server)

    async def renew(self, order: LeaseOrder, asks: bool, late: bool, standing: Mapping[str, int]) -> Renewed:
        about = (order.node, order.life, order.era, millis(order.lease))
        return await renew_lease(self._calls, *about, asks=asks, late=late, standing=standing if asks else None)

    async def leave(self, order: LeaseOrder, why: str) -> None:
        about = {"node": order.node, "life": order.life, "start": order.start, "era": order.era, "why": why}
        await self._calls.step("leave", about)

    async def let_go(self, order: LeaseOrder, uid: str, number: int) -> dict[str, int]:
        about = {"node": order.node, "life": order.life, "era": order.era, "uid": uid, "number": number}
        (text,) = await self._calls.step("let_go", about)
        return jobs_and_numbers(str(text))


class SimLease:
    """One machine's lease process, through any number of deaths. What is on its disk outlives them: what the agent has
    written, the departure that it has decided on, and what it has promised."""

    def __init__(
        self,
        machine: SimMachine,
        clock: SimClock,
        link: Link,
        net: PeerNet,
        timing: Timing,
        patience: float,
    ) -> None:
        self.machine, self.clock = machine, clock
        self._timing, self._patience = timing, patience
        self._net, self._rng = net, random.Random(f"{machine.name} talks")
        self.gate = Gate()
        self._end = net.ends[machine.name] = PeerEnd(machine.name, self.gate, self._received)
        self._end.dead = True
        self._link, self._link_rng = link, random.Random(machine.name)
        self._server: inprocess.Server | None = None
        """The one that the order names."""
        self._steps: Any = None
        self._asked: list[asyncio.Task[None]] = []
        """What the store has not answered, oldest first: see ``lease.links``."""
        self._newest: asyncio.Task[None] | None = None
        """Of these, unless it is late."""
        self._replied = asyncio.Event()
        self.order: LeaseOrder | None = None
        self.departure: Departure | None = None
        self.withdrawn = NOTHING_WITHDRAWN
        self.table: Table | None = None
        self.promises: Promises | None = None
        self.bridged = NOT_BRIDGED
        self.unannounced = 0
        self.promising = False
        """It is about to say yes."""
        self._renewed: float | None = None
        self.core: Core | None = None
        self._failsafe: Failsafe | None = None
        self._words, self._news, self._answering = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulse: Pulse | None = None
        self.leaves_sent = 0

    @property
    def state(self) -> str:
        return self.core.state if self.core is not None else "dead"

    # --- the process

    def start(self) -> None:
        if self.core is not None or not self.machine.powered:
            return
        now = self.clock.now()
        granted = {folder_name(uid): grant.until for uid, grant in self.machine.grants.items()}
        self.promises = self.promises or Promises("", now, self.order is None, {})
        self.core = Core(now, self.departure, granted, self._renewed, self.withdrawn)
        self._failsafe = Failsafe(self.core, self.promises, lambda: f"{self._rng.getrandbits(64):x}")
        self._answering, self._end.dead, self.bridged = asyncio.Lock(), False, NOT_BRIDGED
        self._do(self._run(self.core))
        self._do(self._bridge(self.core, self._failsafe))

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As long as this process lives."""
        task = asyncio.get_running_loop().create_task(work, name=f"lease {self.machine.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def kill(self) -> None:
        """SIGKILL; it is back in a moment."""
        self.end()
        self.machine.later(BACK, self.start)

    def end(self) -> None:
        """SIGKILL, and nobody starts it again."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self._asked, self._newest = set(), [], None
        self.core, self._failsafe, self._pulse, self._end.dead = None, None, None, True

    def cut_power(self) -> None:
        """Its files are gone with it."""
        self.end()
        self.order = self.departure = self.table = self.promises = self._renewed = None
        self.withdrawn = NOTHING_WITHDRAWN

    async def _run(self, core: Core) -> None:
        while True:
            await self.gate.passed()
            if self.order is None or (core.order is not None and core.order[:5] != self.order[:5]):
                self._hang_up()  # what an earlier order asked for grants a later one nothing
            core.take(self.clock.now(), self.order)
            call = core.look(self.clock.now(), self._obeyed)
            if call is not None and core.order is not None:
                await self._ask(core, core.order, call)
            self._write(core)
            wait = self.clock.true_delay(core.due()) if core.state in ("holding", "stopping", "giving up") else 60.0
            turn = self._timing.heartbeat / (4 if core.awaits_shims else 1)
            try:
                async with asyncio.timeout(min(max(wait, 0.001), turn)):
                    await self._words.wait()
            except TimeoutError:
                pass
            self._words.clear()

    def _obeyed(self) -> dict[str, float]:
        return {folder_name(uid): pod.obeyed for uid, pod in self.machine.pods.items()}

    async def _ask(self, core: Core, order: LeaseOrder, call: str) -> None:
        """Until there is an answer, or this one is late: then it is listened to still, beside the next one."""
        if call == "let go":
            self._write(core)  # what it has decided is on the disk before it asks
        if len(self._asked) == MOST_LINKS:
            self._asked.pop(0).cancel()
        sent = self.clock.now()
        self._replied.clear()
        asked = self._newest = self._do(self._question(core, order, call, sent))
        self._asked.append(asked)
        try:
            async with asyncio.timeout(order.timeout):
                await self._replied.wait()
        except TimeoutError:
            await self.gate.passed()
            if self._newest is asked:
                self._newest = None
                core.unanswered(sent, self.clock.now(), "the store did not answer in time")

    async def _question(self, core: Core, order: LeaseOrder, call: str, sent: float) -> None:
        """One, on a link of its own; what comes of it counts if it is the first, or if it is not late."""
        renewed: Renewed | None = None
        gone = dict[str, int]()
        error: StoreError | None = None
        try:
            if call == "renew":
                asks, late = core.asks(sent), core.asks_for_lateness(sent)
                renewed = await self._steps.renew(order, asks, late, core.standing)
            elif call == "let go":
                free = core.free_of(sent, self._obeyed)
                gone = await self._steps.let_go(order, *free) if free is not None else {}
            else:
                assert core.departure is not None
                self.leaves_sent += 1
                await self._steps.leave(order, core.departure.why)
        except (StoreUnavailableError, StoreRefusedError) as found:
            error = found
        this = asyncio.current_task()
        assert this is not None
        self._asked.remove(this)
        if isinstance(error, StoreUnavailableError) and this is not self._newest:
            return
        if not isinstance(error, StoreUnavailableError):
            self._hang_up()
        self._newest = None
        self._replied.set()
        self._words.set()
        if self.order is None or self.order[:5] != order[:5]:
            return  # what an earlier order asked for grants a later one nothing
        now = self.clock.now()
        if renewed is not None:
            core.unannounced = renewed.unannounced
            core.answered(sent, now, renewed.waits)
        elif error is None and call == "let go":
            core.let_go(gone)
        elif error is None:
            core.gave_back()
        elif isinstance(error, StoreRefusedError) and error.code == "lost":
            core.refused(str(error))
        else:
            core.unanswered(sent, now, str(error), error.code if isinstance(error, StoreRefusedError) else "")

    def _hang_up(self) -> None:
        for one in self._asked:
            one.cancel()
        self._asked, self._newest = [], None

    # --- failsafe time

    async def _bridge(self, core: Core, failsafe: Failsafe) -> None:
        while True:
            await self.gate.passed()
            failsafe.table = self.table
            for question in failsafe.questions(self.clock.now()):
                if question.address:
                    self._net.send(self._end, *question)
                else:
                    self._do(self._ask_itself(failsafe, question.nonce, question.ask))
            self._write(core)
            try:
                async with asyncio.timeout(max(0.001, min(60.0, self.clock.true_delay(failsafe.due())))):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    def _received(self, sender: PeerEnd, nonce: str, message: Message) -> None:
        failsafe = self._failsafe
        if failsafe is None:
            return
        if isinstance(message, LoanAnswer):
            failsafe.answered(nonce, message)
            self._news.set()
        elif isinstance(message, LeaseAsk):
            if self.core is not None:
                self._net.reply(self._end, sender, nonce, lease_answer(self.core, self.clock.now()))
        elif not isinstance(message, LeaseAnswer):
            self._do(self._reply(failsafe, sender, nonce, message))

    async def _reply(self, failsafe: Failsafe, sender: PeerEnd, nonce: str, ask: Ask) -> None:
        self._net.reply(self._end, sender, nonce, await self._answer(failsafe, ask))

    async def _ask_itself(self, failsafe: Failsafe, nonce: str, ask: Ask) -> None:
        failsafe.answered(nonce, await self._answer(failsafe, ask))
        self._news.set()

    async def _answer(self, failsafe: Failsafe, ask: Ask) -> LoanAnswer:
        """As ``lease.main.Process._answer``, which may be stopped or killed between any two of these."""
        async with self._answering:
            steps = failsafe.answer(ask, self.clock.now())
            try:
                promises, self.promising = next(steps), True
                await self._moment()
                if promises is not None:
                    self.promises = promises
                await self._moment()
                steps.send(self.table)
            except StopIteration as end:
                self.promising, answer = False, end.value
            await self._moment()
            assert isinstance(answer, LoanAnswer)
            return answer

    async def _moment(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.001))
        await self.gate.passed()

    def _write(self, core: Core) -> None:
        self.departure, self.withdrawn, self._renewed = core.departure, core.withdrawn, core.last
        if core.state in ("holding", "stopping", "giving up"):
            for uid in self.machine.pods:
                if (grant := core.grant(folder_name(uid))) != self.machine.grants.get(uid):
                    self.machine.grant(uid, grant)
        self.unannounced = core.unannounced or self.unannounced
        self._pulse = Pulse(self.clock.now(), core.renewed, core.until, core.last)
        if self._failsafe is not None:
            self.bridged = Bridged(dict(self._failsafe.lent), dict(self._failsafe.refusals))

    # --- what the agent may say

    def tell(self, node: str, life: str, start: int, era: str, cluster_uid: str, server: inprocess.Server) -> None:
        timing = self._timing
        if server is not self._server:
            self._server = server
            self._steps = LinkedStore(LeaseSteps(server), self._link, self.gate, self._link_rng, timing.fence)
        order = LeaseOrder(
            boot="", node=node, life=life, start=start, era=era, cluster_uid=cluster_uid,
            heartbeat=timing.heartbeat, lease=timing.lease, fence=timing.fence, kill=timing.kill,
            promise=timing.promise, timeout=timing.store_timeout, failsafe=timing.failsafe,
            failsafe_limit=timing.failsafe_limit, patience=self._patience, grace=GRACE + 1, prefix="",
            record_version="", server=_NOWHERE, renew="", leave="", let_go="", door=_DOOR,
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

    def hear(self, cut_off: bool, standing: Mapping[str, int]) -> None:
        if self.core is not None:
            self.core.agent_seen(self.clock.now(), cut_off, standing)

    def know(self, node: str, life: str, leaving: bool, jobs: Mapping[str, LoanRow]) -> None:
        table = Table("", node, life, leaving, jobs)
        if table != self.table:
            self.table = table
            self._news.set()

    def pulse(self) -> Pulse | None:
        return self._pulse


class SimLeaseProcess:
    """What one agent sees of it. The words of an agent that is dead or stopped are not said."""

    def __init__(self, lease: SimLease, gate: Gate, node: str, server: inprocess.Server) -> None:
        self._lease, self._gate, self._node, self._server = lease, gate, node, server
        self.dead = False

    def _say(self, word: Callable[[], None]) -> None:
        if not self.dead and not self._gate.closed:
            word()

    def tend(self, life: str, start: int, era: str, cluster_uid: str) -> None:
        self._say(lambda: self._lease.tell(self._node, life, start, era, cluster_uid, self._server))

    def wake(self) -> None:
        self._say(self._lease.wake)

    def alive(self, cut_off: bool, standing: Mapping[str, int] = NOBODY_WAITS) -> None:
        self._say(lambda: self._lease.hear(cut_off, standing))

    def know(self, life: str, leaving: bool, jobs: Mapping[str, LoanRow]) -> bool:
        self._say(lambda: self._lease.know(self._node, life, leaving, jobs))
        return not self.dead and not self._gate.closed

    def promises(self) -> Promises | None:
        return self._lease.promises

    def bridged(self) -> Bridged:
        return self._lease.bridged

    def address(self) -> str:
        return f"{self._lease.machine.name}:1"

    def end(self) -> None:
        self._say(self._lease.forget)

    def pulse(self) -> Pulse | None:
        return self._lease.pulse()

    def unannounced(self) -> int:
        return self._lease.unannounced

    def elsewhere(self, era: str | None) -> str:
        return ""

    def status(self) -> tuple[LeaseState, str]:
        core = self._lease.core
        return (core.state, core.away) if core is not None else ("idle", "")
