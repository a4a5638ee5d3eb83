"""A machine that gets another address while its agent runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from nodeagent.agent.address import AddressWatch, look_again
from nodeagent.agent.machine import interface_addresses

BOUND = 10.0
NEW = "10.0.0.9"


class Machine:
    """Its looks, and who is given what they find."""

    def __init__(self) -> None:
        self.address, self.broken = "10.0.0.7", False
        self.asked: list[tuple[str, str]] = []
        self.taken: list[str] = []
        self._seen = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()

    async def looks(self, more: int) -> None:
        while self._seen.locked() is False:
            await self._seen.acquire()  # those before
        for _ in range(more):
            await self._seen.acquire()

    def look(self, address: str, interface: str) -> tuple[str, str]:
        self.asked.append((address, interface))
        self._loop.call_soon_threadsafe(self._seen.release)
        return self.address, "eth0"

    async def take(self, address: str, _gloo: str | None) -> None:
        if self.broken:
            self.broken = False
            raise OSError("no descriptor")
        self.taken.append(address)


@asynccontextmanager
async def watching(watch: AddressWatch, machine: Machine) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run(machine.take, pause=0.001))
    try:
        async with asyncio.timeout(BOUND):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_all_are_given_another_address_once_and_again_where_it_could_not_be_used() -> None:
    machine = Machine()
    watch = AddressWatch("10.0.0.7", machine.look)
    async with watching(watch, machine):
        await machine.looks(3)
        assert machine.asked[0] == ("10.0.0.7", "") and machine.asked[-1] == ("10.0.0.7", "eth0")
        assert machine.taken == []
        machine.broken, machine.address = True, NEW
        await watch.moves()
        assert (machine.taken, watch.address, machine.broken) == ([NEW], NEW, False)
        await machine.looks(3)
        assert machine.taken == [NEW] and machine.asked[-1] == (NEW, "eth0")


async def test_an_address_that_somebody_named_stays() -> None:
    machine = Machine()
    async with asyncio.timeout(BOUND):
        await AddressWatch("10.0.0.7", None).run(machine.take)
    assert machine.taken == []


def test_a_look_at_this_machine() -> None:
    """What it has, stays."""
    for name, found in interface_addresses().items():
        for address in found:
            if name != "lo":
                assert look_again(address, name) == (address, name)
