"""Agents of a simulation share what they work out from the same records, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from nodeagent.plan.cluster import Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.candidates import candidates
from nodeagent.plan.pods.prepare import should_prepare
from tests.sim.cluster import SimCluster
from tests.sim.sharing import SLOTS, Shared, SharedNotes
from tests.sim.test_directed import simulate


def test_agents_that_have_read_the_same_share_it_and_decide_as_if_alone() -> None:
    async def story(c: SimCluster) -> None:
        await c.submit("a", 2, 3, 3)
        await c.submit("b", 2, 4, 3)
        await c.until(lambda: c.whole("a") and c.whole("b"), 60, "both whole")
        await c.nodes["n1"].power_cut()
        await c.until(lambda: all(c.whole(name) for name in ("a", "b")), 60, "whole again")
        views = [n.agent.cluster() for n in c.nodes.values() if n.agent is not None]
        assert len({id(v.nodes) for v in views}) < len(views), "some have read the same by now"
        for view in views:
            alone = replace(view, notes=Notes())
            for job in view.jobs.values():
                assert decide(view, job, 0.0) == decide(alone, job, 0.0)
                assert candidates(view, job) == candidates(alone, job)
                for name in view.nodes:
                    assert should_prepare(view, job, name) == should_prepare(alone, job, name)

    simulate(5, story)


def test_only_the_very_same_records_in_the_same_order_are_shared() -> None:
    shared, one, other = Shared(), ["a"], ["a"]
    first = shared.mapping({"x": one, "y": other})
    assert shared.mapping({"x": one, "y": other}) is first
    for differs in ({"x": one, "y": one}, {"y": other, "x": one}, {"x": one}, {"x": one, "z": other}):
        assert shared.mapping(differs) is differs


def test_the_newest_results_of_each_thing_are_kept() -> None:
    notes, views, made = SharedNotes(), [object() for _ in range(SLOTS + 1)], []

    def ask(i: int) -> None:
        notes.once("x", (views[i],), lambda _before: made.append(i))

    for i in (*range(SLOTS), 0, SLOTS, 0, 1):
        ask(i)
    assert made == [*range(SLOTS), SLOTS, 1], "the first was asked for again, so the second was dropped"
