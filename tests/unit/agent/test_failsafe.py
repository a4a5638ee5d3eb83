"""What an agent tells its lease process of the node's jobs, and when it may let go of one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from nodeagent.lease.lending import FailsafeAddress, LoanRow, Promises
from nodeagent.lease.statefiles import MOST_MEMBERS, Bridged, Pulse
from nodeagent.model.job import JobRecord
from nodeagent.model.world import Token
from nodeagent.plan.pods.actions import SetFailsafeMembers
from nodeagent.pods.base import PodStatus
from nodeagent.pods.folder import folder_name
from nodeagent.store.base import StoreUnavailableError
from tests.sim.virtual import run_virtual
from tests.unit.agent.failsafe_support import TIMING, Bench
from tests.unit.plan.build import UID, life, make_cluster, make_generation, make_job, make_node

TOKEN = Token(number=1, id="g1")
FAILSAFE_MEMBERS = ("n1", "n2", "n3")
LIVES = {n: life(n) for n in FAILSAFE_MEMBERS}
RUNNING = PodStatus(uid=UID, phase="running", generation=TOKEN, highest=TOKEN)
ROW = LoanRow((1, "g1"), LIVES, {"n1": life("n1"), "n2": life("n2")})
RUNS = ROW._replace(pod=folder_name(UID), places={n: FailsafeAddress(f"{n}:29400", life(n)) for n in ("n2", "n3")})


def running(failsafe_members: tuple[str, ...] = FAILSAFE_MEMBERS, **more: Any) -> JobRecord:
    return make_job("running", make_generation(["n1", "n2"], **more), failsafe_members=failsafe_members)


def bench(
    job: JobRecord | None = None, *pods: PodStatus, node: str = "n1", peers: tuple[str, ...] = FAILSAFE_MEMBERS
) -> Bench:
    nodes = [make_node(n, peer=n in peers) for n in ("n1", "n2", "n3", "n4")]
    return Bench(make_cluster(nodes, job or running()), node, *pods)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


def reported(b: Bench) -> dict[str, LoanRow]:
    async def look() -> None:
        b.lending()

    play(look())
    return dict(b.words.known[-1])


# --- what it tells


def test_it_tells_what_runs_here_and_what_this_node_keeps() -> None:
    assert reported(bench(running(), RUNNING)) == {UID: RUNS}
    assert reported(bench()) == {UID: ROW}, "it keeps it, and nothing runs"
    assert reported(bench(node="n3")) == {UID: ROW}
    assert reported(bench(node="n4")) == {}
    outside = ("n2", "n3")
    no_failsafe_member = reported(bench(running(outside), RUNNING))[UID]
    assert (no_failsafe_member.members, no_failsafe_member.pod) == ({}, RUNS.pod), "nobody asks who keeps nothing"
    assert UID in reported(bench(running(outside))), "why it stopped is to be said"
    assert reported(bench(running(), RUNNING, peers=("n3",)))[UID].places == {"n3": RUNS.places["n3"]}


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        (running(), (PodStatus(uid=UID, phase="running", generation=Token(number=0, id="g0")),)),
        (running(), (PodStatus(uid=UID, phase="exited", generation=TOKEN),)),
        (make_job("running", make_generation(["n2"]), failsafe_members=FAILSAFE_MEMBERS), (RUNNING,)),
    ],
    ids=["an older generation", "nothing runs", "no member"],
)
def test_only_members_of_active_generations_run(job: JobRecord, pods: tuple[PodStatus, ...]) -> None:
    row = reported(bench(job, *pods))[UID]
    assert (row.pod, row.places) == ("", {})


@pytest.mark.parametrize(
    "job",
    [
        make_job("forming", make_generation(["n1"], state="forming"), active=1, failsafe_members=FAILSAFE_MEMBERS),
        make_job("stopped", make_generation(["n1"], state="ended"), active=1, failsafe_members=FAILSAFE_MEMBERS),
        make_job(failsafe_members=FAILSAFE_MEMBERS),
    ],
    ids=["forming", "ended", "none yet"],
)
def test_what_is_not_active_is_not_reported(job: JobRecord) -> None:
    assert reported(bench(job, RUNNING)) == {}


def test_a_table_is_bounded() -> None:
    names = [f"n{i}" for i in range(1, MOST_MEMBERS + 2)]
    generation = make_generation(["n1", "n2"])
    member = generation.members["n2"]
    many = generation.model_copy(update={"members": generation.members | dict.fromkeys(names[2:], member)})
    assert reported(bench(running().model_copy(update={"generation": many}))) == {}


# --- when it lets go


def test_it_lets_go_when_the_promise_is_over() -> None:
    async def scenario() -> None:
        b = bench()
        assert (b.lending(), b.next_end()) == (frozenset(), None)
        end = b.clock.now() + 2.0
        b.words.promised = Promises("b", 0.0, True, {UID: end, "u-other": end + 1})
        assert b.lending() == {UID}
        assert b.next_end() == end
        await asyncio.sleep(2.01)
        assert (b.lending(), b.next_end()) == (frozenset(), None)

    play(scenario())


def test_what_may_have_been_promised_in_an_earlier_life_is_waited_for() -> None:
    async def scenario() -> None:
        b = bench(running().model_copy(update={"failsafe_members": LIVES | {"n1": "before the boot"}}))
        b.words.promised = Promises("b", b.clock.now(), True, {})
        assert b.lending() == {UID}
        await asyncio.sleep(TIMING.promise + 0.01)
        assert b.lending() == frozenset()

    play(scenario())


def test_it_lets_go_of_nothing_while_it_cannot_know_what_was_promised() -> None:
    async def scenario() -> None:
        b = bench()
        b.words.promised = None
        assert b.lending() == {UID}
        assert b.next_end() == b.clock.now() + TIMING.heartbeat
        b.words.promised = Promises("b", 0.0, True, {})
        b.words.deaf = True
        assert b.lending() == {UID}, "what it was told last may be promised yet"
        b.words.deaf = False
        assert b.lending() == frozenset()

    play(scenario())


def test_it_tells_first_and_looks_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is promised in between would be missed."""
    calls: list[str] = []

    def know(*_about: object) -> bool:
        calls.append("told")
        return True

    async def scenario() -> None:
        b = bench()
        monkeypatch.setattr(b.words, "know", know)
        monkeypatch.setattr(b.words, "promises", lambda: calls.append("looked"))
        b.lending()
        await b.failsafe.let_promises_end()

    play(scenario())
    assert calls == ["told", "looked"] * 2


def test_one_that_leaves_waits_for_what_was_promised() -> None:
    async def scenario() -> None:
        b = bench()
        began = b.clock.now()
        b.words.promised = Promises("b", 0.0, True, {"u-other": began + 2.0})
        assert await b.failsafe.let_promises_end()
        assert b.clock.now() == pytest.approx(began + 2.0)
        assert b.words.leaving
        b.words.promised = None
        assert await b.failsafe.let_promises_end()
        assert b.clock.now() == pytest.approx(began + 2.0 + TIMING.promise), "nobody knows what was promised"
        b.words.deaf = True
        assert not await b.failsafe.let_promises_end()

    play(scenario())


# --- other failsafe members


OTHERS = {n: life(n) for n in ("n1", "n2", "n4")}
NO = "is having the failsafe members replaced"


def replacement(expect: tuple[str, ...] = FAILSAFE_MEMBERS) -> SetFailsafeMembers:
    return SetFailsafeMembers(UID, TOKEN, {n: life(n) for n in expect}, OTHERS, "n3 is gone")


async def refused(_action: SetFailsafeMembers) -> bool:
    return False


async def lost(_action: SetFailsafeMembers) -> bool:
    raise StoreUnavailableError("no reply")


def refuses(b: Bench) -> str:
    b.lending()
    return b.words.known[-1][UID].refuses


def test_while_the_failsafe_members_are_being_replaced_nothing_is_lent_under_the_old() -> None:
    async def scenario() -> None:
        b = bench()
        calls: list[str] = []

        async def send(_action: SetFailsafeMembers) -> bool:
            calls.append(b.words.known[-1][UID].refuses)
            b.cluster = make_cluster(b.cluster.nodes.values(), running(tuple(OTHERS)))
            return True

        assert await b.failsafe.set_failsafe_members(replacement(), send)
        assert calls == [NO]
        assert refuses(b) == "", "it lends under the new ones"

    play(scenario())


def test_a_refused_replacement_leaves_it_a_failsafe_member_as_before() -> None:
    async def scenario() -> None:
        b = bench()
        assert not await b.failsafe.set_failsafe_members(replacement(), refused)
        assert refuses(b) == ""

    play(scenario())


def test_a_replacement_of_which_nothing_was_received_may_have_happened() -> None:
    async def scenario() -> None:
        b = bench()
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                await b.failsafe.set_failsafe_members(replacement(), lost)
            assert refuses(b) == NO
        await b.failsafe.set_failsafe_members(replacement(), refused)
        assert refuses(b) == NO, "the first request may still be under way"
        b.cluster = make_cluster(b.cluster.nodes.values(), running(number=2))
        assert refuses(b) == "", "another generation is another matter"

    play(scenario())


def test_what_was_lent_since_it_was_planned_comes_first() -> None:
    async def scenario() -> None:
        b = bench()
        sent: list[SetFailsafeMembers] = []

        async def send(action: SetFailsafeMembers) -> bool:
            sent.append(action)
            return True

        b.words.promised = Promises("b", 0.0, True, {UID: b.clock.now() + 1.0})
        assert not await b.failsafe.set_failsafe_members(replacement(), send)
        assert (sent, refuses(b)) == ([], "")
        await asyncio.sleep(1.01)
        assert await b.failsafe.set_failsafe_members(replacement(), send)
        assert sent == [replacement()]

    play(scenario())


# --- for people


@pytest.mark.parametrize(
    ("away_since", "renewed_before", "why"),
    [
        (None, 0.0, "the store answers again"),
        (0.0, TIMING.failsafe + 0.1, "nothing runs here any more"),
        (0.0, TIMING.failsafe - 0.1, "the store answers this node's lease process, though not its agent"),
    ],
)
def test_people_read_once_of_each_thing(away_since: float | None, renewed_before: float, why: str) -> None:
    async def scenario() -> None:
        b = bench(running(), RUNNING)
        b.lease.away_since = away_since
        renewed = b.clock.now() - renewed_before
        b.words.beats = Pulse(b.clock.now(), renewed, renewed + TIMING.fence, renewed)
        for shown in (Bridged({UID: 1.0}, {}), Bridged({UID: 1.5}, {"u2": "no"}), Bridged({}, {})):
            b.words.shown = shown
            for _ in range(2):
                b.failsafe.log()

    with capture_logs() as logs:
        play(scenario())
    assert [(line["event"], line.get("job"), line.get("why")) for line in logs] == [
        ("runs on without the store", UID, None),
        ("no failsafe member gives failsafe time", "u2", "no"),
        ("no failsafe time is needed", None, why),
    ]
