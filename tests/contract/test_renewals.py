"""A renewal's usual case does what the whole step does, leaves everything else to it, and costs little: it reads and
writes only what it has to."""

from __future__ import annotations

import contextlib
import copy
import json
import random

import pytest

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.timing import Timing, millis
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.keys import prefix
from nodeagent.store.scripts import load
from tests.contract.bench import FAST, LONG, Bench, HereBench, facts, refused
from tests.groups import seeds
from tests.inprocess.data import CommandError, SortedSet, Stream
from tests.inprocess.lua import runtime
from tests.inprocess.server import CLUSTER, Server

SLOW = Timing(credit=100.0, gap=200.0, lease=3.0)
"""So that no machine is too slow for what is to happen within a quarter of ``credit``."""
NODES = ("n1", "n2", "n3")
CREDIT = millis(FAST.credit)
REGROUP = 300
META = prefix(CLUSTER) + "meta"
READ = ("run", "version", "era", "last", "served", "credit", "gap", "recover")
PAUSES = (0.0, 0.001, 0.01, 0.02, 0.05, 0.09, 0.11, 0.7, 1.4)
"""Seconds, on both sides of what matters with ``FAST``; none is a gap."""


async def meta_of(bench: Bench) -> dict[str, str]:
    async with bench.calls.link() as link:
        flat = await link.ask("HGETALL", bench.calls.prefix + "meta")
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def write_meta(bench: Bench, field: str, value: str) -> None:
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "meta", field, value)


# --- on all stores


async def test_a_renewal_writes_the_lease_and_nothing_else(bench: Bench) -> None:
    await bench.join("n1", timing=SLOW)
    await bench.join("n2", timing=SLOW)
    await bench.renew("n2", 1)
    await bench.until_lapsed("n2", "n1")
    before = await meta_of(bench)
    await bench.renew("n2")
    assert await meta_of(bench) == before
    assert (await bench.only_beat("n1")).lapsed == ()


async def test_the_clock_goes_on_though_nothing_but_renewals_comes(bench: Bench) -> None:
    await bench.up("n1")
    before = await meta_of(bench)
    await bench.sleep(FAST.credit / 2)
    await bench.renew("n1")
    after = await meta_of(bench)
    assert int(after["served"]) > int(before["served"])
    assert int(after["last"]) > int(before["last"])


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [("run", "another", "era"), ("version", "99", "version"), ("era", "another", "era"), ("served", "x", "era"),
     ("last", "", "era"), ("credit", "x", "era"), ("gap", "x", "era"), ("recover", "x", "era")],
)  # fmt: skip
async def test_a_store_that_is_not_as_it_was_renews_nothing(bench: Bench, field: str, value: str, code: str) -> None:
    await bench.up("n1")
    era = await bench.era()
    await write_meta(bench, field, value)
    await refused(code, bench.renew("n1", era=era))


async def test_a_renewal_finds_what_somebody_wrote_over_the_clock(bench: Bench) -> None:
    await bench.up("n1")
    era = await bench.era()
    await bench.spoil("meta")
    await refused("era", bench.renew("n1", era=era))


async def test_a_clock_that_was_put_back_opens_an_amnesty(bench: Bench) -> None:
    await bench.up("n1")
    before = await meta_of(bench)
    await write_meta(bench, "last", str(int(before["last"]) + 60_000))
    await bench.renew("n1")
    after = await meta_of(bench)
    assert int(after["amnesty"]) > int(before["amnesty"])
    assert int(after["last"]) < int(before["last"]) + 60_000


# --- against the whole step, and against time


class Hand:
    """Random moments of a cluster on a server in this process."""

    def __init__(self, dice: random.Random) -> None:
        self.random = dice
        self.clock = [1000.0]
        self.server = Server(lambda: self.clock[0])
        self.bench = HereBench(self.server, self.clock)

    async def begin(self) -> None:
        for node in NODES:
            await self.bench.join(node, regroup=REGROUP)

    @property
    def meta(self) -> dict[str, str]:
        return meta_in(self.server)

    async def happen(self) -> None:
        """Something, most of it ordinary."""
        node, dice = self.random.choice(NODES), self.random.random()
        if dice < 0.6:
            self.clock[0] += self.random.choice(PAUSES)
        elif dice < 0.7:
            self.clock[0] += self.random.choice((-0.005, -2.0, FAST.gap + 0.01, 2 * FAST.gap))
        elif dice < 0.8:
            await self._join(node)
        elif dice < 0.85:
            self.server.restart()
        elif dice < 0.87:
            self.server.data.hset(f"{prefix(CLUSTER)}node:{node}", self.random.choice(("lost", "left")), "1")
        elif dice < 0.92 and self.meta:
            field, value = self.random.choice(READ), self.random.choice(("", "x", "7", "0x10", None))
            value = "x" if field == "recover" else value  # an end by hand leaves sets behind, for the next whole step
            self.server.data.hdel(META, field) if value is None else self.server.data.hset(META, field, value)
        elif dice < 0.93:
            self.server.data.set(META, "of another type")

    async def _join(self, node: str) -> None:
        with contextlib.suppress(StoreRefusedError):  # it is another life's, or its life is over
            await self.bench.store.join(node, self.bench.lives[node], facts(node), FAST, REGROUP)

    def asked(self) -> dict[str, object]:
        """Of a renewal, most often a good one."""
        node = self.random.choice((*NODES, *NODES, *NODES, "nobody"))
        life = self.bench.lives[node].life if node != "nobody" else ""
        return {
            "node": node,
            "life": self.random.choice((life,) * 9 + ("another",)),
            "era": self.random.choice((self.server.state.era if self.meta else "",) * 9 + ("another",)),
            "length": self.random.choice((1, 300, LONG)),
            "asks": self.random.random() < 0.1,
            "late": self.random.random() < 0.5,
        }


@pytest.mark.parametrize("seed", seeds(range(8), range(8, 20)))
async def test_whatever_there_is_a_renewal_does_what_the_whole_step_would(seed: int) -> None:
    """But for the clock's own place, which it leaves where it was while that is near enough."""
    dice, renewed, left = random.Random(seed), 0, 0
    for step in range(400):
        if step % 20 == 0:  # little is left of the one before
            hand = Hand(dice)
            await hand.begin()
            twin = Server(lambda hand=hand: hand.clock[0])  # type: ignore[misc]
        await hand.happen()
        about, before = hand.asked(), hand.meta
        twin.data.keys = copy.deepcopy(hand.server.data.keys)
        twin._starts = hand.server._starts
        answer, whole = shipped(hand.server, about), behind_the_preludes(twin, about)
        where = f"seed {seed}, step {step}: {about}"
        assert answer == whole, where
        assert content(hand.server) == content(twin), where
        if hand.meta != meta_in(twin):
            assert hand.meta == before, where
            assert 0 <= int(meta_in(twin)["last"]) - int(before["last"]) <= CREDIT / 4, where
            left += 1
        renewed += answer[0] == "1"
    assert renewed > 100, "many are good ones"
    assert left > 10, "and some of them come soon after another"


def shipped(server: Server, about: dict[str, object]) -> list[str]:
    script, words = load("renew_lease"), (server.run_id, str(RECORD_VERSION), json.dumps(about))
    try:
        return reported_of(runtime().run(server.data, script.sha, script.source, (prefix(CLUSTER),), words))
    except CommandError as error:
        return ["error", str(error).partition(" script:")[0]]


def behind_the_preludes(server: Server, about: dict[str, object]) -> list[str]:
    try:
        return reported_of(server.run(load("renew_lease", bare=True).source, **about))
    except CommandError as error:
        return ["error", str(error).partition(" script:")[0]]


def reported_of(reply: list[object]) -> list[str]:
    return [str(word) for word in reply]


def content(server: Server) -> dict[str, object]:
    """All but ``meta``, in a form that can be compared."""
    kept = {key: value for key, value in server.data.keys.items() if key != META}
    return {key: vars(value) if isinstance(value, SortedSet | Stream) else value for key, value in kept.items()}


def meta_in(server: Server) -> dict[str, str]:
    found = server.data.keys.get(META)
    return dict(found) if isinstance(found, dict) else {}


@pytest.mark.parametrize("seed", seeds(range(8), range(8, 20)))
async def test_served_time_is_never_ahead_of_the_clock_and_nobody_lapses_before_his_time(seed: int) -> None:
    hand = Hand(random.Random(seed))
    await hand.begin()
    served, began = hand.server.state.served, hand.clock[0]
    until = {}
    for _ in range(400):
        hand.clock[0] += hand.random.choice(PAUSES)
        node = hand.random.choice(NODES)
        if hand.random.random() < 0.8:
            length = hand.random.choice((50, 300, 1000))
            await hand.bench.renew(node, length)
            until[node] = hand.clock[0] + length / 1000
        else:
            lapsed = (await hand.bench.only_beat(node)).lapsed
            assert all(until.get(gone, 0.0) <= hand.clock[0] + 1e-6 for gone in lapsed), (lapsed, until, hand.clock)
        now = hand.server.state.served
        assert served <= now <= millis(hand.clock[0] - began), "it went back, or ahead"
        served = now
    assert hand.server.state.amnesty == 0, "none of the pauses was a gap"


async def test_where_no_agent_lives_renewals_alone_keep_the_clock_and_still_find_a_gap() -> None:
    hand = Hand(random.Random(1))
    await hand.begin()
    for _ in range(1000):
        hand.clock[0] += 0.02
        await hand.bench.renew("n1")
    assert hand.server.state.amnesty == 0
    assert hand.server.state.served > 19_900
    hand.clock[0] += FAST.gap + 0.001
    await hand.bench.renew("n1")
    assert hand.server.state.amnesty > hand.server.state.served
