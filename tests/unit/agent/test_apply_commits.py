"""An agent carries commits: they wait while the store is away, and only the store's word goes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.agent.apply import OTHERS_WAIT, PUT_BACK_EACH, CommitRequests
from nodeagent.agent.membership import Membership
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.verifier import AdmissionVerifier
from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.queue import Queues, QueuesRecord
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.osutil.clock import SystemClock
from nodeagent.pods.base import CommitRequest, PodStatus
from nodeagent.store.base import StepFailedError, StoreRefusedError, StoreUnavailableError
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.ledger import Remembered
from nodeagent.trust.seal import Seal
from tests.unit.ctl.samples import job

TOKEN = Token(number=3, id="g3")
REQUEST = CommitRequest(token=TOKEN, name="c1", step=10, order=1)
ME = Incarnation(life="a", start=2)


class Host:
    """One pod that wishes for a commit until it is answered."""

    def __init__(self, uid: str) -> None:
        self.uid, self.request = uid, cast("CommitRequest | None", REQUEST)
        self.answers: list[str] = []

    def status(self) -> dict[str, PodStatus]:
        return {
            self.uid: PodStatus(uid=self.uid, phase="running", commit=self.request),
            "other": PodStatus(uid="other", phase="ready"),
        }

    def committed(self, uid: str, request: CommitRequest, refused: str) -> None:
        assert (uid, request) == (self.uid, self.request)
        self.answers.append(refused)
        self.request = None


class Shelf:
    """A store that answers as told."""

    def __init__(self, job: JobRecord) -> None:
        self.job, self.error, self.asked = job, cast("Exception | None", None), list[tuple[Any, ...]]()
        self.other = False

    async def commit(self, *asked: Any) -> JobRecord:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        pointer = Checkpoint(name="c1", step=10, number=3, order=1)
        return self.job.model_copy(update={"checkpoint": pointer, "rev": self.job.rev + 1})

    async def put_back(self, *asked: Any) -> JobRecord:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return self.job.model_copy(update={"checkpoint": asked[4], "rev": self.job.rev + 1})

    async def queues(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error

    async def differs(self, job: JobRecord, era: str) -> bool:
        return self.other


SEAL = Seal(ClusterKey(b"k" * 32), "default")


class Me:
    node, incarnation = "n1", ME

    def __init__(self) -> None:
        self.distrusted, self.beats = list[str](), 0

    def distrust(self, record: str) -> None:
        self.distrusted.append(record)

    async def beat(self) -> None:
        self.beats += 1


class Clock(SystemClock):
    """Stands still unless moved."""

    at = 100.0

    def now(self) -> float:
        return self.at


class Disk:
    """Of which nothing is read again."""

    def load(self) -> Remembered:
        return Remembered()

    async def save(self, remembered: Remembered) -> None:
        pass


class Scene:
    def __init__(self) -> None:
        record = job()
        self.uid = record.uid
        self.host, self.store, self.snapshot = Host(self.uid), Shelf(record), Snapshot(Timing())
        self.verifier, self.clock = AdmissionVerifier("n1", SEAL, Disk(), Metrics()), Clock()
        self.me = Me()
        context: Any = SimpleNamespace(store=self.store, host=self.host, snapshot=self.snapshot, clock=self.clock)
        self.commits = CommitRequests(context, cast(Membership, self.me), SEAL, self.verifier)


async def test_what_is_committed_is_answered_and_known_at_once() -> None:
    scene = Scene()
    await scene.commits.carry()
    signature = SEAL.pointer(scene.uid, Checkpoint(name="c1", step=10, number=TOKEN.number, order=1)).signature
    assert scene.store.asked == [(scene.uid, TOKEN, "n1", ME, "c1", 10, 1, signature, None)]
    assert scene.host.answers == [""]
    known = scene.snapshot.job(scene.uid)
    assert known is not None and known.checkpoint is not None and known.checkpoint.name == "c1"
    await scene.commits.carry()
    assert len(scene.store.asked) == 1


async def test_it_waits_while_the_store_is_away_or_recovers() -> None:
    scene = Scene()
    scene.store.error = StoreUnavailableError("no answer")
    with pytest.raises(StoreUnavailableError):
        await scene.commits.carry()
    scene.store.error = StoreRefusedError("recovering", "wait")
    await scene.commits.carry()
    assert scene.host.answers == []
    scene.store.error = None
    await scene.commits.carry()
    assert scene.host.answers == [""]


async def test_one_that_is_refused_for_what_somebody_wrote_over_waits_until_that_is_restored() -> None:
    scene = Scene()
    scene.snapshot.absorb_job(scene.store.job)
    scene.store.error, scene.store.other = StoreRefusedError("stale", "evil was committed after c1"), True
    await scene.commits.carry()
    assert (scene.host.answers, scene.me.distrusted, scene.me.beats) == ([], [f"job:{scene.uid}"], 1)
    scene.store.error = None
    await scene.commits.carry()
    assert scene.host.answers == [""]


def pointed(record: JobRecord, order: int, rev: int) -> JobRecord:
    """A signed record, whose generation 3 has committed."""
    pointer = SEAL.pointer(record.uid, Checkpoint(name=f"c{order}", step=order, number=3, order=order))
    return record.model_copy(
        update={
            "checkpoint": pointer, "rev": rev, "active": TOKEN, "phase": "holding", "generation": None,
            "failsafe_members": {}, "silent": {},
            "control": SEAL.control(record.uid, record.control),
            "admission": SEAL.admit(record.uid, record.owner, record.spec, SystemClock().wall(), "n7"),
        }
    )  # fmt: skip


async def test_the_newest_checkpoint_is_put_back_first_by_who_has_a_part_in_the_job() -> None:
    scene, now = Scene(), SystemClock().wall()
    scene.host.request = None
    older, newest = pointed(scene.store.job, 1, 11), pointed(scene.store.job, 2, 10)
    scene.store.job = older

    def look(record: JobRecord) -> None:
        scene.snapshot.absorb_job(record)
        scene.verifier.look(dict(scene.snapshot.jobs), "e", now, whole=True, seasoned=False)

    look(newest)
    await scene.commits.carry()
    assert (scene.store.asked, scene.commits.pending) == ([], False)
    look(older)
    await scene.commits.carry()
    assert (scene.store.asked, scene.commits.pending) == ([], True), "a member does it, if one is there"
    scene.clock.at += OTHERS_WAIT
    scene.store.error = StoreRefusedError("recovering", "wait")
    for _ in range(2):
        await scene.commits.carry()
    asked = (scene.uid, TOKEN, "n1", ME, newest.checkpoint, older.checkpoint)
    assert scene.store.asked == [asked], "not again at once"
    scene.store.error = None
    scene.clock.at += PUT_BACK_EACH
    await scene.commits.carry()
    assert scene.store.asked == [asked, asked]
    back = scene.snapshot.job(scene.uid)
    assert back is not None and back.checkpoint == newest.checkpoint
    look(back)
    await scene.commits.carry()
    assert not scene.commits.pending


async def test_the_newest_queues_are_put_back_once_in_a_while() -> None:
    scene = Scene()
    scene.host.request = None
    older, newest = (SEAL.queues(Queues(rev=rev, by="ann")) for rev in (1, 2))
    scene.verifier.tree(QueuesRecord(tree=newest, rev=2))
    assert scene.verifier.older_queues is None
    scene.verifier.tree(QueuesRecord(tree=older, rev=3))
    assert bool(scene.commits.pending)
    scene.store.error = StoreRefusedError("stale", "somebody else was faster")
    await scene.commits.carry()
    assert [asked[:2] for asked in scene.store.asked] == [(1, newest)]
    for later, count in ((PUT_BACK_EACH - 0.1, 1), (0.2, 2)):
        scene.clock.at += later
        await scene.commits.carry()
        assert len(scene.store.asked) == count
    assert len({asked[2] for asked in scene.store.asked}) == 2, "requests of their own"
    scene.verifier.tree(QueuesRecord(tree=newest, rev=4))
    await scene.commits.carry()
    assert (len(scene.store.asked), scene.commits.pending) == (2, False)


async def test_a_checkpoint_of_a_generation_that_the_record_does_not_know_is_not_put_back() -> None:
    scene, now = Scene(), SystemClock().wall()
    scene.host.request = None
    for record in (pointed(scene.store.job, 2, 10), pointed(scene.store.job, 1, 11)):
        early = record.model_copy(update={"active": Token(number=2, id="g2")})
        scene.snapshot.absorb_job(early)
        scene.verifier.look(dict(scene.snapshot.jobs), "e", now, whole=True, seasoned=False)
    await scene.commits.carry()
    assert (scene.store.asked, scene.commits.pending) == ([], False)


async def test_one_that_fails_in_the_store_waits_and_ends_no_round() -> None:
    scene = Scene()
    scene.store.error = StepFailedError("the store cannot serve now (ERR user_script:1: no number)")
    await scene.commits.carry()
    assert (scene.host.answers, scene.host.request) == ([], REQUEST)


async def test_a_refusal_is_reported_in_the_stores_words() -> None:
    scene = Scene()
    scene.store.error = StoreRefusedError("stale", "generation 3 may commit nothing any more")
    await scene.commits.carry()
    assert scene.host.answers == ["generation 3 may commit nothing any more"]
