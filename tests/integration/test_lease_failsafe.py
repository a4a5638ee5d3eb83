"""Two lease processes without a store and without agents: each runs on time that the other lends. The test is their
agents, and one of their shims."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.lease.lending import FailsafeAddress, LoanRow, Promises, Table
from nodeagent.lease.order import LeasePort, Server
from nodeagent.lease.peers import open_port
from nodeagent.lease.statefiles import (
    NOT_BRIDGED,
    Bridged,
    address_reader,
    bridged_reader,
    promises_file,
    promises_reader,
    table_file,
    write_table,
)
from nodeagent.osutil.linux import boot_id, boottime
from tests.integration.lease_support import POD, SECRET, Node, order
from tests.integration.test_lease_process import Watcher

NOWHERE = Server("/nonexistent/redis.sock", "", 0, (), None)
LIVES = {"n1": "l1", "n2": "l2"}
UID = "u1"
FENCE = 4.0
"""Of a pair that runs for longer than that."""


def own_port() -> int:
    """One that nobody else takes while its process is dead: tests beside this one take the usual ones."""
    found = open_port("127.0.0.1", [0])
    assert found is not None
    with found:
        return int(found.getsockname()[1])


class Member:
    """A node with one pod, of a job that runs on both and that both keep."""

    def __init__(self, run: Path, name: str, **changes: Any) -> None:
        run.mkdir()
        self.name, self.node, self._port = name, Node(run), own_port()
        self.node.add()
        door = LeasePort("127.0.0.1", (self._port, self._port), SECRET)
        plain = {"node": self.name, "life": LIVES[self.name], "promise": 3.0, "door": door}
        self.node.give(order(NOWHERE, **plain | changes))
        self.node.start()

    def know(self, other: Member, **changes: Any) -> None:
        """As its agent writes it."""
        places = {other.name: FailsafeAddress(other.address, LIVES[other.name])}
        row = LoanRow((1, "g1"), LIVES, LIVES, pod=POD, places=places)
        plain = Table(boot_id(), self.name, LIVES[self.name], False, {UID: row})
        write_table(self.node.folder, plain._replace(**changes))

    @property
    def address(self) -> str:
        return address_reader(self.node.folder).once()

    @property
    def bridged(self) -> Bridged:
        return bridged_reader(self.node.folder).once()

    @property
    def promises(self) -> Promises:
        found = promises_reader(self.node.folder, boot_id()).once()
        assert found is not None
        return found

    def lent(self) -> bool:
        return self.node.grant().until > boottime()


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Member, Member]]:
    """Its parameter: what is different in their orders."""
    made = [Member(tmp_path / name, name, **getattr(request, "param", {})) for name in ("n1", "n2")]
    yield made[0], made[1]
    for member in made:
        member.node.close()


async def running(one: Member, other: Member) -> None:
    """On lent time."""
    await one.node.until(lambda: one.address and other.address)
    one.know(other)
    other.know(one)
    await one.node.until(lambda: one.lent() and other.lent())


async def extended(member: Member) -> None:
    """It has been lent more time."""
    until = member.node.grant().until
    await member.node.until(lambda: member.node.grant().until > until)


@pytest.mark.parametrize("pair", [{"fence": FENCE, "promise": FENCE + 1.0}], indirect=True, ids=["patient"])
async def test_they_run_on_and_say_so(pair: tuple[Member, Member]) -> None:
    one, other = pair
    await running(one, other)
    with Watcher(one.node) as shim:
        await asyncio.sleep(FENCE + 0.5)
        assert not shim.over
    assert one.bridged.lent.keys() == {UID}
    await one.node.until(lambda: one.bridged.refusals == {})  # an answer may be late for once
    assert one.promises.until.keys() == {UID}
    await one.node.until(lambda: f"job {UID} runs on without the store" in one.node.log)
    assert one.node.pulse.renewed == 0.0


@pytest.mark.parametrize("pair", [{"fence": 20.0, "promise": 21.0}], indirect=True, ids=["patient"])
async def test_both_are_killed_again_and_again_and_no_worker_notices(pair: tuple[Member, Member]) -> None:
    one, other = pair
    await running(one, other)
    lasts = {member: member.node.pulse.last for member in pair}
    addresses, began = (one.address, other.address), one.promises.began
    with Watcher(one.node) as shim, Watcher(other.node) as another:
        for turn in range(10):
            member = pair[turn % 2]
            member.node.kill()
            member.node.start()
            await extended(member)
            assert member.node.pulse.last == lasts[member], "counted on: there is a limit"
        assert not (shim.over or another.over)
    assert (one.address, other.address) == addresses, "they are known by these"
    assert one.promises.began == began


async def test_an_agent_that_lets_go_sees_what_is_promised_and_nothing_is_promised_since(
    pair: tuple[Member, Member],
) -> None:
    one, other = pair
    await running(one, other)
    other.know(one, jobs={})
    end = other.promises.until[UID]
    assert end > boottime()
    await one.node.until(lambda: one.bridged.refusals == {UID: "n2 does not know generation 1 as active"})
    assert one.node.grant().until < end, "what was lent is over before that"
    last = other.promises
    await one.node.until(lambda: not one.lent())
    assert other.promises == last
    other.know(one)
    await one.node.until(one.lent)


async def test_a_table_that_cannot_be_read_lends_nothing(pair: tuple[Member, Member]) -> None:
    one, other = pair
    await running(one, other)
    table_file(other.node.folder).unlink()
    table_file(other.node.folder).write_text("{}")
    await one.node.until(lambda: "knows no jobs yet" in one.bridged.refusals.get(UID, ""))
    await one.node.until(lambda: "is no table that this version can read" in other.node.log)
    table_file(other.node.folder).unlink()
    await other.node.until(lambda: not other.lent())


async def test_a_promise_that_cannot_be_written_down_is_none(pair: tuple[Member, Member]) -> None:
    one, other = pair
    await one.node.until(lambda: one.address and other.address)
    promises_file(other.node.folder).with_name("promises.json.new").mkdir()
    one.know(other)
    other.know(one)
    await one.node.until(lambda: "cannot write down what it promises" in one.bridged.refusals.get(UID, ""))
    await other.node.until(lambda: "a promise cannot be written down" in other.node.log)


async def test_what_cannot_be_written_down_holds_up_no_start(pair: tuple[Member, Member]) -> None:
    one, _ = pair
    await one.node.until(lambda: one.address)
    one.node.kill()
    for name in ("promises.json", "failsafe.json", "address"):
        (one.node.folder / name).unlink(missing_ok=True)
        (one.node.folder / name).mkdir()
    turned = one.node.pulse.turned
    one.node.start()
    await one.node.until(lambda: one.node.pulse.turned > turned)
    assert promises_reader(one.node.folder, boot_id()).once() is None
    await one.node.until(lambda: "promises cannot be written down" in one.node.log)


async def test_one_that_stands_still_holds_up_the_other(pair: tuple[Member, Member]) -> None:
    one, other = pair
    await running(one, other)
    other.node.signal(signal.SIGSTOP)
    await one.node.until(lambda: one.bridged.refusals)
    await one.node.until(lambda: not one.lent())
    other.node.signal(signal.SIGCONT)
    await one.node.until(one.lent)


async def test_an_order_before_any_promise_means_that_some_may_be_lost(pair: tuple[Member, Member]) -> None:
    one, _ = pair
    await one.node.until(lambda: one.address)
    assert not one.promises.whole, "the order was there first"
    before = one.promises.began
    one.node.kill()
    promises_file(one.node.folder).unlink()
    one.node.start()
    await one.node.until(lambda: promises_reader(one.node.folder, boot_id()).once())
    assert one.promises.began > before and not one.promises.whole
    one.node.kill()
    promises_file(one.node.folder).unlink()
    one.node.give(None)
    one.node.start()
    await one.node.until(lambda: promises_reader(one.node.folder, boot_id()).once())
    assert one.promises.whole


async def test_what_could_not_be_written_is_written_once_it_can_be(pair: tuple[Member, Member]) -> None:
    """And it is logged once, however often it is tried."""
    one, other = pair
    await one.node.until(lambda: one.address and other.address)
    one.node.kill()
    before = len(one.node.log)
    status, bridged = (one.node.folder / f"{name}.json.new" for name in ("status", "failsafe"))
    for draft in (status, bridged):
        draft.unlink(missing_ok=True)  # left by the process that was killed
        draft.mkdir()
        draft.with_suffix("").unlink(missing_ok=True)
    one.know(other, jobs={UID: LoanRow((1, "g1"), LIVES, LIVES, pod=POD, places={})})
    one.node.start()
    await one.node.until(lambda: f"holding (life {LIVES['n1']}): " in one.node.log[before:])
    await next_turns(one)
    assert one.node.status.state == "idle", "it is not there"
    status.rmdir()
    await one.node.until(lambda: one.node.status.state == "holding" and one.node.status.why)
    await one.node.until(lambda: f"job {UID} gets no failsafe time" in one.node.log[before:])
    await next_turns(one)
    assert one.bridged == NOT_BRIDGED
    bridged.rmdir()
    await one.node.until(lambda: one.bridged.refusals == {UID: "n2 does not answer"})
    lines = one.node.log[before:].splitlines()
    assert sum("its state cannot be written" in line for line in lines) == 1
    assert sum("gets no failsafe time" in line for line in lines) == 1
    assert sum("nodeagent lease: holding (life" in line for line in lines) == 2, "and with why, since the store is away"


async def next_turns(member: Member) -> None:
    """It goes on."""
    for _ in range(3):
        turned = member.node.pulse.turned
        await member.node.until(lambda turned=turned: member.node.pulse.turned > turned)  # type: ignore[misc]
