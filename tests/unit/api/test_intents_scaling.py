"""What a request for another size comes to: sizes, deadlines, who leaves; and what the same request gets again."""

from __future__ import annotations

import pytest

from nodeagent.api import intents
from nodeagent.api.errors import ApiError
from nodeagent.api.intents import Asked, read_scale
from nodeagent.api.once import same
from nodeagent.model.job import TERMINAL, Control, JobRecord, Phase, Scale
from nodeagent.model.jobspec import MOST_NODES, Nodes, Together
from nodeagent.model.world import Cause, Generation, Member
from nodeagent.plan.cluster import natural
from nodeagent.store.messages import Answer
from tests.unit.api.fakes import spec

SERVED = 50_000


def job(phase: Phase = "running", *, gang: tuple[str, ...] = ("n1", "n2", "n3"), **control: object) -> JobRecord:
    """A job of 1 to 6 nodes that wants 3."""
    wanted = Control.model_validate({"rev": 3, "target": 3, "by": "alice"} | control)
    members = {
        n: Member(node=n, life="x", group_rank=i, first_rank=i, workers=1, devices=("cpu0",))
        for i, n in enumerate(gang)
    }
    generation = Generation(
        number=1, id="g", state="active", members=members, cause=Cause(kind="start", text="first"), since=0
    )
    return JobRecord(
        uid="u1", name="digits", owner=1000, spec=spec(high=6), control=wanted, phase=phase, reason="because",
        submitted=1.0, generation=generation if gang else None,
    )  # fmt: skip


def ask(verb: intents.Verb, **body: object) -> Asked:
    return intents.read_scale(verb, body, "r")


def changed(asked: Asked, record: JobRecord) -> tuple[int, Scale]:
    intent = intents.scale(asked, record, SERVED)
    assert intent is not None
    return intent.change["target"], intent.change["scale"]


OUTS = [
    (ask("scale", target=5), 5, 600.0),
    (ask("scale", target=5, timeout=20), 5, 20.0),
    (ask("scaleout", count=2, timeout=1.5), 5, 1.5),
    (ask("scaleout", count=3), 6, 600.0),
]


@pytest.mark.parametrize(("asked", "want", "timeout"), OUTS)
def test_more_nodes_have_a_deadline(asked: Asked, want: int, timeout: float) -> None:
    target, scale = changed(asked, job())
    assert target == want
    deadline = SERVED + int(timeout * 1000)
    assert scale == Scale(request="r", want=want, before=3, timeout=timeout, deadline=deadline)


INS = [
    (ask("scale", target=1), 1, None, ()),
    (ask("scale", target=1, timeout=20), 1, 20.0, ()),
    (ask("scalein", count=1), 2, None, ()),
    (ask("scalein", count=2, timeout=0), 1, 0.0, ()),
    (ask("scalein", nodes=["n10", "n2"], timeout=5), 1, 5.0, ("n2", "n10")),
    (ask("scalein", nodes=["n2", "n2"]), 2, None, ("n2",)),
]


@pytest.mark.parametrize(("asked", "want", "grace", "leaving"), INS)
def test_fewer_nodes_have_a_grace(asked: Asked, want: int, grace: float | None, leaving: tuple[str, ...]) -> None:
    target, scale = changed(asked, job(gang=("n1", "n2", "n10")))
    assert target == want
    assert scale == Scale(request="r", want=want, before=3, grace=grace, leaving=leaving)


PENDING = Scale(request="first", want=5, before=3, timeout=60.0, deadline=90_000)


def test_a_newer_request_goes_back_to_what_was_before_the_first() -> None:
    record = job(target=5, scale=PENDING)
    assert changed(ask("scaleout", count=1), record)[1].before == 3
    target, scale = changed(ask("scale", target=4, timeout=9), record)
    assert (target, scale.before, scale.deadline) == (4, 3, SERVED + 9000), "more than it was: still a scale-out"
    target, scale = changed(ask("scale", target=3), record)
    assert (target, scale.deadline, scale.state) == (3, 0, "pending"), "taken back"
    over = job(target=5, scale=PENDING.model_copy(update={"state": "met"}))
    assert changed(ask("scaleout", count=1), over)[1].before == 5
    for asked in (ask("scalein", count=1), ask("scalein", nodes=["n1"])):
        with pytest.raises(ApiError, match="is being scaled out to 5") as raised:
            intents.scale(asked, record, SERVED)
        assert raised.value.next_step.endswith("nodeagentctl scale digits 3")


def test_a_scale_out_is_over_when_the_gang_is_whole() -> None:
    """Even while no agent has settled it yet."""
    record = job(target=5, scale=PENDING, gang=("n1", "n2", "n3", "n4", "n5"))
    assert changed(ask("scalein", nodes=["n1"]), record)[0] == 4
    assert changed(ask("scaleout", count=1), record)[1].before == 5


def test_the_target_that_is_so_already_changes_nothing() -> None:
    assert intents.scale(ask("scale", target=3), job(), SERVED) is None
    assert intents.scale(ask("scale", target=5), job(target=5, scale=PENDING), SERVED) is None


def test_of_a_paused_job_only_the_target_is_set() -> None:
    scale = changed(ask("scaleout", count=1), job("paused", desired="pause"))[1]
    assert (scale.state, scale.deadline) == ("set", 0)


@pytest.mark.parametrize(
    "asked",
    [ask("scale", target=0), ask("scale", target=7), ask("scaleout", count=4), ask("scalein", count=3),
     ask("scalein", nodes=["n1", "n2", "n3"])],
)  # fmt: skip
def test_the_file_says_how_many(asked: Asked) -> None:
    with pytest.raises(ApiError, match="allows 1 to 6, and its target is 3") as raised:
        intents.scale(asked, job(), SERVED)
    assert raised.value.status == 409


def test_only_nodes_of_the_gang_can_leave_it() -> None:
    with pytest.raises(ApiError, match=r"does not run on n8, n9: its nodes are n1, n2, n3"):
        intents.scale(ask("scalein", nodes=["n9", "n1", "n8"]), job(), SERVED)
    with pytest.raises(ApiError, match=r"does not run on n1: it has none now \(queued: because\)"):
        intents.scale(ask("scalein", nodes=["n1"]), job("queued", gang=()), SERVED)


@pytest.mark.parametrize("asked", [ask("scale", target=2), ask("scaleout", count=1), ask("scalein", count=1)])
@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_an_ended_job_is_not_scaled(asked: Asked, phase: Phase) -> None:
    with pytest.raises(ApiError, match=f"has ended .*nothing to {asked.verb}"):
        intents.scale(asked, job(phase), SERVED)
    with pytest.raises(ApiError, match="is being stopped"):
        intents.scale(asked, job(desired="stop"), SERVED)


@pytest.mark.parametrize(
    ("verb", "body", "says"),
    [
        ("scale", {}, "target must be a whole number"),
        ("scale", {"target": True}, "target must be a whole number"),
        ("scaleout", {"count": -1}, "1 or more"),
        ("scaleout", {"nodes": ["n1"]}, "count must be"),
        ("scalein", {}, "count must be"),
        ("scalein", {"nodes": "n1"}, "either count or the names"),
        ("scalein", {"nodes": ["n1"], "count": 1}, "either count or the names"),
        ("scalein", {"count": 1, "timeout": 86_401}, "timeout must be 0 to 86400"),
        ("scalein", {"count": 1, "timeout": True}, "timeout must be"),
    ],
)
def test_mistakes_name_the_field(verb: intents.Verb, body: dict[str, object], says: str) -> None:
    with pytest.raises(ApiError, match=says) as raised:
        intents.read_scale(verb, body, "r")
    assert raised.value.status == 400


def kept(asked: Asked, record: JobRecord, after: JobRecord) -> Answer:
    """What the store keeps of it."""
    return Answer(subject=record.uid, did=asked.of(record).did(asked.done(record, after.control).text))


def test_the_same_request_gets_what_the_first_one_did() -> None:
    first = kept(ask("scaleout", count=2), job(), job(target=5))
    again, record = ask("scaleout", count=2, timeout=9), job(target=1)
    reply = intents.repeated(again, same(again.of(record), first).did)
    assert reply == {"changed": False, "previous_target": 3, "asked_target": 5, "repeated": True}


@pytest.mark.parametrize(
    "earlier",
    [
        kept(ask("scaleout", count=1), job(), job(target=4)),
        kept(ask("scalein", count=2), job(), job(target=1)),
        kept(ask("scaleout", count=2), job().model_copy(update={"uid": "u9"}), job(target=5)),
        Answer(subject="u1"),
        Answer(subject="n1"),
    ],
)
def test_a_request_id_is_for_one_change(earlier: Answer) -> None:
    with pytest.raises(ApiError, match="was used for another change before; nothing was changed") as raised:
        same(ask("scaleout", count=2).of(job()), earlier)
    assert raised.value.status == 409


@pytest.mark.parametrize("did", ["", "3", "3 ", "3 5 ", "3 -5", "a 5", "3 " + "5" * 5_000, "[3, 5]", "٣ 5", "\ud800"])
def test_what_somebody_wrote_over_a_request_is_refused_and_breaks_nothing(did: str) -> None:
    with pytest.raises(ApiError, match="was used for another change before; nothing was changed"):
        intents.repeated(ask("scaleout", count=2), did)


def job_of_roles(sizes: dict[str, int] | None = None, scale: Scale | None = None) -> JobRecord:
    """Two servers and two trainers, unless they were scaled."""
    one = job(target=4, sizes=sizes or {}, scale=scale)
    roles = (
        one.spec.role.model_copy(update={"name": "pserver", "replicas": Nodes(min=2, max=2, target=2)}),
        one.spec.role.model_copy(update={"name": "trainer", "nodes": Nodes(min=2, max=2, target=2)}),
    )
    return one.model_copy(update={"spec": one.spec.model_copy(update={"roles": roles})})


@pytest.mark.parametrize("asked", [ask("scale", target=4), ask("scaleout", count=1), ask("scalein", nodes=["n1"])])
def test_of_several_roles_one_has_to_be_named(asked: Asked) -> None:
    with pytest.raises(ApiError, match=r"has several roles \(pserver 2, trainer 2\)") as raised:
        intents.scale(asked, job_of_roles(), SERVED)
    assert "nodeagentctl scale digits trainer=" in raised.value.next_step


def test_the_role_that_is_likely_meant_is_named() -> None:
    """MindSpore's scheduler is the last role, and nobody means it."""
    job = job_of_roles()
    pserver, trainer = job.spec.roles
    elastic = pserver.model_copy(update={"replicas": Nodes(min=1, max=3, target=2)})
    for changes, name in (({"completes": "pserver"}, "pserver"), ({"roles": (trainer, elastic, trainer)}, "pserver")):
        spec = job.spec.model_copy(update=changes)
        with pytest.raises(ApiError) as raised:
            intents.scale(ask("scale", target=3), job.model_copy(update={"spec": spec}), SERVED)
        assert f"say which: nodeagentctl scale digits {name}=3" in raised.value.next_step


GROWING = Scale(request="q", want=3, before=2, role="trainer", timeout=10, deadline=SERVED + 10_000)


@pytest.mark.parametrize(
    ("role", "target", "text"),
    [
        ("trainer", 0, "role trainer of job 'digits' cannot have 0 places: 1 to 4094 are allowed, and it is to have 2"),
        ("trainer", 4095, "cannot have 4095 places"),
        ("triner", 3, "has no role 'triner'"),
    ],
)
def test_what_a_role_cannot_have(role: str, target: int, text: str) -> None:
    with pytest.raises(ApiError, match=text):
        intents.scale(ask("scale", target=target, role=role), job_of_roles(), SERVED)


def test_another_role_waits_for_the_end_of_a_scale_out() -> None:
    record = job_of_roles(sizes={"trainer": 3}, scale=GROWING)
    with pytest.raises(ApiError, match="role trainer of job 'digits' is being scaled out to 3 places") as raised:
        intents.scale(ask("scale", target=3, role="pserver"), record, SERVED)
    assert "nodeagentctl scale digits trainer=2" in raised.value.next_step
    change = intents.scale(ask("scale", target=4, role="trainer"), record, SERVED)
    assert change is not None and (change.change["scale"].want, change.change["scale"].before) == (4, 2)


def test_one_role_is_scaled_and_the_others_stay() -> None:
    record = job_of_roles(sizes={"trainer": 3})
    asked = ask("scale", target=1, role="pserver")
    change = intents.scale(asked, record, SERVED)
    assert change is not None
    assert change.change["sizes"] == {"trainer": 3, "pserver": 1}
    assert (change.change["target"], change.text) == (4, "pserver 2 -> 1 places")
    after = record.control.model_copy(update=change.change)
    assert asked.done(record, after).reply(changed=True) == {
        "changed": True, "previous_target": 2, "asked_target": 1,
    }  # fmt: skip
    assert intents.scale(ask("scale", target=3, role="trainer"), record, SERVED) is None


def test_the_only_role_may_be_named() -> None:
    assert changed(ask("scale", target=5, role="worker"), job())[1].role == ""
    with pytest.raises(ApiError, match="has no role 'trainer'"):
        intents.scale(ask("scale", target=5, role="trainer"), job(), SERVED)


def test_a_job_of_segments_has_whole_ones() -> None:
    record = job()
    record = record.model_copy(update={"spec": record.spec.model_copy(update={"placement": Together(segments=2)})})
    with pytest.raises(ApiError, match="consists of segments of 2 nodes, and 5 is no multiple of that"):
        intents.scale(ask("scale", target=5), record, SERVED)
    assert changed(ask("scale", target=4), record)[0] == 4


@pytest.mark.parametrize(
    "nodes", [["1" * 5000], ["a" * 64], [""], ["n 1"], ["n1", "n*"], [f"n{i}" for i in range(MOST_NODES + 1)]]
)
def test_what_names_no_node_is_refused_before_it_is_sorted_and_kept(nodes: list[str]) -> None:
    """Sort keys of names are kept: 4,096 names of a megabyte each would be most of a machine's memory."""
    kept = natural.cache_info()
    with pytest.raises(ApiError, match=r"nodes must be at most 4096 names of nodes|'[^']{0,64}' is no name of a node"):
        read_scale("scalein", {"nodes": nodes}, "r")
    assert natural.cache_info() == kept
