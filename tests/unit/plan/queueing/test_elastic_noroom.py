"""Why nobody makes room for a job that waits, and who does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Cordon
from nodeagent.model.queue import Amount, Queue
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.queueing.elastic import making_room, transfers
from nodeagent.plan.queueing.transfers import Transfers
from tests.unit.plan.build import NOW, WALL
from tests.unit.plan.fairshare.ofqueues import A, B, C, auto, cluster, formed, job, ones

ALL = job("a1", 1, range(1, 7))
"""It runs on six nodes."""


def why(view: Cluster, name: str = "b1") -> str:
    """What is said of the job; that is a sentence of its explanation, too."""
    text = making_room(view, view.jobs[f"u-{name}"])
    assert not text or text in explain(view, view.jobs[f"u-{name}"], WALL)
    return text


@pytest.mark.parametrize(
    ("queues", "needs", "text"),
    [
        ([Queue(name="a", reclaimable=False), B], 2, "queue a is not reclaimable"),
        ([Queue(name="a", guarantee=Amount(nodes=6)), B], 2, "queue a has no more than its guarantee"),
        ([A, B], 4, "with it queue b would have 4 nodes, its part by weight is 3"),
        ([A, Queue(name="b", weight=0.1)], 2, "with it queue b would have 2 nodes, its part by weight is 0.5"),
        (
            [A, Queue(name="b", weight=0.1, guarantee=Amount(nodes=1))],
            2,
            "with it queue b would have 2 nodes, its part by weight is 0.5, its guarantee 1",
        ),
        ([Queue(name="a", guarantee=Amount(nodes=5)), B], 2, "queue a can give too little"),
    ],
)
def test_why_nobody_makes_room(queues: list[Queue], needs: int, text: str) -> None:
    view = cluster(6, queues, ALL, job("b1", needs))
    assert transfers(view) == Transfers()
    assert why(view) == f"nobody makes room for it: {text}"


def test_who_has_no_more_than_its_part_gives_nothing() -> None:
    """b could have three of eight nodes; what it lacks is c's and d's, who have two each."""
    heavy, four = Queue(name="b", weight=2), [Queue(name=name) for name in "acd"]
    keeps = Queue(name="e", reclaimable=False)
    jobs: list[JobRecord] = [*ones("c", [1]), *ones("d", [2]), *ones("e", [3, 4, 5, 6])]
    view = cluster(6, [heavy, *four, keeps], *jobs, job("b1", 1))
    assert why(view) == (
        "nobody makes room for it: queues c, d have no more than their parts by weight; queue e is not reclaimable"
    )
    many = [Queue(name=f"c{i}", reclaimable=False) for i in range(6)]
    runs = [job(f"c{i}", 1, [i + 1]) for i in range(6)]
    runs = [one.model_copy(update={"spec": one.spec.model_copy(update={"queue": one.name})}) for one in runs]
    assert why(cluster(6, [B, *many], *runs, job("b1", 1))) == (
        "nobody makes room for it: queues c0, c1, c2 and 3 more are not reclaimable"
    )


def test_no_job_of_its_own_queue_is_stopped() -> None:
    assert why(cluster(6, [A, B], ALL, job("a2", 1)), "a2") == (
        "nobody makes room for it: what runs is of its own queue, a"
    )


def test_where_nothing_runs_nobody_is_to_make_room() -> None:
    view = cluster(6, [A, B], ALL.model_copy(update={"phase": "paused", "generation": None}), job("b1", 2))
    shut = Cordon(reason="disk", by="olga", at=1.0)
    nodes = {n: node.model_copy(update={"cordon": shut}) for n, node in view.nodes.items()}
    assert why(replace(view, nodes=nodes, notes=Notes())) == ""


def test_who_makes_room() -> None:
    assert why(cluster(6, [A, B], ALL, job("b1", 2))) == "job a1 gives n5, n6 back for it"
    assert why(cluster(6, [A, B], auto("a1", range(1, 7)), job("b1", 2))) == "job a1 gives n5, n6 back for it"
    fresh = [formed(one, NOW - 1000) for one in ones("a", range(1, 7))]
    assert why(cluster(6, [A, B], *fresh, job("b1", 1))) == "job a6 makes room for it when it has run for 60 s"
    view = cluster(6, [A, B], *fresh, job("b1", 1))
    assert why(replace(view, served=NOW + 59_000, notes=Notes())) == "job a6 makes room for it"
    four = cluster(8, [A, B], *ones("a", range(1, 9)), job("b1", 4))
    assert why(four) == "job a8 makes room for it, job a7 makes room for it, job a6 makes room for it and 1 more"


def test_there_is_no_sentence_where_there_is_nothing_to_report() -> None:
    assert why(cluster(8, [A, B], ALL, job("b1", 2))) == "", "there is room"
    alone = cluster(6, [], ALL, job("b1", 2))
    assert making_room(alone, alone.jobs["u-b1"]) == "", "one queue"
    capped = cluster(6, [A, Queue(name="b", capability=Amount(nodes=2))], ALL, *ones("b", []), job("b1", 2))
    assert why(capped) == "job a1 gives n5, n6 back for it"
    full = cluster(6, [A, Queue(name="b", capability=Amount(nodes=1)), C], *ones("b", [1]), job("b1", 1))
    assert making_room(full, full.jobs["u-b1"]) == "", "its queue may have no more, which is said by itself"
