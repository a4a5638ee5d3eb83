"""Whatever was read before, a record is what its texts say; what did not change is the very same object."""

from __future__ import annotations

import random

import pytest

from nodeagent.model.job import BudgetEntry, Checkpoint, JobRecord
from nodeagent.model.world import Generation, PodReport, Token
from nodeagent.store.codec import decode_job, encode_job
from nodeagent.store.decoder import Base, Decoder
from tests.unit.plan.build import life, make_generation, make_holder, make_job

NODES = tuple(f"n{i}" for i in range(1, 7))


def flat(job: JobRecord) -> list[str]:
    return [text for pair in encode_job(job).items() for text in pair]


def gang(*acks: str, number: int = 2) -> JobRecord:
    generation = make_generation(NODES, state="forming", number=number, acks=acks, holders=NODES)
    return make_job("forming", generation, active=1, rev=3)


def changed(rng: random.Random, job: JobRecord) -> JobRecord:
    """One or two things that the store's steps do, and some that they do not."""
    generation, node = job.generation, rng.choice(NODES)
    if generation is None or rng.random() < 0.15:
        fresh: Generation | None = make_generation(
            rng.sample(NODES, 3), number=rng.randint(1, 9), holders=rng.sample(NODES, 2)
        )
        generation = fresh if rng.random() < 0.8 else None
    else:
        seq = rng.randint(0, 3)
        more: list[dict[str, object]] = [
            {"missing": {n: of for n, of in generation.missing.items() if n != node}},
            {"missing": {n: life(n) for n in generation.members}},
            {"hosts": generation.hosts | {node: rng.choice(["", "né"])}},
            {"seal": str(seq), "address": rng.choice(["", "n1:1"]), "released": seq == 1},
            {"reports": generation.reports | {node: PodReport(state="failed", reason="né", seq=seq)}},
            {"reports": {n: r for n, r in generation.reports.items() if n != node}},
            {"holders": {n: h for n, h in generation.holders.items() if n != node}},
            {"holders": generation.holders | {node: make_holder(node, "c")}},
            {"state": rng.choice(["forming", "active", "ended"]), "since": seq},
            {"failsafe_members": {node: life(node)}},
        ]
        generation = generation.model_copy(update=rng.choice(more))
    spent = {str(rng.randint(0, 4)): BudgetEntry(at=1, wall=2.5, kind="reform", counts=False)}
    update: list[dict[str, object]] = [
        {},
        {"budget": job.budget | spent},
        {"last_reports": {node: PodReport(state="succeeded")}},
        {"failsafe_members": {node: life(node)}},
        {"active": None if rng.random() < 0.3 else Token(number=2, id="g2")},
        {"checkpoint": Checkpoint(name="c", step=rng.randint(0, 2), number=1, order=1)},
        {"control": job.control.model_copy(update={"rev": job.control.rev + 1})},
    ]
    return job.model_copy(update={"generation": generation, "rev": job.rev + 1} | rng.choice(update))


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
    assert first.generation is not None
    assert second.generation is not None
    assert second.spec is first.spec
    assert second.control is first.control
    assert second.generation.members is first.generation.members
    assert second.generation.holders is first.generation.holders
    assert second.generation.missing.keys() == {*NODES} - {"n1", "n2"}
    assert first.generation.missing.keys() == {*NODES} - {"n1"}, "what was given out stays as it was"


def test_what_cannot_be_read_is_an_error_and_changes_nothing() -> None:
    read, good = Decoder(), gang("n1")
    before = read.job(flat(good))
    damaged = encode_job(gang("n1", "n2"))
    for wrong in (
        {"missing:n2": "{}"},
        {"generation_state": "asleep"},
        {"mood": "good"},
        {"report:n1": "1 failed"},
        {"rev": "x"},
    ):
        with pytest.raises(ValueError):
            read.job([text for pair in (damaged | wrong).items() for text in pair])
    again = read.job(flat(good))
    assert again == before
    assert again.generation is not None
    assert before.generation is not None
    assert again.generation.missing is before.generation.missing


def test_it_keeps_no_more_than_its_bound() -> None:
    one = len(encode_job(gang()))
    read = Decoder(room=4 * one)
    for uid in ("u1", "u2", "u3", "u4", "u1", "u5"):
        read.job(flat(gang().model_copy(update={"uid": uid})), "e")
    assert [uid for uid in ("u1", "u2", "u3", "u4", "u5") if read.base(uid)] == ["u1", "u4", "u5"], "those read last"
    assert Decoder(room=one - 1).job(flat(gang())) == gang(), "one that is larger than all of it is read all the same"


def test_of_many_jobs_a_large_gang_is_the_last_to_go() -> None:
    large = gang().model_copy(update={"generation": make_generation(f"n{i}" for i in range(500))})
    read = Decoder(room=2 * len(encode_job(large)))
    for job in (large, *(gang("n1").model_copy(update={"uid": f"u{i}"}) for i in range(100))):
        read.job(flat(job), "e")
    assert read.base(large.uid) is not None
    assert read.base("u99") is not None
    assert read.base("u0") is None


def test_a_job_that_is_gone_takes_no_room() -> None:
    job = gang()
    decoder = Decoder(room=len(encode_job(job)) + 5)
    decoder.job(flat(job), "e")
    for key in (f"job:{job.uid}", f"job:{job.uid}", f"node:{job.uid}"):
        decoder.forget(key)
    assert decoder.base(job.uid) is None
    other = job.model_copy(update={"uid": "other"})
    decoder.job(flat(other), "e")
    assert decoder.base("other") is not None, "its room is free again, once"
    decoder.job(flat(job), "e")
    assert decoder.base("other") is None


def difference(before: JobRecord, after: JobRecord) -> list[str | None]:
    old, new = encode_job(before), encode_job(after)
    changes: dict[str, str | None] = {name: text for name, text in new.items() if old.get(name) != text}
    return [word for pair in (changes | dict.fromkeys(old.keys() - new.keys())).items() for word in pair]


@pytest.mark.parametrize("seed", range(20))
def test_differences_give_the_record(seed: int) -> None:
    rng, read = random.Random(seed), Decoder()
    job = gang("n1")
    read.job(flat(job), "e")
    for _ in range(60):
        before, job = job, changed(rng, job)
        since = rng.randint(0, before.rev)  # more may come than is needed
        assert read.news(job.uid, difference(before, job), "e", since) == job == decode_job(flat(job))


def test_a_difference_counts_only_where_nothing_lies_between() -> None:
    read, old = Decoder(), gang("n1").model_copy(update={"rev": 5})
    new = gang("n1", "n2").model_copy(update={"rev": 9})
    news = difference(old, new)
    assert read.news(old.uid, news, "e", 5) is None, "nothing is known"
    read.job(flat(old), "e")
    assert read.base(old.uid) == (5, "e")
    assert read.news(old.uid, news, "other", 5) is None, "of another era"
    assert read.news(old.uid, news, "e", 7) is None, "what changed from 5 to 7 is missing"
    assert read.news(old.uid, news, "e", 4) == new
    assert read.news(old.uid, difference(old, old.model_copy(update={"rev": 6})), "e", 5) == new, "it was overtaken"


def test_what_beats_did_not_mention_has_not_changed() -> None:
    read, old = Decoder(), gang("n1").model_copy(update={"rev": 5})
    new = gang("n1", "n2").model_copy(update={"rev": 9})
    read.follow(Base(0, ""), Base(5, "e"))
    read.job(flat(old), "e", followed=True)
    read.follow(Base(5, "e"), Base(8, "e"))
    assert read.news(old.uid, difference(old, new), "e", 8, followed=True) == new


def test_a_record_that_came_late_and_by_itself_is_no_base_for_what_beats_bring() -> None:
    """It was not here while the beats went by: one of them may have brought a change of it."""
    read, old = Decoder(), gang("n1").model_copy(update={"rev": 5})
    read.follow(Base(0, ""), Base(8, "e"))
    read.job(flat(old), "e")
    assert read.news(old.uid, [], "e", 8, followed=True) is None


def test_what_could_not_be_read_is_no_base() -> None:
    read, old = Decoder(), gang("n1").model_copy(update={"rev": 5})
    read.follow(Base(0, ""), Base(5, "e"))
    read.job(flat(old), "e", followed=True)
    read.follow(Base(5, "e"), Base(8, "e"))
    with pytest.raises(ValueError):
        read.news(old.uid, ["rev", "7", "missing:n2", "{}"], "e", 5, followed=True)
    read.follow(Base(8, "e"), Base(9, "e"))
    assert read.news(old.uid, ["rev", "9"], "e", 8, followed=True) is None


WRONG: list[dict[str, str | None]] = [
    {"spend:x": BudgetEntry(at=1, wall=2.5, kind="reform", counts=False).to_json()},
    {"used:x": "{}"},
    {"member:n1": make_holder("x").to_json()},
    {"holder:n1": make_holder("x").to_json()},
    {f"member:{node}": None for node in NODES},
]
"""Changes to entries that the model refuses."""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_entries_that_are_an_error_in_a_record_are_one_in_a_difference(wrong: dict[str, str | None]) -> None:
    for whole in (True, False):
        read, old = Decoder(), gang("n1")
        read.job(flat(old), "e")
        now = {name: text for name, text in (encode_job(old) | wrong).items() if text is not None}
        with pytest.raises(ValueError):
            if whole:
                read.job([word for pair in now.items() for word in pair], "e")
            else:
                changes: dict[str, str | None] = {"rev": "7", **wrong}
                read.news(old.uid, [word for pair in changes.items() for word in pair], "e", old.rev)
        assert read.job(flat(old), "e") == old


def test_some_of_the_changes_leave_the_revision_as_it_is() -> None:
    read, old = Decoder(), gang("n1").model_copy(update={"rev": 5})
    read.job(flat(old), "e")
    mine = difference(old, gang("n1", "n2").model_copy(update={"rev": 5}))
    part = read.news(old.uid, mine, "e", 5, upto=9)
    assert part == gang("n1", "n2").model_copy(update={"rev": 5})
    assert read.base(old.uid) == (5, "e")
    new = gang("n1", "n2", "n3").model_copy(update={"rev": 9})
    assert read.news(old.uid, difference(old, new), "e", 5) == new
    assert read.news(old.uid, [*mine[:-1], None], "e", 5, upto=8) == new, "it was overtaken"


def test_one_text_stands_for_all_entries_of_a_kind() -> None:
    read, old = Decoder(), gang("n1", "n2").model_copy(update={"rev": 5})
    before = read.job(flat(old), "e")
    assert old.generation is not None
    held = {node: old.generation.holders[node] for node in NODES[1:]} | {"n3": make_holder("n3", "c")}
    new = old.model_copy(update={"rev": 9, "generation": old.generation.model_copy(update={"holders": held})})
    texts = {node: member.to_json() for node, member in held.items()}
    lines = "\n".join(["8", "", *(word for pair in texts.items() for word in pair)])
    job = read.news(old.uid, ["holder:", lines, "rev", "9"], "e", 5)
    assert job == new
    assert job.generation is not None
    assert before.generation is not None
    assert job.generation.holders["n2"] is before.generation.holders["n2"]
    last = read.news(old.uid, ["holder:", "9\n", "holder:n2", texts["n2"], "rev", "10"], "e", 9)
    assert last is not None
    assert last.generation is not None
    assert last.generation.holders.keys() == {"n2"}
    with pytest.raises(ValueError):
        read.news(old.uid, ["holder:", "9\n\nn1", "rev", "11"], "e", 10)


@pytest.mark.parametrize("members", ["as they were", "changed", "changed as one text"])
def test_a_rule_stands_for_what_follows_from_the_members(members: str) -> None:
    read, old = Decoder(), gang().model_copy(update={"rev": 5})
    read.job(flat(old), "e")
    new = make_generation(NODES if members == "as they were" else (*NODES[1:], "n9"), state="forming", number=2)
    holders = {node: member for node, member in new.members.items() if node != "n4"} | {"n8": make_holder("n8")}
    silent = {node: life(node) for node in new.members if node != "n5"} | {"n3": "another"}
    job = make_job("forming", new.model_copy(update={"holders": holders}), active=1)
    job = job.model_copy(update={"rev": 9, "silent": silent})
    texts = encode_job(job)
    by_rule: list[str | None] = [
        "silent:", '8\nlife\nn5\n\nn3\n"another"',
        "holder:", f"8\nmember\nn4\n\nn8\n{texts['holder:n8']}",
    ]  # fmt: skip
    plain = [
        word
        for name, text in zip(*[iter(difference(old, job))] * 2, strict=True)
        if name is not None and not name.startswith(("holder:", "silent:"))
        and not (members == "changed as one text" and name.startswith("member:"))
        for word in (name, text)
    ]  # fmt: skip
    if members == "changed as one text":
        gang_now = [word for node in new.members for word in (node, texts[f"member:{node}"])]
        plain += ["member:", "\n".join(["9", "", *gang_now])]
    assert read.news(old.uid, by_rule + plain, "e", 5) == job
    done = '=0 succeeded {"state":"succeeded"}'
    but = 'n4\n\nn3\n1 failed {"state":"failed"}'
    both = read.news(old.uid, ["report:", f"10\n{done}\n{but}", "rev", "10"], "e", 9)
    assert both is not None and both.generation is not None
    states = {node: report.state for node, report in both.generation.reports.items()}
    assert states == {node: "failed" if node == "n3" else "succeeded" for node in new.members if node != "n4"}
    with pytest.raises(ValueError, match="rule"):
        read.news(old.uid, ["holder:", "9\nguess", "rev", "11"], "e", 9)
