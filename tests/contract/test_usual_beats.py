"""The usual case of a beat does what the whole step does, and leaves all else to it."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Mapping, Sequence

import pytest

from nodeagent.model.node import Readiness
from nodeagent.model.timing import millis
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.scripts import WHOLE_EACH, load, usual_beat_words
from tests.contract.bench import FAST, HereBench, generation
from tests.contract.usual import KEY, META, PASSED_ON, content, end_life, meta, part, ran, usual_case
from tests.groups import seeds
from tests.inprocess.server import Server

NODES = ("n1", "n2", "n3", "n4")
ODD = ("", "x", "7", "0x10", "a b", "99999999", "90000000000000", "9999999999999999")
TIMES = ("credit", "gap", "lease")
READ = (
    "run", "version", "era", "last", "served", "credit", "gap", "rev", "amnesty", "floor", "floored", "asked", "lease",
    "cluster_uid", "event",
)  # fmt: skip
"""What the usual case reads of ``meta``."""
USUAL = usual_case("_highest", "_look", "_usual_clock", "_usual_beat")
WHOLE = part("_highest", "_look", "_clock", "_recovery", "_records") + load("beat", bare=True).source
STEPS = 300
MOST_COMMANDS = 3


class Hand:
    """Random beats in a cluster with a job, on a server in this process."""

    def __init__(self, dice: random.Random) -> None:
        self.random, self.clock = dice, [1000.0]
        self.server = Server(lambda: self.clock[0])
        self.bench = HereBench(self.server, self.clock)
        self.seq, self.silent, self.read = 100, "", dict[str, int]()
        self.by_hand = self.looking = False

    async def begin(self) -> None:
        await self.bench.up(*NODES)
        self.job = await self.bench.active(await self.bench.submit(), "n1", "n2")
        self.era = await self.bench.era()
        reply = await self.bench.beat("n1")
        self.silent, self.read = reply.silent, dict.fromkeys(NODES, reply.rev)

    async def happen(self) -> None:
        """Nothing, most of the time; else something that the usual case must not overlook."""
        node, dice, data = self.random.choice(NODES), self.random.random(), self.server.data
        self.clock[0] += self.random.choice((0.0, 0.001, 0.01, 0.12))
        with contextlib.suppress(StoreRefusedError):  # its life is over, or the store is not as it was
            if dice < 0.03:
                await self.bench.renew(node, 1)
            elif dice < 0.06:
                await self.bench.renew(node, self.random.choice((50, 150, 300)))
            elif self.by_hand:  # other steps may fail by that
                pass
            elif dice < 0.08:
                await self.bench.leave(node, "a test")
            elif dice < 0.09:
                await self.bench.renew(node, asks=True)
            elif dice < 0.10:
                await self.bench.beat(node, readiness={self.job.uid: Readiness(state="ready")})
            elif dice < 0.11:
                await self.bench.join(node, start=2)
            elif dice < 0.13:
                await self.bench.report(self.job, self.random.choice(("n1", "n2")))
        self.by_hand = self.by_hand or 0.13 < dice < 0.20
        if 0.13 < dice < 0.15:
            field = self.random.choice(READ)
            odd = ODD[:2] if field in TIMES else ODD  # the next whole step finds another timing
            data.hset(META, field, self.random.choice(odd))
        elif 0.13 < dice < 0.16:
            data.call("ZREM", f"{KEY}lease", node)
        elif 0.13 < dice < 0.18:
            data.zadd(f"{KEY}lease", self.random.choice(("1", "90000000000000")), node)
        elif 0.13 < dice < 0.20:
            self.damage(node)
        elif 0.20 < dice < 0.22:
            self.clock[0] += self.random.choice((-1.0, FAST.gap + 0.1))

    def damage(self, node: str) -> None:
        """By hand, where no beat reads that does not look."""
        dice, data = self.random.random(), self.server.data
        self.looking = True
        if dice < 0.2:
            end_life(data, node, self.random.choice(("lost", "left")))
        elif dice < 0.4:
            data.del_(f"{KEY}{self.random.choice(('job:' + self.job.uid, f'node:{node}', 'names', 'highest'))}")
        elif dice < 0.6:
            data.call("ZREM", f"{KEY}changes", self.random.choice((f"job:{self.job.uid}", f"node:{node}")))
        elif dice < 0.7:
            data.hset(f"{KEY}alloc:{node}", "cpu0", "another")
        elif dice < 0.8:
            data.hset(f"{KEY}node:{node}", "id", "another")
        elif dice < 0.9:
            data.hset(f"{KEY}job:{self.job.uid}", "max", "0")
        else:
            data.hset(f"{KEY}node:{node}", "mute", "1")

    def asked(self) -> dict[str, object]:
        """Of a beat, most often one with nothing new. No agent has read that its own life is over, or that another has
        its node: the beat that was to bring that was refused."""
        node = self.random.choice(NODES)
        life, start = self.bench.lives[node].life, self.bench.lives[node].start
        looks = self.seq if self.looking else self.random.choice((0, 0, 0, self.seq))
        pods = self.random.choice(([], [], [{"uid": self.job.uid, "body": "{}"}]))
        self.seq += 1
        now = self.read[node]
        token = generation(self.job)
        runs = [{"uid": self.job.uid, "rev": self.job.rev, "stands": f"{token.number} {token.id} active running"}]
        about: dict[str, object] = {
            "node": node, "life": self._seldom("another", life) if looks or pods else life,
            "start": self._seldom(start + 1, start) if looks or pods else start,
            "seq": self._seldom(1, self.seq) if looks or pods else self.seq, "rev": self._seldom(max(1, now - 1), now),
            "top": self._seldom(now + 1, 0), "era": self._seldom("another", self.era),
            "silent": self._seldom(self.random.choice(self.silent_otherwise()), self.silent),
            "looks": looks, "runs": [], "damaged": self._seldom([f"job:{self.job.uid}"], []),
            "pods": pods,
            "notes": self._seldom([{"kind": "Note", "text": "t"}], []),
        }  # fmt: skip
        seldom: tuple[dict[str, object], ...] = (
            {"saved": {"rev": now, "era": self.era}}, {"anew": now}, {"readiness": "{}"},
            {"facts": "{}", "address": "10.0.0.9", "pid": 9},
        )  # fmt: skip
        for more in seldom:
            about |= more if self.random.random() < 0.02 else {}
        if looks and node in ("n1", "n2"):
            about["runs"] = runs
            about |= {"seen": {"uid": self.job.uid, "rev": self.job.rev, "texts": {"max": "3"}}} if self.seq % 2 else {}
        return about

    def silent_otherwise(self) -> Sequence[str]:
        """As an agent has it that does not know who is silent now."""
        sheltered = self.silent.replace(self.era, f"sheltered {self.era}")
        return "9 n9 x", "", f"1 1000 {self.era}", sheltered, self.silent.replace(self.era, "another")

    def _seldom(self, odd: object, usual: object) -> object:
        return odd if self.random.random() < 0.03 else usual


def as_whole(reply: list[str], about: Mapping[str, object]) -> list[str]:
    """The usual case's reply, as the whole step gives it."""
    _, uid, served, next_lapse, asked, event = reply
    rev, era, silent = str(about["rev"]), str(about["era"]), str(about["silent"])
    found = ["1", uid, served, "[]", next_lapse, rev, "0", event, "[]", era, "0", asked, "0", "[]", "[]", "0"]
    return [*found, silent, "1", rev]


def without_seq(keys: dict[str, object], node: object) -> dict[str, object]:
    record = keys[f"{KEY}node:{node}"]
    assert isinstance(record, dict)
    return keys | {f"{KEY}node:{node}": {name: text for name, text in record.items() if name != "seq"}}


@pytest.mark.parametrize("seed", seeds(range(6), range(6, 12)))
async def test_whatever_there_is_a_beat_does_what_the_whole_step_would(seed: int) -> None:
    """But for the clock's own place, which it leaves where it was while that is near enough, and for the number of a
    beat that brings nothing."""
    dice, usual = random.Random(seed), 0
    for step in range(STEPS):
        if step % 10 == 0:  # little is left of the one before
            hand = Hand(dice)
            await hand.begin()
        await hand.happen()
        about, before = hand.asked(), copy.deepcopy(hand.server.data.keys)
        words = usual_beat_words(about)
        where = f"seed {seed}, step {step}: {about}"
        alone = ran(hand.server, USUAL, about, *words) if words else PASSED_ON
        usual += alone != PASSED_ON
        hand.server.data.keys = copy.deepcopy(before)
        reply, after = ran(hand.server, load("beat").source, about, *words), hand.server.data.keys
        hand.server.data.keys = copy.deepcopy(before)
        whole = ran(hand.server, WHOLE, about)
        if alone == PASSED_ON:
            assert reply == whole, where
        else:
            assert reply == alone, where
            assert as_whole(alone, about) == whole, where
            found, expected = content(after), content(hand.server.data.keys)
            if not (about["looks"] or about["pods"]):
                found, expected = (without_seq(keys, about["node"]) for keys in (found, expected))
            assert found == expected, where
            lag = int(meta(hand.server.data.keys)["last"]) - int(meta(after)["last"])
            assert 0 <= lag <= max(int(meta(before)["credit"]), millis(FAST.credit)) / 4, where
        hand.server.data.keys = after
        if whole[0] == "1":
            hand.silent, hand.read[str(about["node"])] = whole[16], int(whole[5])
    assert usual > STEPS / 8


def about(hand: Hand, **more: object) -> dict[str, object]:
    """Of n3's beat that brings nothing, and has nothing to read."""
    found: dict[str, object] = {
        "node": "n3", "life": "n3-a", "start": 1, "seq": 201, "rev": int(meta(hand.server.data.keys)["rev"]), "top": 0,
        "era": hand.era, "silent": hand.silent, "looks": 0, "runs": [], "damaged": [], "pods": [], "notes": [],
    }  # fmt: skip
    return found | more


@pytest.mark.parametrize("field", (*READ, "looked"))
async def test_whatever_somebody_writes_into_meta_a_beat_does_what_the_whole_step_would(field: str) -> None:
    hand = Hand(random.Random(0))
    await hand.begin()
    await hand.bench.beat("n3")
    beat, kept, passed_on = about(hand, looks=1), copy.deepcopy(hand.server.data.keys), 0
    for text in ODD[:2] if field in TIMES else ODD:
        hand.server.data.keys = copy.deepcopy(kept)
        hand.server.data.hset(META, field, text)
        alone = ran(hand.server, USUAL, beat, *usual_beat_words(beat))
        hand.server.data.keys = copy.deepcopy(kept)
        hand.server.data.hset(META, field, text)
        whole = ran(hand.server, WHOLE, beat)
        assert alone == PASSED_ON or as_whole(alone, beat) == whole, text
        passed_on += alone == PASSED_ON
    assert passed_on


async def test_only_who_knows_just_the_silent_nodes_has_a_usual_beat() -> None:
    """However many they are."""
    hand = Hand(random.Random(0))
    await hand.begin()
    bench, data = hand.bench, hand.server.data

    async def ends(node: str, length: int) -> None:
        await bench.renew(node, length)
        hand.clock[0] += 0.01

    async def known() -> str:
        """What n3 has read of them; nothing moves ``floor`` after that."""
        for _ in range(2):
            view = await bench.beat("n3", rev=about(hand)["rev"], era=hand.era)  # type: ignore[arg-type]
        return view.silent

    def is_usual(silent: str) -> bool:
        beat = about(hand, silent=silent)
        return ran(hand.server, USUAL, beat, *usual_beat_words(beat)) != PASSED_ON

    await ends("n4", 1)
    one = await known()
    assert one.startswith("1 ") and is_usual(one)
    assert not is_usual(hand.silent) and not is_usual(one.replace(hand.era, f"sheltered {hand.era}"))
    await ends("n2", 1)
    two = await known()
    assert two.startswith("2 ") and is_usual(two) and not is_usual(one)
    await ends("n4", 1_000_000)
    other = await known()
    assert other.startswith("1 ") and is_usual(other) and not is_usual(one) and not is_usual(two)
    data.hset(META, "served", "1")
    assert not is_usual(other)


async def test_a_lease_that_somebody_shortened_is_no_usual_case() -> None:
    """More end before ``floor`` than the beat counted which moved that: the whole step restores the leases."""
    hand = Hand(random.Random(0))
    await hand.begin()
    await hand.bench.beat("n3")
    beat = about(hand)
    assert ran(hand.server, USUAL, beat, *usual_beat_words(beat)) != PASSED_ON
    floor, served = (int(meta(hand.server.data.keys)[field]) for field in ("floor", "served"))
    assert floor > served + 1
    hand.server.data.zadd(f"{KEY}lease", str(floor - 1), "n4")
    assert ran(hand.server, USUAL, beat, *usual_beat_words(beat)) == PASSED_ON
    assert ran(hand.server, load("beat").source, beat, *usual_beat_words(beat))[:2] == ["0", "behind"]


async def test_each_fourth_beat_that_looks_reads_all_of_meta() -> None:
    """What is damaged in a field that no usual case reads is found so."""
    hand = Hand(random.Random(0))
    await hand.begin()
    assert usual_beat_words(about(hand, looks=WHOLE_EACH)) == ()
    hand.server.data.hset(META, "order", "x")
    assert ran(hand.server, load("beat").source, about(hand), *usual_beat_words(about(hand)))[0] == "1"
    assert ran(hand.server, load("beat").source, about(hand, looks=WHOLE_EACH))[:2] == ["0", "behind"]


async def test_a_beat_of_an_agent_that_was_silent_is_no_usual_one() -> None:
    """Its lease process said that it is silent, and that is a new revision: until the agent has read it, and then too,
    since that beat takes it back."""
    hand = Hand(random.Random(0))
    await hand.begin()
    before = about(hand)
    await hand.bench.renew("n3", asks=True)
    assert ran(hand.server, USUAL, before, *usual_beat_words(before)) == PASSED_ON
    assert ran(hand.server, load("beat").source, before, *usual_beat_words(before))[0] == "1"
    assert hand.server.data.hget(f"{KEY}node:n3", "mute") is None
    after = about(hand, seq=202)
    assert ran(hand.server, USUAL, after, *usual_beat_words(after)) != PASSED_ON
    hand.server.data.hset(f"{KEY}node:n3", "mute", "1")  # by hand: the revision does not show it, a look does
    looks = about(hand, seq=203, looks=1)
    assert ran(hand.server, USUAL, looks, *usual_beat_words(looks)) == PASSED_ON
    assert ran(hand.server, load("beat").source, looks, *usual_beat_words(looks))[0] == "1"
    assert hand.server.data.hget(f"{KEY}node:n3", "mute") is None


async def test_who_was_not_answered_is_kept_from_writing_late() -> None:
    """A beat that brings nothing keeps no number: the one after a beat that was lost looks, and does."""
    hand = Hand(random.Random(0))
    await hand.begin()
    late = about(hand, seq=300, pods=[{"uid": hand.job.uid, "body": "late"}])
    for beat in (about(hand, seq=301, looks=1), about(hand, seq=302)):
        assert ran(hand.server, load("beat").source, beat, *usual_beat_words(beat))[0] == "1"
    assert ran(hand.server, load("beat").source, late, *usual_beat_words(late))[:2] == ["0", "stale"]
    assert hand.server.data.get(f"{KEY}pod:{hand.job.uid}:n3") is None


async def test_a_beat_with_nothing_new_takes_few_commands() -> None:
    """Each costs Redis 1 to 2 us, in a large cluster hundreds of times a second: 17 when each one looked for damage."""
    hand = Hand(random.Random(0))
    await hand.begin()
    bench, costs = hand.bench, hand.server.costs
    view = await bench.beat("n3")
    await bench.beat("n3", rev=view.rev, era=view.era, silent=view.silent)
    costs.clear()
    for _ in range(8):
        reply = await bench.beat("n3", rev=view.rev, era=view.era, silent=view.silent, looks=False)
        assert (reply.rev, reply.event) == (view.rev, view.event)
    assert {(name, commands): times for (name, commands), times in costs.items() if name == "beat"} == {
        ("beat", MOST_COMMANDS): 8
    }
