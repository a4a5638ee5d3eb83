"""A scale that is pending: growing all together or not at all, rolled back at its deadline; shrinking by name and with
a grace of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nodeagent.model.job import JobRecord, Scale
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import Decision, Propose, Settle
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    UID,
    WALL,
    WARMING,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)

Nodes = Sequence[NodeRecord | str]
COOL = round(Timing().cooldown * 1000)
LATER = NOW + 60_000
OUT = Scale(request="r", want=4, before=2, timeout=60.0, deadline=LATER)
SLOW: Nodes = ["n1", "n2", "n3", make_node("n4", ready={UID: PREPARING})]


def job(scale: Scale, nodes: Sequence[str] = ("n1", "n2"), *, formed: int = NOW, low: int = 1) -> JobRecord:
    """A job that trains on these nodes; its target is what the scale wants."""
    generation = make_generation(nodes, state="active", acks=nodes, since=formed)
    return make_job("running", generation, spec=make_spec(size=(low, 6)), target=scale.want, scale=scale, rev=2)


def take(nodes: Nodes, one: JobRecord, *, served: int = NOW, lapsed: Sequence[str] = ()) -> Decision:
    return decide(make_cluster(nodes, one, served=served, lapsed=lapsed), one, WALL)


def proposed(decision: Decision) -> Propose:
    assert isinstance(decision.step, Propose), decision
    return decision.step


def settled(decision: Decision) -> tuple[int, Scale]:
    assert isinstance(decision.step, Settle), decision
    assert decision.step.control.scale is not None
    assert decision.why == (decision.step.text,) == (decision.step.control.scale.reason,)
    return decision.step.control.target, decision.step.control.scale


def waits(decision: Decision) -> str:
    assert decision.step is None, decision
    return "; ".join(decision.why)


# --- out


def test_it_grows_at_once_when_all_newcomers_are_ready() -> None:
    step = proposed(take(["n1", "n2", "n3", "n4"], job(OUT)))
    assert [step.members[n].group_rank for n in ("n1", "n2", "n3", "n4")] == [0, 1, 2, 3]
    assert (step.cause.kind, step.planned, step.grace) == ("scale", True, None)
    assert step.cause.text == "scaled from 2 to 4 nodes by ann"


def test_it_waits_until_all_newcomers_are_warm() -> None:
    nodes: Nodes = ["n1", "n2", "n3", make_node("n4", ready={UID: WARMING})]
    decision = take(nodes, job(OUT))
    assert waits(decision) == "runs on 2 of 4 nodes: n4 is still warming up its workers"
    assert decision.at == LATER, "not beyond what it was given"


def test_it_does_not_grow_by_some_of_them() -> None:
    assert waits(take(SLOW, job(OUT))) == "runs on 2 of 4 nodes: 3 of 4 nodes fit: n4 is getting ready (imports torch)"
    few = waits(take(["n1", "n2", "n3"], job(OUT)))
    assert few == "runs on 2 of 4 nodes: 3 of 4 nodes fit, and there are no others"


def test_a_fault_meanwhile_brings_back_what_was_and_no_more() -> None:
    step = proposed(take(["n1", "n2", "n3", *SLOW[3:]], job(OUT), lapsed=["n2"]))
    assert sorted(step.members) == ["n1", "n3"]
    whole = proposed(take(["n1", "n2", "n3", "n4", "n5"], job(OUT), lapsed=["n2"]))
    assert sorted(whole.members) == ["n1", "n3", "n4", "n5"], "all that is wanted is there: once is enough"


def test_below_what_it_was_it_grows_back_after_the_cool_down() -> None:
    short = job(OUT, ["n1"], formed=NOW - COOL + 1)
    assert waits(take(["n1", "n2"], short)) == "runs on 1 of 4 nodes; n2 joins after the cool-down of 30 s"
    step = proposed(take(["n1", "n2"], short, served=NOW + 1))
    assert (sorted(step.members), step.cause.kind) == (["n1", "n2"], "join")


def test_met_when_active_on_all_of_them_even_late() -> None:
    for served in (NOW, LATER + 1):
        target, scale = settled(take(["n1", "n2", "n3", "n4"], job(OUT, ["n1", "n2", "n3", "n4"]), served=served))
        assert (target, scale.state, scale.reason) == (4, "met", "runs on 4 nodes as asked")


def test_at_its_deadline_it_is_rolled_back_with_the_reason() -> None:
    assert waits(take(SLOW, job(OUT), served=LATER - 1))
    target, scale = settled(take(SLOW, job(OUT), served=LATER))
    assert (target, scale.state) == (2, "rolled_back")
    assert (
        scale.reason
        == "scale to 4 timed out after 60s: 3 of 4 nodes fit: n4 is getting ready (imports torch); went back to 2"
    )


@pytest.mark.parametrize(("auto", "target"), [(False, 3), (True, 2)])
def test_what_was_borrowed_meanwhile_stays_borrowed_when_it_is_rolled_back(auto: bool, target: int) -> None:
    spec = make_spec(size=(1, 6))
    nodes = spec.role.nodes.model_copy(update={"auto": auto})
    spec = spec.model_copy(update={"roles": (spec.role.model_copy(update={"nodes": nodes}),)})
    one = job(OUT, ["n1", "n2", "n3"]).model_copy(update={"spec": spec})
    assert settled(take(SLOW, one, served=LATER))[0] == target


def test_rolled_back_it_trains_on_undisturbed() -> None:
    over = OUT.model_copy(update={"state": "rolled_back"})
    back = make_job("running", job(OUT).generation, spec=make_spec(size=(1, 6)), target=2, scale=over, rev=3)
    assert take(["n1", "n2", "n3", "n4"], back, served=LATER + 10 * COOL) == Decision(None)


def test_a_gang_that_forms_as_wanted_is_not_rolled_back() -> None:
    generation = make_generation(["n1", "n2", "n3", "n4"], state="forming", number=2, acks=["n1"], deadline=LATER + 9)
    forms = make_job("forming", generation, spec=make_spec(size=(1, 6)), active=1, target=4, scale=OUT, rev=2)
    nodes: Nodes = ["n1", "n2", "n3", "n4"]
    assert "waits for" in waits(take(nodes, forms, served=LATER + 1))
    without = proposed(take(nodes, forms, served=LATER + 1, lapsed=["n4"]))
    assert len(without.members) == 2, "one of them is gone: what was before forms again"


def test_a_gang_that_forms_smaller_is_rolled_back_as_it_forms() -> None:
    generation = make_generation(["n1", "n2"], state="forming", number=2, acks=["n1"])
    forms = make_job("forming", generation, spec=make_spec(size=(1, 6)), active=1, target=4, scale=OUT, rev=2)
    assert settled(take(SLOW, forms, served=LATER))[0] == 2


def test_a_rollback_takes_no_node_from_a_gang_that_is_larger_than_before() -> None:
    assert settled(take(["n1", "n2", "n3"], job(OUT, ["n1", "n2", "n3"]), served=LATER))[0] == 3


def test_a_job_that_does_not_run_is_rolled_back_too() -> None:
    queued = make_job(spec=make_spec(size=(1, 6)), target=4, scale=OUT, since=NOW)
    target, scale = settled(take([], queued, served=LATER))
    assert (target, scale.reason.endswith("0 of 4 nodes fit, and there are no others; went back to 2")) == (2, True)
    paused = make_job("paused", desired="pause", target=4, scale=OUT, reason="paused by ann")
    text = settled(take(["n1", "n2", "n3", "n4"], paused, served=LATER))[1].reason
    assert "the job is paused: paused by ann" in text


def test_a_stop_goes_first() -> None:
    stopping = make_job("running", job(OUT).generation, desired="stop", target=4, scale=OUT)
    assert not isinstance(take(["n1", "n2"], stopping, served=LATER).step, Settle)


# --- in


def test_a_scale_in_has_its_own_grace() -> None:
    fewer = Scale(request="r", want=2, before=3, grace=7.0)
    step = proposed(take(["n1", "n2", "n3"], job(fewer, ["n1", "n2", "n3"])))
    assert (sorted(step.members), step.grace, step.form_ms) == (["n1", "n2"], 7.0, 22_000)
    usual = fewer.model_copy(update={"grace": None})
    assert proposed(take(["n1", "n2", "n3"], job(usual, ["n1", "n2", "n3"]))).grace is None
    target, scale = settled(take(["n1", "n2", "n3"], job(fewer)))
    assert (target, scale.state, scale.reason) == (2, "met", "runs on 2 nodes as asked")


def test_a_lower_target_above_what_runs_is_met_and_says_so() -> None:
    fewer = Scale(request="r", want=3, before=4)
    target, scale = settled(take(["n1", "n2"], job(fewer)))
    assert (target, scale.state, scale.reason) == (3, "met", "runs on 2 nodes; its target is 3 now")


def test_it_keeps_its_grace_when_it_has_to_form_again() -> None:
    generation = make_generation(
        ["n1", "n2"], state="forming", number=2, cause="scale", planned=True, grace=7.0, holders=["n3"]
    )
    forms = make_job("forming", generation, active=1, target=2)
    assert proposed(take(["n1", "n2", "n3"], forms, lapsed=["n2"])).grace == 7.0


NAMED = Scale(request="r", want=2, before=3, leaving=("n1",))


def test_the_named_node_leaves_whatever_its_rank() -> None:
    step = proposed(take(["n1", "n2", "n3"], job(NAMED, ["n1", "n2", "n3"])))
    assert {n: m.group_rank for n, m in step.members.items()} == {"n2": 0, "n3": 1}
    assert step.cause.text == "n1 scaled in by ann"


def test_it_is_not_met_while_the_named_node_is_in_the_gang() -> None:
    """The gang was one short already: its size is right, its members are not."""
    two = job(NAMED, ["n1", "n2"])
    assert sorted(proposed(take(["n1", "n2", "n5"], two)).members) == ["n2", "n5"]
    assert sorted(proposed(take(["n1", "n2"], two)).members) == ["n2"]
    stays = job(NAMED, ["n1", "n2"], low=2)
    assert waits(take(["n1", "n2"], stays)) == "not yet n1 scaled in by ann: needs 2 nodes, 1 fit"


def test_it_is_the_last_to_be_chosen_and_never_joins_by_itself() -> None:
    over = NAMED.model_copy(update={"state": "met"})
    lost = proposed(take(["n1", "n2", "n3", "n5"], job(over, ["n2", "n3"]), lapsed=["n3"]))
    assert sorted(lost.members) == ["n2", "n5"]
    only = proposed(take(["n1", "n2", "n3"], job(over, ["n2", "n3"]), lapsed=["n3"]))
    assert sorted(only.members) == ["n1", "n2"], "better than none"
    short = waits(take(["n1", "n2"], job(over, ["n2"], formed=0), served=NOW + COOL))
    assert "n1 scaled in by name" in short
    joins = proposed(take(["n1", "n2", "n5"], job(over, ["n2"], formed=0), served=NOW + COOL))
    assert sorted(joins.members) == ["n2", "n5"]


def test_it_is_the_last_to_be_kept_ready() -> None:
    over = NAMED.model_copy(update={"state": "met"})
    one = job(over, ["n2", "n3"])
    cluster = make_cluster(["n1", "n2", "n3", "n5"], one)
    assert (should_prepare(cluster, one, "n5"), should_prepare(cluster, one, "n1")) == (True, False)
