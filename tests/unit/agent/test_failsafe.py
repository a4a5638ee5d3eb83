"""While the store is away: whom an agent asks, what it makes of the answers, and what binds it as a keeper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from nodeagent.agent.failsafe import Failsafe
from nodeagent.agent.identity import Identity
from nodeagent.agent.lease import Lease
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.peers import Handler
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.lending import Answer, Ask
from nodeagent.plan.pod import Keep
from nodeagent.pods.base import PodHost, PodStatus
from nodeagent.store.base import StoreUnavailableError
from tests.inprocess.lease import Words
from tests.inprocess.server import HereStore, Server
from tests.sim.virtual import SimClock, run_virtual
from tests.unit.plan.build import UID, life, make_cluster, make_head, make_job, make_node

TIMING = Timing()
YES = Answer(yes=True)
N1 = {"node": "n1", "life": life("n1")}
OURS = Answer(yes=True, **N1)
TOKEN = Token(number=1, id="g1")
KEEPERS = ("n1", "n2", "n3")
RUNNING = PodStatus(uid=UID, phase="running", generation=TOKEN, highest=TOKEN)


class Host:
    """Has these pods."""

    def __init__(self, *pods: PodStatus) -> None:
        self.pods = {pod.uid: pod for pod in pods}

    def status(self) -> dict[str, PodStatus]:
        return self.pods


class Net:
    """Answers for the others as told; None is silence for as long as one waits."""

    def __init__(self, **answers: Answer | None) -> None:
        self.handler: Handler = lambda ask: Answer(yes=False, why="nobody has set it")
        self.answers: dict[str, Answer | None] = dict(answers)
        self.asked: list[tuple[str, Ask]] = []
        self.slow = 0.0

    async def ask(self, address: str, question: Ask, timeout: float) -> Answer | None:
        self.asked.append((address, question))
        said = self.answers[address.partition(":")[0]]
        await asyncio.sleep(min(self.slow, timeout) if said is not None else timeout)
        if said is None or said.node:
            return said
        return said.model_copy(update={"node": question.to, "life": question.to_life})


class Bench:
    """n1's failsafe, cut off from the store since now."""

    def __init__(self, folder: Path, net: Net, job: JobRecord, *pods: PodStatus, start: int = 1) -> None:
        self.clock, self.net, self.host, self.process = SimClock(), net, Host(*pods), Words()
        self.cluster: Cluster = make_cluster([make_node(n, peer=True) for n in ("n1", "n2", "n3", "n4")], job)
        host = cast(PodHost, self.host)
        self.lease = Lease(
            "n1", make_node("n1", peer=True).facts, TIMING, store=HereStore(Server(self.clock.now)), host=host,
            clock=self.clock, identity=Identity(folder, "b"), incarnation=Incarnation(life=life("n1"), start=start),
            snapshot=Snapshot(TIMING), metrics=Metrics(), process=self.process,
        )  # fmt: skip
        self.lease.joined, self.lease.beat_sent = True, self.clock.now()
        self.failsafe = Failsafe(
            TIMING, lease=self.lease, host=host, clock=self.clock, peers=net, cluster=lambda: self.cluster
        )

    def know(self, job: JobRecord) -> None:
        self.cluster = make_cluster(self.cluster.nodes.values(), job)

    async def away(self, seconds: float) -> None:
        """Run for this long without a renewal."""
        running = asyncio.ensure_future(self.failsafe.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.wait([running])

    def question(self, **more: Any) -> Ask:
        plain = {
            "uid": UID, "token": TOKEN, "keepers": {n: life(n) for n in KEEPERS}, "node": "n2", "life": life("n2"),
            "to": "n1", "to_life": life("n1"),
        }  # fmt: skip
        return Ask.model_validate(plain | more)


Scenario = Callable[[Callable[..., Bench]], Coroutine[Any, Any, None]]


def play(folder: Path, scenario: Scenario) -> None:
    """In virtual time."""

    def bench(
        net: Net | None = None, job: JobRecord | None = None, pods: tuple[PodStatus, ...] = (RUNNING,), start: int = 1
    ) -> Bench:
        return Bench(folder, net or Net(n2=YES, n3=YES), job or running(), *pods, start=start)

    run_virtual(scenario(bench))


def running(keepers: tuple[str, ...] = KEEPERS) -> JobRecord:
    return make_job("running", make_head(["n1", "n2"]), keepers=keepers)


# --- as a member


def test_when_every_keeper_says_yes_its_workers_run_on(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        cut = b.clock.now()
        await b.away(TIMING.failsafe - 0.01)
        assert b.net.asked == [], "not at the first missed beat"
        await b.away(TIMING.heartbeat / 2)
        assert b.net.asked == [
            (f"{n}:29400", b.question(node="n1", life=life("n1"), to=n, to_life=life(n))) for n in ("n2", "n3")
        ]
        uid, until = b.process.lent[0]
        assert until == pytest.approx(cut + TIMING.failsafe + TIMING.fence, abs=0.2)
        assert uid == UID, "to this pod only"
        assert b.failsafe.lent == {UID: until}
        assert b.failsafe.lending() == {UID}, "its own yes binds it too"

    play(tmp_path, scenario)


def test_it_asks_again_each_heartbeat_and_counts_from_before_it_asked(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        b.net.slow = 0.2
        cut = b.clock.now()
        await b.away(TIMING.failsafe + 10 * TIMING.heartbeat - 0.01)
        untils = [until for _uid, until in b.process.lent]
        first = cut + TIMING.failsafe + TIMING.fence
        assert untils == [pytest.approx(first + i * TIMING.heartbeat) for i in range(10)]

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("said", "why"), [(None, "n3 does not answer"), (Answer(yes=False, why="the store answers n3"), None)]
)
def test_one_no_or_one_silence_and_nothing_is_lent(tmp_path: Path, said: Answer | None, why: str | None) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(Net(n2=YES, n3=said))
        await b.away(3.0)
        assert b.process.lent == []
        assert b.failsafe.lent == {}
        assert b.failsafe.refusals == {UID: why or "the store answers n3"}
        b.net.answers["n3"] = YES
        await b.away(1.0)
        assert b.failsafe.refusals == {}
        assert UID in b.failsafe.lent

    play(tmp_path, scenario)


@pytest.mark.parametrize("wrong", [{"node": "n2", "life": life("n2")}, {"node": "n3", "life": "another"}])
def test_one_that_answers_at_the_address_of_another_answers_for_itself_only(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    """Found by strangers: one keeper reached under two addresses answered for two, and there were two generations."""

    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(Net(n2=YES, n3=Answer(yes=True, **wrong)))
        await b.away(3.0)
        assert (b.failsafe.lent, b.process.lent) == ({}, [])
        assert "answers at the address of n3" in b.failsafe.refusals[UID]

    play(tmp_path, scenario)


@pytest.mark.parametrize("to", [{"to": "n3", "to_life": life("n3")}, {"to_life": "before"}, {"to": "", "to_life": ""}])
def test_a_question_to_another_is_answered_no(tmp_path: Path, to: dict[str, str]) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(pods=())
        await asyncio.sleep(1.0)
        assert not b.net.handler(b.question(**to)).yes
        assert b.failsafe.lending() == frozenset()

    play(tmp_path, scenario)


def test_what_cannot_be_asked_for_is_not_lent(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        nobody = bench(job=running(()))
        await nobody.away(2.0)
        assert nobody.failsafe.refusals == {UID: "this generation has no keepers"}
        unknown = bench(job=running(("n1", "n2", "n9")))
        await unknown.away(2.0)
        assert unknown.failsafe.refusals == {UID: "n9 does not answer"}
        mute = bench()
        mute.cluster = make_cluster(
            [make_node("n1", peer=True), make_node("n2"), make_node("n3", peer=True)], running()
        )
        await mute.away(2.0)
        assert mute.failsafe.refusals == {UID: "n2 does not answer"}
        assert [b.process.lent for b in (nobody, unknown, mute)] == [[], [], []]

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        (running(), (PodStatus(uid=UID, phase="running", generation=Token(number=0, id="g0")),)),
        (running(), (PodStatus(uid=UID, phase="exited", generation=TOKEN),)),
        (running(), (PodStatus(uid="u-gone", phase="running", generation=TOKEN),)),
        (make_job("running", make_head(["n2"]), keepers=KEEPERS), (RUNNING,)),
        (make_job("forming", make_head(["n1"], state="forming"), active=1, keepers=KEEPERS), (RUNNING,)),
        (make_job("stopped", make_head(["n1"], state="ended"), active=1, keepers=KEEPERS), (RUNNING,)),
    ],
    ids=["an older generation", "nothing runs", "an unknown job", "no member", "forming", "ended"],
)
def test_time_is_asked_for_the_members_of_active_generations_only(
    tmp_path: Path, job: JobRecord, pods: tuple[PodStatus, ...]
) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(job=job, pods=pods)
        await b.away(3.0)
        assert (b.net.asked, b.process.lent, b.failsafe.refusals) == ([], [], {})

    play(tmp_path, scenario)


def test_an_agent_whose_life_is_lost_asks_nobody(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        b.lease.joined, b.lease.lost = False, True
        await b.away(5.0)
        assert (b.net.asked, b.process.lent) == ([], [])

    play(tmp_path, scenario)


def test_an_agent_that_has_yet_to_join_again_asks_all_the_same(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(Net(n2=YES, n3=YES))
        b.lease.joined = False
        await b.away(5.0)
        assert b.failsafe.lent

    play(tmp_path, scenario)


def test_when_the_store_answers_again_nothing_is_lent_any_more(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(Net(n2=YES, n3=YES))
        await b.away(2.0)
        assert b.failsafe.lent
        b.lease.beat_sent = b.clock.now()
        asked = len(b.net.asked)
        await b.away(0.5)
        assert (b.failsafe.lent, b.failsafe.refusals, len(b.net.asked)) == ({}, {}, asked)

    play(tmp_path, scenario)


def test_no_longer_than_the_limit(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        b.lease.beat_sent = b.clock.now() - TIMING.failsafe_limit - 1
        await b.away(3.0)
        assert (b.net.asked, b.process.lent) == ([], [])
        assert "failsafe_limit" in b.failsafe.refusals[UID]

    play(tmp_path, scenario)


# --- as a keeper


def test_its_yes_binds_it(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(pods=())
        assert b.net.handler(b.question()) == Answer(yes=False, why="the store answers n1", **N1)
        assert (b.failsafe.lending(), b.failsafe.next_end()) == (frozenset(), None)
        await asyncio.sleep(1.0)
        given = b.clock.now()
        assert b.net.handler(b.question()) == OURS, "others reach it once it is made"
        assert b.failsafe.lending() == {UID}
        assert b.failsafe.next_end() == pytest.approx(given + TIMING.promise)
        await asyncio.sleep(TIMING.promise - 0.01)
        assert b.failsafe.lending() == {UID}
        await asyncio.sleep(0.02)
        assert (b.failsafe.lending(), b.failsafe.next_end()) == (frozenset(), None)

    play(tmp_path, scenario)


def test_after_a_start_it_lets_go_of_nothing_for_one_promise(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench(start=2)
        assert b.failsafe.lending() == {UID}
        await asyncio.sleep(TIMING.promise + 0.01)
        assert b.failsafe.lending() == frozenset()

    play(tmp_path, scenario)


def test_one_that_leaves_promises_nothing_and_waits_for_what_it_promised(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        await asyncio.sleep(1.0)
        assert b.net.handler(b.question()) == OURS
        given = b.clock.now()
        await asyncio.sleep(1.0)
        ending = asyncio.ensure_future(b.failsafe.let_promises_end())
        await asyncio.sleep(0)
        assert b.net.handler(b.question()) == Answer(yes=False, why="n1 is leaving", **N1)
        await ending
        assert b.clock.now() == pytest.approx(given + TIMING.promise)
        assert b.failsafe.lending() == frozenset()
        await b.failsafe.let_promises_end()
        assert b.clock.now() == pytest.approx(given + TIMING.promise), "nothing to wait for"

    play(tmp_path, scenario)


# --- other keepers


OTHERS = {n: life(n) for n in ("n1", "n2", "n4")}


def replacement(expect: tuple[str, ...] = KEEPERS) -> Keep:
    return Keep(UID, TOKEN, {n: life(n) for n in expect}, OTHERS, "n3 is gone")


def test_while_the_keepers_are_being_replaced_it_lends_nothing_under_the_old(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        await asyncio.sleep(1.0)
        said: list[Answer] = []

        async def send(_action: Keep) -> bool:
            said.append(b.net.handler(b.question()))
            b.know(running(tuple(OTHERS)))
            return True

        assert await b.failsafe.replace_keepers(replacement(), send)
        assert said == [Answer(yes=False, why="n1 is having the keepers replaced", **N1)]
        assert not b.net.handler(b.question()).yes, "it knows the new ones"
        assert b.net.handler(b.question(keepers=OTHERS)) == OURS

    play(tmp_path, scenario)


def test_a_refused_replacement_leaves_it_a_keeper_as_before(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        await asyncio.sleep(1.0)

        async def refused(_action: Keep) -> bool:
            return False

        assert not await b.failsafe.replace_keepers(replacement(), refused)
        assert b.net.handler(b.question()) == OURS

    play(tmp_path, scenario)


def test_a_replacement_of_which_nothing_was_heard_may_have_happened(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        await asyncio.sleep(1.0)

        async def lost(_action: Keep) -> bool:
            raise StoreUnavailableError("no reply")

        async def refused(_action: Keep) -> bool:
            return False

        no = Answer(yes=False, why="n1 is having the keepers replaced", **N1)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                await b.failsafe.replace_keepers(replacement(), lost)
            assert b.net.handler(b.question()) == no
        await b.failsafe.replace_keepers(replacement(), refused)
        assert b.net.handler(b.question()) == no, "the first request may still be under way"
        b.know(make_job("running", make_head(["n1", "n2"], number=2), keepers=KEEPERS))
        newer = b.question(token=Token(number=2, id="g2"))
        assert b.net.handler(newer) == OURS, "another generation is another matter"

    play(tmp_path, scenario)


def test_what_was_lent_since_it_was_planned_comes_first(tmp_path: Path) -> None:
    async def scenario(bench: Callable[..., Bench]) -> None:
        b = bench()
        await asyncio.sleep(1.0)
        assert b.net.handler(b.question()) == OURS
        sent: list[Keep] = []

        async def send(action: Keep) -> bool:
            sent.append(action)
            return True

        assert not await b.failsafe.replace_keepers(replacement(), send)
        assert sent == []
        await asyncio.sleep(TIMING.promise + 0.01)
        assert await b.failsafe.replace_keepers(replacement(), send)
        assert sent == [replacement()]

    play(tmp_path, scenario)
