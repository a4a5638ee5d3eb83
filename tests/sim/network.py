"""The link between one agent and the store: delays, lost requests, lost replies, cuts; and the agent's own freezes.

A call that takes longer than the store timeout fails at the timeout, but its effect may still come later.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar, cast

from nodeagent.agent.questions import Questions
from nodeagent.lease.failsafe import RESEND
from nodeagent.lease.peers import Message
from nodeagent.store.base import Store, StoreError, StoreUnavailableError
from nodeagent.store.messages import BeatReply, Woken

Result = TypeVar("Result")


class Gate:
    """Open while a process runs; closed while it is stopped (SIGSTOP)."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    async def passed(self) -> None:
        if not self._open.is_set():
            await self._open.wait()


class PeerNet:
    """The links between nodes: each pair apart, and one way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cut: set[tuple[str, str]] = set()
        """(from, to): what is sent that way is lost."""
        self.loss = 0.0
        self.sent = 0
        """Datagrams."""
        self.ends: dict[str, PeerEnd] = {}
        """Name to the lease process that is reached there."""
        self._under_way: set[asyncio.Task[None]] = set()

    def passes(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self.cut and self.rng.random() >= self.loss

    def send(self, sender: PeerEnd, address: str, nonce: str, message: Message) -> None:
        name = address.partition(":")[0]
        self._carry(sender, name, lambda: self.ends.get(name), nonce, message)

    def reply(self, sender: PeerEnd, to: PeerEnd, nonce: str, message: Message) -> None:
        self._carry(sender, to.name, lambda: to, nonce, message)

    def _carry(
        self, sender: PeerEnd, name: str, find: Callable[[], PeerEnd | None], nonce: str, message: Message
    ) -> None:
        async def carry() -> None:
            await asyncio.sleep(self.rng.uniform(0.0001, 0.002))
            end = find()
            if end is None or end.dead or not self.passes(sender.name, name):
                return
            await end.gate.passed()
            if not end.dead:
                end.hear(sender, nonce, message)

        self.sent += 1
        task = asyncio.get_running_loop().create_task(carry())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)


class PeerEnd:
    """One process's end. What meets a stopped process waits for it, what meets a dead one is lost."""

    def __init__(self, name: str, gate: Gate, hear: Callable[[PeerEnd, str, Message], None]) -> None:
        self.name, self.gate, self.hear = name, gate, hear
        self.dead = False


class SimPeers(Questions):
    """How one agent asks."""

    def __init__(self, name: str, net: PeerNet, gate: Gate) -> None:
        super().__init__()
        self._net, self._gate = net, gate
        self._end = PeerEnd(name, gate, lambda _sender, nonce, message: self._answered(nonce, message))

    async def _ask(self, address: str, question: Message, timeout: float) -> Message | None:
        nonce = f"{self._net.rng.getrandbits(64):x}"
        future = self._waiting[nonce] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                while not future.done():
                    self._net.send(self._end, address, nonce, question)
                    await asyncio.wait([future], timeout=RESEND)
        except TimeoutError:
            pass
        finally:
            del self._waiting[nonce]
        await self._gate.passed()
        return future.result() if future.done() else None


class StoreThread:
    """The store's one thread: calls that cost time are carried out one after another, in the order in which they come,
    whether or not somebody still waits for the reply."""

    def __init__(self) -> None:
        self.cost = 0.0
        """Seconds that each call takes."""
        self.waiting = 0
        """Calls that have come and are not carried out."""
        self.done = 0
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        return self.cost > 0 or self.waiting > 0

    async def carry_out(
        self, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, StoreError | None]:
        """The call's result, or the store's refusal. What a call waits for beside its own work keeps nobody waiting."""
        if self.busy:
            self.waiting += 1
            try:
                async with self._turn:
                    await asyncio.sleep(self.cost)
            finally:
                self.waiting -= 1
        self.done += 1
        try:
            return await real(*args, **kwargs), None
        except StoreError as caught:
            return None, caught


Loss = Literal["nothing", "large replies", "replies", "requests"]
"""``large replies``: those with jobs, as where a packet of full size does not pass."""


class Link:
    """What may happen to the calls of one agent."""

    def __init__(self, rng: random.Random, timeout: float, frozen: Gate, thread: StoreThread) -> None:
        self.rng, self.timeout, self.thread = rng, timeout, thread
        self.cut = False
        self.cut_replies = False
        self.agent_loses: Loss = "nothing"
        """What is lost of the agent's calls, while its lease process' go through."""
        self.slow = 0.0
        """Mean extra one-way delay in seconds."""
        self.far = 0.0
        """The least one, which each call has."""
        self.loss = 0.0
        self.twice = 0.0
        """How often a request takes effect a second time, up to ten leases later."""
        self.frozen = frozen
        """Closed while the store is stopped: what reaches it takes effect when it goes on."""

    def restore(self) -> None:
        self.cut = self.cut_replies = False
        self.agent_loses = "nothing"
        self.loss = self.slow = self.far = self.twice = 0.0

    def delay(self, rng: random.Random) -> float:
        base = self.far + rng.uniform(0.0001, 0.002)
        return base + (rng.expovariate(1 / self.slow) if self.slow else 0.0)

    def lost(self, rng: random.Random) -> bool:
        return rng.random() < self.loss

    def reply_lost(self, rng: random.Random) -> bool:
        return self.cut or self.cut_replies or self.lost(rng)


class LinkedStore:
    """One process's view of the store (``HereStore`` or another client), through its node's link. Effects of late
    requests are kept in ``late`` until they happen."""

    def __init__(
        self, real: object, link: Link, gate: Gate, rng: random.Random | None = None, patience: float | None = None
    ) -> None:
        """``patience``: seconds for which this process listens for a reply, if longer than its link's timeout."""
        self._real: Any = real
        self._link, self._gate, self._rng, self._patience = link, gate, rng or link.rng, patience
        self._late: set[asyncio.Task[Any]] = set()

    def as_store(self) -> Store:
        return cast("Store", self)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == "wake":
                return await self._wake(*args, **kwargs)
            return await self._call(real, args, kwargs)

        setattr(self, name, call)  # found by itself the next time
        return call

    async def _wake(self, after: str, timeout: float, *who: Any) -> Woken:
        await self._gate.passed()
        if self._link.cut or self._link.cut_replies or self._link.frozen.closed or self._loses("replies", "requests"):
            await asyncio.sleep(timeout)
            raise StoreUnavailableError("the link is cut")
        woken: Woken = await self._real.wake(after, timeout, *who)
        if woken.jobs and self._loses("large replies"):
            await asyncio.sleep(timeout)
            raise StoreUnavailableError("the reply was lost")
        await asyncio.sleep(self._link.delay(self._rng))
        await self._gate.passed()
        return woken

    def _loses(self, *what: Loss) -> bool:
        return self._patience is None and self._link.agent_loses in what

    async def _call(self, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        await self._gate.passed()
        link = self._link
        limit = link.timeout if self._patience is None else self._patience
        there = link.delay(self._rng)
        if link.cut or self._loses("requests") or link.lost(self._rng):
            await asyncio.sleep(limit)
            await self._gate.passed()
            raise StoreUnavailableError("the request was lost")
        if there >= limit or (link.frozen.closed and self._patience is None):
            self._again(real, args, kwargs, there)
            await asyncio.sleep(limit)
            await self._gate.passed()
            raise StoreUnavailableError("the request is late")
        await asyncio.sleep(there)
        is_frozen = link.frozen.closed
        effect = self._thawed(real, args, kwargs) if is_frozen else link.thread.carry_out(real, args, kwargs)
        if not (link.thread.busy or is_frozen):
            result, error = await effect
        else:
            loop = asyncio.get_running_loop()
            came, task = loop.time(), self._keep(effect)
            await asyncio.wait([task], timeout=limit - there)
            if not task.done():
                await self._gate.passed()
                raise StoreUnavailableError("the store is overloaded")
            result, error = task.result()
            there += loop.time() - came
        if link.twice and self._rng.random() < link.twice:
            self._again(real, args, kwargs, self._rng.uniform(0, 30))
        back = link.delay(self._rng)
        large = isinstance(result, BeatReply) and bool(result.jobs)
        lost = self._loses("replies") or (large and self._loses("large replies"))
        if lost or link.reply_lost(self._rng) or there + back >= limit:
            await asyncio.sleep(max(0.0, limit - there))
            await self._gate.passed()
            raise StoreUnavailableError("the reply was lost")
        await asyncio.sleep(back)
        await self._gate.passed()
        if error is not None:
            raise error
        return result

    def _again(self, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any], delay: float) -> None:
        self._keep(self._late_effect(real, args, kwargs, delay))

    def _keep(self, effect: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(effect)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return task

    async def _late_effect(self, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any], delay: float) -> None:
        await asyncio.sleep(delay)
        await self._thawed(real, args, kwargs)  # nobody listens to the answer of a late request

    async def _thawed(self, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, StoreError | None]:
        await self._link.frozen.passed()
        return await self._link.thread.carry_out(real, args, kwargs)

    async def close(self) -> None:
        for task in list(self._late):
            task.cancel()
