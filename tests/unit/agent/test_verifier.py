"""Which jobs an agent runs: signed, as submitted, while they live; and what it remembers for that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from nodeagent.agent.metrics import Metrics
from nodeagent.agent.verifier import LOOK_AGAIN, NAMED_AT_ONCE, SIGNATURES_AT_A_TIME, AdmissionVerifier
from nodeagent.model.job import SKEW, TERMINAL, Checkpoint, JobRecord
from nodeagent.model.jobspec import Nodes
from nodeagent.model.queue import NO_QUEUES, Queue, Queues, QueuesRecord
from nodeagent.model.window import NO_WINDOWS, Window, Windows, WindowsRecord
from nodeagent.model.world import Ack, Generation, Member, Place
from nodeagent.plan.cluster import Refusal
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.ledger import LedgerEntry, Remembered
from nodeagent.trust.seal import LIFETIME, Seal
from tests.profiled import counted
from tests.unit.plan.build import UID, make_generation, make_job, make_spec

SEAL = Seal(ClusterKey(bytes(32)), "lab")
NOW = 1_700_000_000
HOUR = 3600


class Disk:
    """A ledger in memory that outlives the guards on it."""

    def __init__(self) -> None:
        self.all = Remembered()

    @property
    def kept(self) -> dict[str, LedgerEntry]:
        return self.all.jobs

    def load(self) -> Remembered:
        return replace(self.all, jobs=dict(self.all.jobs))

    async def save(self, remembered: Remembered) -> None:
        self.all = remembered


class Bench:
    """One agent's guard, and the view it is shown."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        self.metrics = Metrics()
        self.verifier = AdmissionVerifier("n1", SEAL, self.disk, self.metrics)

    def look(
        self, *jobs: JobRecord, now: float = NOW, era: str = "e1", whole: bool = True, seasoned: bool = False,
        unread: Mapping[str, str] = {},
    ) -> dict[str, Refusal]:  # fmt: skip
        return self.verifier.look({j.uid: j for j in jobs}, era, now, whole=whole, seasoned=seasoned, unread=unread)

    def why(self, job: JobRecord, now: float = NOW, era: str = "e1") -> str:
        """The kind of refusal, empty if there is none."""
        found = self.look(job, now=now, era=era).get(job.uid)
        return found.kind if found else ""

    async def restarted(self, now: float = NOW) -> Bench:
        await self.verifier.save(now)
        return Bench(self.disk)

    def counted(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("nodeagent_refused_signatures_total", {"reason": kind}) or 0.0


def signed(job: JobRecord | None = None, *, at: float = NOW, **control: Any) -> JobRecord:
    job = job or make_job()
    request = SEAL.control(job.uid, job.control.model_copy(update=control))
    return job.model_copy(update={"control": request, "admission": SEAL.admit(job.uid, job.owner, job.spec, at, "n7")})


def changed(job: JobRecord, **fields: Any) -> JobRecord:
    return job.model_copy(update=fields)


def ended(job: JobRecord) -> JobRecord:
    return changed(job, phase="stopped")


def test_what_was_signed_may_run() -> None:
    assert Bench().look(signed()) == {}


def test_a_refusal_is_reported_and_counted_once_and_again_when_it_comes_back() -> None:
    bench, job = Bench(), make_job()
    with capture_logs() as logs:
        for rev in range(3):
            assert bench.why(changed(job, rev=rev)) == "unsigned"
    assert [(line["log_level"], line["job"], line["reason"]) for line in logs] == [("error", "a", "unsigned")]
    assert bench.counted("unsigned") == 1
    assert bench.why(signed()) == ""
    assert bench.why(job) == "unsigned"
    assert bench.counted("unsigned") == 2


def invented(count: int) -> list[JobRecord]:
    """Copies of a signed job, as somebody with the store alone can make them."""
    real = signed()
    return [changed(real, uid=f"x{number}", spec=make_spec(name="a")) for number in range(count)]


class CountedSeal(Seal):
    """Counts the admissions that are looked at."""

    looked = 0

    def admits(self, job: JobRecord) -> bool:
        self.looked += 1
        return super().admits(job)


async def test_signatures_of_a_page_are_looked_at_in_parts_before_it_comes_into_the_view() -> None:
    """12,000 invented jobs kept the loop for a second once they were all read."""
    bench, jobs, at_once, last = Bench(), invented(2 * SIGNATURES_AT_A_TIME), 0, 0
    seal = bench.verifier._seal = CountedSeal(ClusterKey(bytes(32)), "lab")

    async def turns() -> None:
        nonlocal at_once, last
        while True:
            at_once, last = max(at_once, seal.looked - last), seal.looked
            await asyncio.sleep(0)

    turning = asyncio.create_task(turns())
    half = len(jobs) // 2
    await bench.verifier.read(jobs[:half], more=True)
    assert bench.look(signed()) == {}, "while the others are being read"
    await asyncio.sleep(0)  # the next beat's answer
    await bench.verifier.read(jobs[half:], more=False)
    turning.cancel()
    assert seal.looked == len(jobs) + 1
    assert at_once <= SIGNATURES_AT_A_TIME // 3 + 1
    assert {refusal.kind for refusal in bench.look(*jobs).values()} == {"changed"}
    assert seal.looked == len(jobs) + 1, "each once"


def test_only_what_has_changed_is_looked_at_again_until_time_could_have_changed_the_rest() -> None:
    """Each change of one record cost a look at 12,000 others."""
    bench, jobs = Bench(), {job.uid: job for job in invented(100)}

    def looks(now: float, unread: Mapping[str, str] = {}) -> int:
        def look() -> None:
            found = bench.verifier.look(jobs, "e1", now, whole=True, seasoned=False, unread=unread)
            assert {uid for uid, refusal in found.items() if refusal.kind == "changed"} == jobs.keys() - {
                key.removeprefix("job:") for key in unread
            }

        return counted(look)[AdmissionVerifier.refusal.__code__]

    assert looks(NOW) == 100
    jobs = jobs | {"x1": changed(jobs["x1"], rev=9)}
    assert (looks(NOW), looks(NOW)) == (1, 0)
    jobs = {uid: job for uid, job in jobs.items() if uid != "x2"}
    assert looks(NOW) == 0
    assert looks(NOW, {"job:x3": "mood"}) == 0
    assert looks(NOW) == 1, "it can be read again"
    bench.verifier.refusal(changed(jobs["x4"], rev=9), NOW)
    assert looks(NOW) == 1, "another record of it was judged meanwhile"
    jobs = dict(jobs)
    assert looks(NOW + LOOK_AGAIN) == len(jobs)


async def test_what_was_read_and_came_into_no_view_is_not_kept() -> None:
    bench, (job, *_) = Bench(), invented(1)
    await bench.verifier.read([job], more=False)
    bench.look(signed())
    await bench.verifier.read([], more=False)
    bench.look(signed())
    assert set(bench.verifier._judged) == {UID}


def test_of_thousands_of_refusals_the_log_has_a_line_each_only_of_the_first() -> None:
    bench, jobs = Bench(), invented(1000)
    with capture_logs() as logs:
        refused = bench.look(*jobs)
        bench.look(*jobs, now=NOW + 10)
    assert len(refused) == bench.counted("changed") == 1000
    assert sum("uid" in line for line in logs) == NAMED_AT_ONCE
    assert [line["count"] for line in logs if "count" in line] == [1000 - NAMED_AT_ONCE]


def test_a_node_whose_key_has_signed_no_job_suspects_its_own_key() -> None:
    bench, good = Bench(), signed(make_job().model_copy(update={"uid": "u2"}))
    foreign = changed(signed(), owner=0)
    assert "this node's key is another than the cluster's" in bench.look(foreign)[foreign.uid].text
    assert "this node's key" not in bench.look(foreign, good)[foreign.uid].text, "and no later than it knows better"
    assert "this node's key" in bench.look(foreign)[foreign.uid].text


@pytest.mark.parametrize(("state", "nodes", "advised"), [
    ("active", ("n1", "n2"), False), ("forming", ("n2",), False), ("active", ("n1",), True), ("ended", ("n2",), True),
])  # fmt: skip
def test_nobody_is_advised_to_delete_a_changed_job_that_other_nodes_run(
    state: str, nodes: tuple[str, ...], advised: bool
) -> None:
    generation = make_generation(nodes).model_copy(update={"state": state})
    job = changed(signed(), owner=0, generation=generation)
    text = Bench().look(job)[job.uid].text
    assert ("nodeagentctl delete" in text) == advised
    assert ("on other nodes (n2)" in text) == (not advised)


def test_a_changed_spec_is_refused_and_the_right_one_runs_again() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    evil = make_spec(name="a", priority=5)
    assert bench.why(changed(job, spec=evil)) == "changed"
    assert bench.why(job) == ""
    assert bench.why(changed(job, owner=0)) == "changed"


def test_a_generation_that_its_members_did_not_agree_to_is_refused() -> None:
    generation = make_generation(["n1"], state="forming")
    ack = SEAL.ack(UID, generation.token, "n1", Ack(life="life-n1", address="a:1"))
    seal = " ".join(str(int(ack.signature[at : at + 8], 16)) for at in range(0, 64, 8))
    active = generation.model_copy(update={"state": "active", "missing": {}, "seal": seal, "address": "a:1"})
    bench, job = Bench(), signed(make_job("running", active))
    assert bench.why(job) == ""
    assert bench.why(changed(job, generation=active.model_copy(update={"address": "evil:1"}))) == "gang"
    assert bench.why(changed(job, generation=active.model_copy(update={"hosts": {"n1": "evil"}}))) == "gang"
    assert bench.why(changed(job, generation=active.model_copy(update={"seal": ""}))) == "gang"
    assert bench.why(job) == ""


ROLES = ("pserver", "trainer")
PLACES = tuple(Place(role=role, index=0, workers=1, devices=(f"cpu{i}",)) for i, role in enumerate(ROLES))


def in_places(generation: Generation) -> JobRecord:
    """Of two roles."""
    one = make_spec().role.model_copy(update={"nodes": Nodes(min=1, max=1, target=1)})
    roles = tuple(one.model_copy(update={"name": name}) for name in ROLES)
    return signed(make_job("forming", generation, spec=make_spec().model_copy(update={"roles": roles})))


def test_a_generation_without_the_places_of_its_roles_is_refused() -> None:
    places, plain = PLACES, make_generation(["n1"], state="forming", workers=2)

    def generation(*held: Place, workers: int = 2) -> Generation:
        member = plain.members["n1"].model_copy(update={"places": held, "workers": workers})
        return plain.model_copy(update={"members": {"n1": member}})

    job = in_places(generation(*places))
    assert Bench().why(job) == ""
    more = places[1].model_copy(update={"index": 1})
    assert Bench().why(changed(job, generation=generation(*places, more, workers=3))) == "", "a role may be scaled"
    gap = places[1].model_copy(update={"index": 2})
    assert Bench().why(changed(job, generation=generation(*places, gap, workers=3))) == "size"
    assert Bench().why(changed(job, generation=generation(places[0]))) == "size"
    assert Bench().why(changed(job, generation=generation(*places, places[1]))) == "size"
    assert Bench().why(changed(job, generation=generation(*places, workers=3))) == "size"
    evil = places[1].model_copy(update={"role": "nobody"})
    assert Bench().why(changed(job, generation=generation(places[0], evil))) == "size"
    active = generation(*places).model_copy(update={"state": "active", "missing": {}})
    assert Bench().why(changed(job, generation=active)) == "size", "it has no ports"
    bench = Bench()
    assert bench.why(job) == ""
    assert bench.why(changed(job, generation=active)) == "size", "and is not taken for the one before"
    assert bench.why(job) == ""
    assert bench.why(changed(job, spec=make_spec())) == "changed"


class Members(dict[str, Member]):
    """Counts how often all are looked at."""

    looks = 0

    def values(self) -> Any:
        Members.looks += 1
        return super().values()


def test_places_are_looked_at_once_for_each_gang() -> None:
    plain = make_generation(["n1"], state="forming", workers=2)
    members = Members(n1=plain.members["n1"].model_copy(update={"places": PLACES}))
    bench, job = Bench(), in_places(plain.model_copy(update={"members": members}))
    assert bench.why(job) == ""
    seen = Members.looks
    assert bench.why(changed(job, rev=2)) == ""
    assert Members.looks == seen > 0


def test_a_generation_of_a_size_that_the_file_does_not_allow_is_refused() -> None:
    job = signed(make_job("forming", make_generation(["n1"], state="forming"), spec=make_spec(size=(2, 3))))
    assert Bench().why(job) == "size"
    assert Bench().why(changed(job, generation=make_generation(["n1", "n2"], state="forming"))) == ""
    assert Bench().why(changed(job, generation=make_generation(["n1", "n2", "n3", "n4"], state="forming"))) == "size"
    assert Bench().why(changed(job, generation=make_generation(["n1"], state="ended"))) == ""


@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_a_job_that_ended_never_runs_again(phase: str) -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    assert bench.why(changed(job, phase=phase)) == "", "nothing of it is to be run"
    assert bench.why(job) == "ended"


def test_nor_one_that_had_ended_before_this_agent_came() -> None:
    bench, job = Bench(), signed()
    assert bench.why(ended(job)) == ""
    assert bench.why(job) == "ended"


def test_an_end_without_a_good_signature_says_nothing_of_the_signed_job() -> None:
    bench, job = Bench(), signed()
    assert bench.why(ended(changed(job, owner=0))) == ""
    assert bench.why(job) == ""


async def test_a_removed_job_never_runs_again_not_even_after_a_restart() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    assert bench.look() == {}
    assert bench.why(job) == "ended"
    again = await bench.restarted()
    assert again.why(job) == "ended"
    assert again.why(job, now=NOW + 3 * 24 * HOUR) == "ended"
    longer = changed(job, admission=SEAL.renewed(job, NOW + 24 * HOUR, "n2"))
    assert again.why(longer, now=NOW + 24 * HOUR) == "ended"


def test_a_view_that_is_not_whole_removes_nothing() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    assert bench.look(whole=False) == {}
    assert bench.why(job) == ""


def test_what_a_store_that_lost_writes_lacks_has_not_ended() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    assert bench.look(job, seasoned=True) == {}
    assert bench.look(era="e2", seasoned=True) == {}
    assert bench.why(job, now=NOW + 25 * HOUR, era="e2") == "", "another agent gave it back"


def test_an_old_admission_convinces_nobody_who_has_not_seen_the_job() -> None:
    job = signed(at=NOW - LIFETIME - 1)
    assert Bench().why(job) == "expired"
    assert "the clock of this node or of n7 is wrong (timedatectl)" in Bench().look(job)[UID].text
    assert Bench().why(signed(at=NOW - LIFETIME)) == ""


async def test_who_has_seen_it_goes_on_and_may_renew_it() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    assert bench.why(job, now=NOW + 30 * 24 * HOUR) == "", "it was never away"
    weekend = await (await bench.restarted()).restarted()
    late = NOW + 30 * 24 * HOUR + 60 * HOUR
    assert (await bench.restarted(late)).why(job, now=late) == ""
    assert weekend.verifier.due({UID: job}, NOW + 60 * HOUR) == [job]


async def test_nobody_is_believed_to_live_after_a_week_without_a_sight_of_it() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    bench.look(era="e2")  # the store lost it
    again = await bench.restarted(NOW + 8 * 24 * HOUR)
    assert again.why(job, now=NOW + 8 * 24 * HOUR) == "expired"


async def test_what_ended_while_it_was_away_needs_a_good_admission_again() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    again = await bench.restarted()
    assert again.look(now=NOW + 25 * HOUR) == {}
    assert again.why(job, now=NOW + 25 * HOUR) == "", "it may just not be given back yet"
    again = await bench.restarted()
    assert again.look(now=NOW + 25 * HOUR, seasoned=True) == {}
    assert again.why(job, now=NOW + 25 * HOUR) == "expired"
    again = await bench.restarted()
    assert again.look(now=NOW + HOUR, seasoned=True) == {}
    assert again.why(job, now=NOW + HOUR) == "", "somebody who knows it brought it back"


def test_a_clock_that_steps_an_hour_stops_nothing() -> None:
    for step in (-HOUR, HOUR):
        bench, job = Bench(), signed()
        assert bench.why(job) == ""
        assert bench.why(job, now=NOW + step) == ""
        assert Bench().why(signed(at=NOW + step)) == "", "the signer's stepped"
    half_over = signed(at=NOW - LIFETIME / 2)
    assert Bench().why(half_over, now=NOW + HOUR) == "", "renewed in time, hours are left"


def test_an_admission_from_the_future_is_not_believed() -> None:
    bench, job = Bench(), signed(at=NOW + SKEW + 1)
    refused = bench.look(job)[UID]
    assert refused.kind == "early"
    assert "n7" in refused.text
    known = Bench()
    assert known.why(signed()) == ""
    assert known.why(job) == "", "who has seen it does not look at the clock"


def test_due_are_living_jobs_in_the_second_half_of_their_admission() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    assert bench.verifier.due({UID: job}, NOW + LIFETIME / 2 - 1) == []
    assert bench.verifier.due({UID: job}, NOW + LIFETIME / 2 + 1) == [job]
    far_ahead = signed(at=NOW + 10 * HOUR)
    assert bench.verifier.due({UID: far_ahead}, NOW) == [far_ahead], "of a clock that is far ahead"
    assert bench.verifier.due({UID: make_job()}, NOW) == []
    assert bench.verifier.due({UID: ended(job)}, NOW + LIFETIME) == []


def test_an_unsigned_control_is_refused_and_says_so() -> None:
    bench, job = Bench(), signed()
    assert bench.why(job) == ""
    scaled = changed(job, control=job.control.model_copy(update={"rev": 2, "target": 3}))
    found = bench.look(scaled)[UID]
    assert (found.kind, found.controlled, found.rev) == ("control", False, 1)
    assert "nodeagentctl resume a" in found.text
    assert bench.why(signed(rev=2, target=3)) == ""


def test_an_older_control_written_back_is_refused() -> None:
    bench, first, second = Bench(), signed(rev=1), signed(rev=2, desired="pause")
    assert bench.why(first) == ""
    assert bench.why(second) == ""
    found = bench.look(first)[UID]
    assert (found.kind, found.controlled, found.rev) == ("control", False, 2)
    assert bench.why(first, era="e2") == "control", "whoever can write to the store can begin an era, too"
    assert bench.why(second, era="e3") == ""


def test_nor_does_it_count_after_the_job_was_missing_in_another_era() -> None:
    bench, first, second = Bench(), signed(rev=1), signed(rev=2, desired="pause")
    assert bench.why(second) == ""
    assert bench.look(era="e2") == {}
    assert bench.why(first, era="e2") == "control"


async def test_of_jobs_that_are_remembered_no_more_no_order_is() -> None:
    bench = Bench()
    assert bench.why(signed(rev=2)) == ""
    bench.look(era="e2")
    await bench.verifier.save(NOW + 10 * 24 * HOUR)
    assert (bench.disk.kept, bench.verifier._revs) == ({}, {})


def test_what_an_operator_wants_of_a_forged_job_is_known() -> None:
    forged = make_job(desired="stop")
    assert not Bench().look(forged)[UID].controlled
    stopped = changed(forged, control=SEAL.control(UID, forged.control))
    found = Bench().look(stopped)[UID]
    assert (found.kind, found.controlled) == ("unsigned", True)


def test_what_is_to_be_saved_is_reported() -> None:
    bench, job = Bench(), signed()
    bench.look(make_job())
    assert not bench.verifier.dirty.is_set(), "nothing is kept of what nobody signed"
    bench.look(job)
    assert bench.verifier.dirty.is_set()
    bench.verifier.dirty.clear()
    bench.look(changed(job, rev=7))
    assert not bench.verifier.dirty.is_set()
    bench.look(changed(job, rev=7), now=NOW + 2 * HOUR)
    assert bench.verifier.dirty.is_set(), "it still lives"
    bench.verifier.dirty.clear()
    bench.look(ended(job), now=NOW + 2 * HOUR)
    assert bench.verifier.dirty.is_set()
    bench.verifier.dirty.clear()
    bench.look(ended(job), now=NOW + 2 * HOUR)
    assert not bench.verifier.dirty.is_set()


async def test_a_record_that_cannot_be_read_has_not_ended() -> None:
    bench, job = Bench(), signed()
    bench.look(job)
    damaged = {f"job:{job.uid}": "a job's record has the unknown field mood", "node:n2": "it has no id"}
    with capture_logs() as logs:
        for second in range(3):
            (refusal,) = bench.look(job, unread=damaged, now=NOW + second).values()
            assert bench.verifier.due({job.uid: job}, NOW + second + LIFETIME / 2) == [], "what it says is not known"
    assert (refusal.kind, "unknown field mood" in refusal.text, refusal.controlled) == ("unreadable", True, False)
    assert ([entry["job"] for entry in logs], bench.counted("unreadable")) == ([job.name], 1), "once"
    assert bench.look(job) == {}, "mended"

    after = await bench.restarted()  # knows it by its ledger alone
    assert [r.kind for r in after.look(unread=damaged, seasoned=True).values()] == ["unreadable"]
    assert after.look(job, now=NOW + 30 * HOUR) == {}, "it is the same job, however old its admission is by now"


def test_the_same_view_is_not_looked_at_again_before_time_could_change_it() -> None:
    """What a verdict says may depend on the time, so it is looked at again after a while; a changed record at once."""
    bench, job = Bench(), signed()
    jobs, unread = {job.uid: job}, dict[str, str]()

    def look(now: float) -> object:
        return bench.verifier.look(jobs, "e1", now, whole=True, seasoned=True, unread=unread)

    found = look(NOW)
    assert look(NOW + LOOK_AGAIN - 1) is found
    assert look(NOW + LOOK_AGAIN) is not found
    found = look(NOW + LOOK_AGAIN)
    assert look(NOW) is not found, "the clock went back"
    found = look(NOW)
    bench.verifier.refusal(job.model_copy(), NOW)
    assert look(NOW) is not found, "another record was judged meanwhile"
    found = look(NOW)
    jobs = {job.uid: changed(job, owner=7)}
    assert look(NOW) != found


def test_a_pointer_that_no_agent_committed_leads_nobody() -> None:
    """Found by strangers: any text in the pointer reached the workers."""
    bench = Bench()
    job = signed()
    pointer = Checkpoint(name="step-9", step=9, number=1, order=1)
    good = changed(job, checkpoint=SEAL.pointer(job.uid, pointer))
    assert bench.why(good) == ""
    assert good.checkpoint is not None
    for forged in (
        pointer,
        good.checkpoint.model_copy(update={"name": "step-8"}),
        good.checkpoint.model_copy(update={"step": 8}),
        SEAL.pointer("another", pointer),
    ):
        assert bench.why(changed(job, checkpoint=forged)) == "checkpoint"


def pointing(job: JobRecord, number: int, order: int, **more: Any) -> JobRecord:
    pointer = SEAL.pointer(job.uid, Checkpoint(name=f"g{number}-{order}", step=9, number=number, order=order))
    return changed(job, checkpoint=pointer, **more)


def test_an_older_pointer_written_back_is_refused_and_so_is_none() -> None:
    """The next generation began from it, and threw away the training since."""
    bench, job = Bench(), signed()
    newest = pointing(job, 2, 3)
    for good in (job, pointing(job, 1, 9), pointing(job, 2, 1), newest):
        assert bench.why(good) == ""
        assert bench.verifier.void(good) is None
    assert (bench.verifier.misled, bench.verifier.pointer(UID)) == ([], newest.checkpoint)
    for era in ("e1", "e2"):  # anybody who can write to the store can begin one
        for older in (pointing(job, 2, 2), pointing(job, 1, 99), job):
            assert bench.why(older, era=era) == "checkpoint"
            assert bench.verifier.void(older) == older.checkpoint
            assert (bench.verifier.misled, bench.verifier.pointer(UID)) == ([UID], newest.checkpoint)
    assert bench.why(newest) == ""
    assert bench.why(pointing(job, 3, 1)) == ""
    assert bench.why(newest) == "checkpoint"


def test_what_nobody_signed_is_never_the_newest_pointer() -> None:
    bench, job = Bench(), signed()
    good = pointing(job, 1, 1)
    evil = changed(job, checkpoint=Checkpoint(name="evil", step=9, number=99, order=1))
    assert bench.why(good) == ""
    assert bench.why(evil) == "checkpoint"
    assert bench.verifier.void(evil) == evil.checkpoint
    assert bench.verifier.pointer(UID) == good.checkpoint
    assert bench.why(good) == ""


async def test_the_newest_pointer_is_known_after_a_restart_as_long_as_the_job_is() -> None:
    bench, job = Bench(), signed()
    newest = pointing(job, 2, 3)
    assert bench.why(newest) == ""
    bench = await bench.restarted()
    assert bench.why(pointing(job, 2, 2)) == "checkpoint"
    assert bench.verifier.pointer(UID) == newest.checkpoint
    bench = await bench.restarted()
    assert bench.why(job) == "checkpoint"
    bench.look(changed(newest, phase="stopped"))
    assert bench.verifier.pointer(UID) is None
    bench = await bench.restarted()
    assert bench.disk.kept[UID].pointer is None
    bench = Bench()
    assert bench.why(newest) == ""
    bench.look(era="e2")
    await bench.verifier.save(NOW + 10 * 24 * HOUR)
    assert (bench.disk.kept, bench.verifier._pointers) == ({}, {})


def test_a_pointer_is_written_down_when_an_older_one_is_found_and_known_from_the_copy_of_the_jobs_before() -> None:
    """Not with each commit: the copy of the jobs on this disk has it at once."""
    job = signed()
    bench, newest = Bench(), pointing(job, 2, 3)
    bench.look(job)
    bench.verifier.dirty.clear()
    bench.look(newest)
    assert not bench.verifier.dirty.is_set()
    bench.look(pointing(job, 2, 2))
    assert bench.verifier.dirty.is_set()
    bench = Bench()
    unsigned = Checkpoint(name="x", step=1, number=9, order=9)
    bench.verifier.recall([newest, changed(make_job(uid="u2"), checkpoint=unsigned)])
    assert bench.why(pointing(job, 2, 2)) == "checkpoint"
    assert bench.verifier.pointer("u2") is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../../../../tmp/evil", "/tmp/evil", "a/b", "a\nb", "a\x1b[31m", "x" * 256, "é" * 128]
)
def test_a_pointer_names_one_folder(name: str) -> None:
    with pytest.raises(ValueError, match="name is that of one folder"):
        Checkpoint(name=name, step=1, number=1, order=1)


def shared(rev: int, *names: str) -> QueuesRecord:
    tree = SEAL.queues(Queues(rev=rev, by="ann", queues=tuple(Queue(name=name) for name in names)))
    return QueuesRecord(tree=tree, rev=100 + rev)


def test_the_newest_queues_that_are_signed_count() -> None:
    verifier = Bench().verifier
    assert verifier.tree(None) is NO_QUEUES
    first, second = shared(1, "a"), shared(2, "a", "b")
    assert verifier.tree(first) is first.tree
    assert verifier.tree(second) is verifier.tree(second) is second.tree


def test_queues_that_were_changed_in_the_store_are_refused_once_and_the_good_ones_stay() -> None:
    verifier, good = Bench().verifier, shared(1, "a")
    grabbed = good.tree.model_copy(update={"queues": (Queue(name="a", weight=1000),), "rev": 2})
    forged = QueuesRecord(tree=grabbed, rev=102)
    assert verifier.tree(good) is good.tree
    with capture_logs() as logs:
        assert [verifier.tree(forged), verifier.tree(forged)] == [good.tree, good.tree]
    assert len(logs) == 1
    assert Bench().verifier.tree(forged) == NO_QUEUES


def test_older_queues_written_back_are_refused() -> None:
    verifier, first, second = Bench().verifier, shared(1, "a"), shared(2, "b")
    verifier.tree(second)
    assert verifier.tree(QueuesRecord(tree=first.tree, rev=103)) is second.tree
    assert verifier.tree(shared(3)).queues == ()


def reserved(rev: int, *ids: str) -> WindowsRecord:
    found = (Window(id=one, nodes=("n1",), start=0, end=1, starts=0.0, ends=1.0, by="ann", text="x") for one in ids)
    return WindowsRecord(windows=SEAL.windows(Windows(rev=rev, windows=tuple(found))), rev=100 + rev)


def test_the_newest_windows_that_are_signed_count() -> None:
    verifier, first, second = Bench().verifier, reserved(1, "w1"), reserved(2, "w1", "w2")
    assert verifier.windows(None) is NO_WINDOWS
    assert verifier.windows(first) is first.windows
    assert verifier.windows(second) is verifier.windows(second) is second.windows
    forged = WindowsRecord(windows=second.windows.model_copy(update={"rev": 3, "windows": ()}), rev=103)
    with capture_logs() as logs:
        assert [verifier.windows(forged), verifier.windows(forged)] == [second.windows, second.windows]
        assert verifier.windows(WindowsRecord(windows=first.windows, rev=104)) is second.windows
    assert len(logs) == 2
    assert verifier.windows(reserved(4)).windows == ()


def turned_back(bench: Bench) -> tuple[object, object]:
    return bench.verifier.older_queues, bench.verifier.older_windows


async def test_older_queues_windows_and_orders_are_refused_after_a_restart_too() -> None:
    """An agent that started later believed them."""
    bench, first, second = Bench(), signed(rev=1), signed(rev=2, desired="pause")
    bench.verifier.of_cluster("c1")
    assert bench.why(second) == ""
    newest, closed = shared(2, "a"), reserved(2, "w1")
    assert (bench.verifier.tree(newest), bench.verifier.windows(closed)) == (newest.tree, closed.windows)
    assert bench.verifier.dirty.is_set()
    after = await bench.restarted()
    after.verifier.of_cluster("")
    after.verifier.of_cluster("c1")
    assert turned_back(after) == (None, None)
    assert after.verifier.tree(None) == newest.tree, "it is there until another is read"
    assert after.verifier.tree(shared(1, "b")) == newest.tree
    assert after.verifier.windows(reserved(1)) == closed.windows
    assert turned_back(after) == ((1, newest.tree), (1, closed.windows))
    assert after.why(first) == "control"
    assert after.verifier.tree(shared(3)).queues == after.verifier.windows(reserved(3)).windows == ()
    assert turned_back(after) == (None, None)
    assert after.why(second) == ""


async def test_another_cluster_has_queues_and_windows_of_its_own() -> None:
    bench = Bench()
    bench.verifier.of_cluster("c1")
    bench.verifier.tree(shared(2, "a"))
    bench.verifier.windows(reserved(2, "w1"))
    after = await bench.restarted()
    after.verifier.of_cluster("c2")
    assert (after.verifier.tree(None), after.verifier.windows(None)) == (NO_QUEUES, NO_WINDOWS)
    first = shared(1, "b")
    assert after.verifier.tree(first) is first.tree


async def test_what_another_key_signed_is_not_remembered() -> None:
    disk = Disk()
    other = Seal(ClusterKey(b"k" * 32), "lab")
    tree, windows = other.queues(Queues(rev=9, by="eve")), other.windows(Windows(rev=9, by="eve"))
    disk.all = Remembered(cluster_uid="c1", queues=tree, windows=windows)
    bench = Bench(disk)
    assert (bench.verifier.tree(None), bench.verifier.windows(None)) == (NO_QUEUES, NO_WINDOWS)


def test_an_older_order_is_refused_by_what_the_copy_of_the_jobs_has_and_is_written_down_then() -> None:
    bench, first, second = Bench(), signed(rev=1), signed(rev=2, desired="pause")
    bench.verifier.recall(
        [second, changed(make_job(uid="u2"), control=make_job().control.model_copy(update={"rev": 9}))]
    )
    assert "u2" not in bench.verifier._revs, "nobody signed it"
    bench.look(changed(second, phase="paused"))
    bench.verifier.dirty.clear()
    assert bench.why(first) == "control"
    assert bench.verifier.dirty.is_set()
