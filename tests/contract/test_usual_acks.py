"""The usual case of an acknowledgement in a large gang does what the whole step does, and leaves all else to it."""

from __future__ import annotations

import copy
import json
import random

import pytest

from nodeagent.model.timing import millis
from nodeagent.model.world import Ack
from nodeagent.store.scripts import load
from tests.contract.bench import FAST, HereBench, generation
from tests.contract.usual import KEY, META, PASSED_ON, content, end_life, meta, part, ran, texts, usual_case
from tests.inprocess.server import Server

GANG = tuple(f"n{i}" for i in range(110))
READY = 66
"""More than a reply brings changes of (``PART`` in ``_generation.lua``)."""
USUAL = usual_case("_take_ack", "_usual_clock", "_usual_ack")
STEPS = 80


class Hand:
    """Random acknowledgements of a generation, on a server in this process."""

    def __init__(self, dice: random.Random) -> None:
        self.random, self.clock = dice, [1000.0]
        self.server = Server(lambda: self.clock[0])
        self.bench = HereBench(self.server, self.clock)

    async def begin(self) -> None:
        """A generation forms again after a fault: each member holds, and is silent. Many have acknowledged."""
        await self.bench.up(*GANG)
        await self.bench.active(await self.bench.submit(high=len(GANG)), *GANG)
        await self.bench.report(await self.bench.job(), GANG[1])
        self.job = await self.bench.propose(await self.bench.job(), *GANG[: self.random.choice((100, 110))])
        self.base = {"rev": self.job.rev, "era": await self.bench.era()}
        for node in GANG[-READY:]:
            await self.bench.ack(self.job, node)

    def happen(self) -> None:
        """Nothing, most of the time; else something that the usual case must not overlook."""
        node, dice, data = self.random.choice(GANG), self.random.random(), self.server.data
        self.clock[0] += self.random.choice((0.0, 0.001, 0.01, 0.12))
        job = f"{KEY}job:{self.job.uid}"
        if dice < 0.03:
            holder = generation(self.job).holders[node].model_copy(update={"devices": ("cpu0", "cpu1", "cpu2")})
            data.hset(job, f"holder:{node}", holder.to_json())
            data.hset(f"{KEY}alloc:{node}", "cpu2", self.job.uid)
        elif dice < 0.06:
            data.hset(job, f"failsafe_member:{node}", json.dumps(self.bench.lives[node].life))
        elif dice < 0.09:
            end_life(data, node, self.random.choice(("lost", "left")))
        elif dice < 0.11:
            data.hset(job, f"silent:{node}", json.dumps(self.random.choice(("another", self.bench.lives[node].life))))
        elif dice < 0.12:
            data.hset(f"{KEY}counts:{self.job.uid}", "rev", "1")
        elif dice < 0.13:
            data.zadd(f"{KEY}marks:{self.job.uid}", "1", "rev")
        elif dice < 0.135:
            data.hset(META, "rev", self.random.choice(("x", "9999999999999999", "99999999")))
        elif dice < 0.14:
            self.clock[0] += self.random.choice((-1.0, FAST.gap + 0.1))

    def asked(self) -> dict[str, object]:
        node = self.random.choice(GANG[: -READY - 1] if self.random.random() < 0.9 else GANG)
        life, start = self.bench.lives[node].life, 1
        token = generation(self.job).token.model_dump()
        ack = Ack(
            life=life, ended=self._seldom(True, False), address=f"{node}:1", host=self.random.choice(("10.0.0.1", "")),
            ports=self.random.choice(((), (29500, 29501))), signature=f"{self.random.getrandbits(256):064x}",
            stopped=self.random.random(), ready=self.random.random(), lends=self._seldom(True, False),
            down=self._seldom(("trainer",), ()),
        )  # fmt: skip
        about: dict[str, object] = {
            "node": node, "life": self._seldom("another", life), "start": self._seldom(2, start), "uid": self.job.uid,
            "token": self._seldom(token | {"number": 1}, token), "ack": ack.to_json(),
            "base": self._seldom({"rev": self.base["rev"], "era": "another"}, self.base),
        }  # fmt: skip
        if self.random.random() < 0.05:
            about["last"] = {"state": "left", "body": '{"reason":"it has left"}'}
        if self.random.random() < 0.05:
            del about["base"]
        return about

    def plain(self, node: str) -> dict[str, object]:
        """A member's acknowledgement, with nothing odd about it."""
        life = self.bench.lives[node].life
        ack = Ack(life=life, address=f"{node}:1", host="10.0.0.1", signature="a" * 64)
        return {
            "node": node, "life": life, "start": 1, "uid": self.job.uid, "ack": ack.to_json(), "base": self.base,
            "token": generation(self.job).token.model_dump(),
        }  # fmt: skip

    def _seldom(self, odd: object, usual: object) -> object:
        return odd if self.random.random() < 0.03 else usual


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_there_is_an_acknowledgement_does_what_the_whole_step_would(seed: int) -> None:
    """But for the clock's own place, which it leaves where it was while that is near enough."""
    hand = Hand(random.Random(seed))
    await hand.begin()
    usual = 0
    for step in range(STEPS):
        hand.happen()
        about, before = hand.asked(), copy.deepcopy(hand.server.data.keys)
        usual += ran(hand.server, USUAL, about) != PASSED_ON
        hand.server.data.keys = copy.deepcopy(before)
        reply, after = ran(hand.server, load("ack").source, about), hand.server.data.keys
        hand.server.data.keys = before
        step_alone = f"return (function()\n{load('ack', bare=True).source}end)()\n"
        whole = hand.server.run(part("_take_ack") + step_alone, **about)
        where = f"seed {seed}, step {step}: {about}"
        assert reply == texts(whole), where
        assert content(after) == content(hand.server.data.keys), where
        lag = int(meta(hand.server.data.keys)["last"]) - int(meta(after)["last"])
        assert 0 <= lag <= millis(FAST.credit) / 4, where
        hand.server.data.keys = after
    assert usual >= 5


async def test_the_last_one_is_the_whole_step() -> None:
    """Which begins the generation: else that waits for an agent that sees that nobody is missing."""
    hand = Hand(random.Random(0))
    await hand.begin()
    first, *others, last = (node for node in generation(hand.job).members if node not in GANG[-READY:])
    await hand.bench.ack(hand.job, first)
    for node in others:
        assert ran(hand.server, USUAL, hand.plain(node)) != PASSED_ON
    for node in {*GANG} - {*generation(hand.job).members}:
        await hand.bench.ack(hand.job, node)
    assert list(generation(await hand.bench.job()).missing) == [last]
    assert ran(hand.server, USUAL, hand.plain(last)) == PASSED_ON
    ran(hand.server, load("ack").source, hand.plain(last))
    assert generation(await hand.bench.job()).state == "active"
