"""Whatever was read before, a record is what its texts say; what did not change is the very same object."""

from __future__ import annotations

import random

import pytest

from nodeagent.model.job import Checkpoint, JobRecord, Spend
from nodeagent.model.world import Ack, Head, Holder, PodReport, Token
from nodeagent.store.codec import decode_job, encode_job
from nodeagent.store.decoder import Decoder
from tests.unit.plan.build import life, make_head, make_job

NODES = tuple(f"n{i}" for i in range(1, 7))


def flat(job: JobRecord) -> list[str]:
    return [text for pair in encode_job(job).items() for text in pair]


def gang(*acks: str, number: int = 2) -> JobRecord:
    head = make_head(NODES, state="forming", number=number, acks=acks, holders=NODES)
    return make_job("forming", head, active=1, rev=3)


def changed(rng: random.Random, job: JobRecord) -> JobRecord:
    """One or two things that the store's steps do, and some that they do not."""
    head, node = job.head, rng.choice(NODES)
    if head is None or rng.random() < 0.15:
        fresh: Head | None = make_head(rng.sample(NODES, 3), number=rng.randint(1, 9), holders=rng.sample(NODES, 2))
        head = fresh if rng.random() < 0.8 else None
    else:
        seq = rng.randint(0, 3)
        more: list[dict[str, object]] = [
            {"acks": head.acks | {node: Ack(life=life(node), address=rng.choice(["", "n1:1"]))}},
            {"acks": {}},
            {"reports": head.reports | {node: PodReport(state="failed", reason="né", seq=seq)}},
            {"reports": {n: r for n, r in head.reports.items() if n != node}},
            {"holders": {n: h for n, h in head.holders.items() if n != node}},
            {"holders": head.holders | {node: Holder(life="c", devices=("cpu0",))}},
            {"state": rng.choice(["forming", "active", "ended"]), "since": seq},
            {"keepers": {node: life(node)}},
        ]
        head = head.model_copy(update=rng.choice(more))
    spent = {str(rng.randint(0, 4)): Spend(at=1, wall=2.5, kind="reform", counts=False)}
    update: list[dict[str, object]] = [
        {},
        {"budget": job.budget | spent},
        {"last_reports": {node: PodReport(state="succeeded")}},
        {"keepers": {node: life(node)}},
        {"active": None if rng.random() < 0.3 else Token(number=2, id="g2")},
        {"checkpoint": Checkpoint(name="c", step=rng.randint(0, 2), number=1, order=1)},
        {"control": job.control.model_copy(update={"rev": job.control.rev + 1})},
    ]
    return job.model_copy(update={"head": head, "rev": job.rev + 1} | rng.choice(update))


@pytest.mark.parametrize("seed", range(20))
def test_a_record_is_what_its_texts_say_whatever_was_read_before(seed: int) -> None:
    rng, read = random.Random(seed), Decoder()
    known = [gang("n1"), make_job("queued", uid="u-b")]
    for _ in range(60):
        job = rng.choice(known[-6:])  # an older one now and then: replies overtake each other
        known.append(changed(rng, job))
        found = read.job(flat(known[-1]))
        assert found == known[-1] == decode_job(flat(known[-1]))


def test_what_did_not_change_is_the_very_same() -> None:
    read = Decoder()
    first, second = read.job(flat(gang("n1"))), read.job(flat(gang("n1", "n2")))
    assert first.head is not None
    assert second.head is not None
    assert second.spec is first.spec
    assert second.control is first.control
    assert second.head.members is first.head.members
    assert second.head.holders is first.head.holders
    assert second.head.acks.keys() == {"n1", "n2"}
    assert second.head.acks["n1"] is first.head.acks["n1"]
    assert first.head.acks.keys() == {"n1"}, "what was given out stays as it was"


def test_what_cannot_be_read_is_an_error_and_changes_nothing() -> None:
    read, good = Decoder(), gang("n1")
    before = read.job(flat(good))
    damaged = encode_job(gang("n1", "n2"))
    for wrong in (
        {"ack:n2": "{}"},
        {"head_state": "asleep"},
        {"mood": "good"},
        {"report:n1": "1 failed"},
        {"rev": "x"},
    ):
        with pytest.raises(ValueError):
            read.job([text for pair in (damaged | wrong).items() for text in pair])
    again = read.job(flat(good))
    assert again == before
    assert again.head is not None
    assert before.head is not None
    assert again.head.acks is before.head.acks


def test_it_keeps_no_more_than_its_bound() -> None:
    one = len(encode_job(gang()))
    read = Decoder(room=2 * one)
    firsts = {uid: read.job(flat(gang().model_copy(update={"uid": uid}))) for uid in ("u1", "u2", "u3")}
    again = {uid: read.job(flat(gang().model_copy(update={"uid": uid}))) for uid in ("u3", "u2", "u1")}
    assert {uid: again[uid].spec is firsts[uid].spec for uid in again} == {"u3": True, "u2": True, "u1": False}
    assert Decoder(room=one - 1).job(flat(gang())) == gang(), "one that is larger than all of it is read all the same"
