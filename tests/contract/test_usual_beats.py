"""The usual case of a beat does what the whole step does, and leaves all else to it."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest

from nodeagent.model.timing import millis
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.scripts import load
from tests.contract.bench import FAST, HereBench, generation
from tests.contract.usual import KEY, META, PASSED_ON, content, end_life, meta, part, ran, usual_case
from tests.inprocess.server import Server

NODES = ("n1", "n2", "n3", "n4")
ODD = ("", "x", "7", "0x10", "a b", "99999999", "90000000000000", "9999999999999999")
TIMES = ("credit", "gap", "lease")
READ = (
    "run", "version", "era", "last", "served", "credit", "gap", "rev", "amnesty", "floor", "floored", "asked",
    "horizon", "looked", "cluster_uid", "event",
)  # fmt: skip
USUAL = usual_case("_highest", "_beat", "_usual_clock", "_usual_beat")
WHOLE = part("_highest", "_beat", "_clock", "_recovery", "_records") + load("beat", bare=True).source
STEPS = 300
WHOLE_EACH = 8
"""As in ``_usual_beat.lua``."""
MOST_COMMANDS = 17


class Hand:
    """Random beats in a cluster with a job, on a server in this process."""

    def __init__(self, dice: random.Random) -> None:
        self.random, self.clock = dice, [1000.0]
        self.server = Server(lambda: self.clock[0])
        self.bench = HereBench(self.server, self.clock)
        self.seq, self.silent = 100, ""

    async def begin(self) -> None:
        await self.bench.up(*NODES)
        self.job = await self.bench.active(await self.bench.submit(), "n1", "n2")
        self.era = await self.bench.era()
        self.silent = (await self.bench.beat("n1")).silent

    async def happen(self) -> None:
        """Nothing, most of the time; else something that the usual case must not overlook."""
        node, dice, data = self.random.choice(NODES), self.random.random(), self.server.data
        self.clock[0] += self.random.choice((0.0, 0.001, 0.01, 0.12))
        if dice < 0.03:
            end_life(data, node, self.random.choice(("lost", "left")))
        elif dice < 0.06:
            with contextlib.suppress(StoreRefusedError):  # its life is over, or the store is not as it was
                await self.bench.renew(node, 1)
        elif dice < 0.08:
            field = self.random.choice(READ)
            odd = ODD[:2] if field in TIMES else ODD  # the next whole step finds another timing
            data.hset(META, field, self.random.choice(odd))
        elif dice < 0.10:
            data.del_(f"{KEY}{self.random.choice(('job:' + self.job.uid, f'node:{node}', 'names', 'highest'))}")
        elif dice < 0.12:
            data.call("ZREM", f"{KEY}changes", self.random.choice((f"job:{self.job.uid}", f"node:{node}")))
        elif dice < 0.14:
            data.call("ZREM", f"{KEY}lease", node)
        elif dice < 0.15:
            data.hset(f"{KEY}alloc:{node}", "cpu0", "another")
        elif dice < 0.16:
            data.hset(f"{KEY}node:{node}", "id", "another")
        elif dice < 0.18:
            with contextlib.suppress(StoreRefusedError):
                await self.bench.renew(node, asks=True)
        elif dice < 0.19:
            data.hset(f"{KEY}node:{node}", "mute", "1")
        elif dice < 0.21:
            self.clock[0] += self.random.choice((-1.0, FAST.gap + 0.1))

    def asked(self) -> dict[str, object]:
        """Of a beat, most often one with nothing new."""
        node = self.random.choice(NODES)
        self.seq += 1
        rev = meta(self.server.data.keys).get("rev") or ""
        now = int(rev) if rev.isdecimal() else 0
        token = generation(self.job)
        runs = [{"uid": self.job.uid, "rev": self.job.rev, "stands": f"{token.number} {token.id} active running"}]
        about: dict[str, object] = {
            "node": node, "life": self._seldom("another", self.bench.lives[node].life), "start": self._seldom(2, 1),
            "seq": self._seldom(1, self.seq), "rev": self._seldom(max(1, now - 1), now),
            "top": self._seldom(now + 1, 0), "era": self._seldom("another", self.era),
            "silent": self._seldom("9 n9 x", self.silent),
            "runs": self._seldom([{"uid": "u9", "rev": 0, "stands": ""}], runs if node in ("n1", "n2") else []),
            "damaged": self._seldom([f"job:{self.job.uid}"], []),
            "pods": self.random.choice(([], [{"uid": self.job.uid, "body": "{}"}])),
            "notes": self._seldom([{"kind": "Note", "text": "t"}], []),
        }  # fmt: skip
        seldom: tuple[dict[str, object], ...] = (
            {"saved": {"rev": now, "era": self.era}}, {"anew": now}, {"readiness": "{}"},
            {"facts": "{}", "address": "10.0.0.9", "pid": 9},
        )  # fmt: skip
        for more in seldom:
            about |= more if self.random.random() < 0.02 else {}
        return about

    def _seldom(self, odd: object, usual: object) -> object:
        return odd if self.random.random() < 0.02 else usual


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_there_is_a_beat_does_what_the_whole_step_would(seed: int) -> None:
    """But for the clock's own place, which it leaves where it was while that is near enough."""
    dice, usual = random.Random(seed), 0
    for step in range(STEPS):
        if step % 10 == 0:  # little is left of the one before
            hand = Hand(dice)
            await hand.begin()
        await hand.happen()
        about, before = hand.asked(), copy.deepcopy(hand.server.data.keys)
        where = f"seed {seed}, step {step}: {about}"
        alone = ran(hand.server, USUAL, about)
        usual += alone != PASSED_ON
        hand.server.data.keys = copy.deepcopy(before)
        reply, after = ran(hand.server, load("beat").source, about), hand.server.data.keys
        hand.server.data.keys = copy.deepcopy(before)
        whole = ran(hand.server, WHOLE, about)
        assert reply == whole, where
        if alone != PASSED_ON:
            assert alone == reply, where
            assert content(after) == content(hand.server.data.keys), where
            lag = int(meta(hand.server.data.keys)["last"]) - int(meta(after)["last"])
            assert 0 <= lag <= max(int(meta(before)["credit"]), millis(FAST.credit)) / 4, where
        if reply[0] == "1":
            hand.silent = reply[16]
    assert usual > STEPS / 8


async def test_each_eighth_beat_reads_all_of_meta() -> None:
    """What is damaged in a field that no usual case reads is found so."""
    hand = Hand(random.Random(0))
    await hand.begin()
    hand.server.data.hset(META, "order", "x")
    found, rev = [], int(meta(hand.server.data.keys)["rev"])
    for seq in range(200, 200 + WHOLE_EACH):
        about = {
            "node": "n3", "life": "n3-a", "start": 1, "seq": seq, "rev": rev, "top": 0, "era": hand.era,
            "silent": hand.silent, "runs": [], "damaged": [], "pods": [], "notes": [],
        }  # fmt: skip
        found.append(ran(hand.server, USUAL, about) == PASSED_ON)
    assert found == [seq % WHOLE_EACH == 0 for seq in range(200, 200 + WHOLE_EACH)]


async def test_a_beat_of_an_agent_that_was_silent_is_no_usual_one() -> None:
    hand = Hand(random.Random(0))
    await hand.begin()
    hand.server.data.hset(f"{KEY}node:n3", "mute", "1")
    rev = int(meta(hand.server.data.keys)["rev"])
    about: dict[str, object] = {
        "node": "n3", "life": "n3-a", "start": 1, "seq": 201, "rev": rev, "top": 0, "era": hand.era,
        "silent": hand.silent, "runs": [], "damaged": [], "pods": [], "notes": [],
    }  # fmt: skip
    assert ran(hand.server, USUAL, about) == PASSED_ON
    assert ran(hand.server, load("beat").source, about)[0] == "1"
    assert hand.server.data.hget(f"{KEY}node:n3", "mute") is None
    assert ran(hand.server, USUAL, about | {"seq": 202, "rev": rev + 1}) != PASSED_ON


async def test_a_beat_with_nothing_new_takes_few_commands() -> None:
    """Each costs Redis 1 to 2 us, in a large cluster hundreds of times a second: 21 before the shared records were
    looked at in turn with the others, and the newest event was a field of ``meta``."""
    hand = Hand(random.Random(0))
    await hand.begin()
    bench, costs = hand.bench, hand.server.costs
    view = await bench.beat("n3")
    costs.clear()
    for _ in range(8 * WHOLE_EACH):
        reply = await bench.beat("n3", rev=view.rev, era=view.era, silent=view.silent)
        assert (reply.rev, reply.event) == (view.rev, view.event)
    usual = sorted(commands for (name, commands), times in costs.items() for _ in range(times) if name == "beat")
    assert usual[len(usual) // 2] <= MOST_COMMANDS, usual
