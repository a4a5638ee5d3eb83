"""What ends the waiting of a job in the queue, as ``describe`` says it: only what is true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nodeagent.api.jobdetail import start_json, way_out
from nodeagent.api.serializers import job_json
from nodeagent.ctl.jobtext import _queue, _start, _wait_no_longer, job_lines
from nodeagent.model.job import Admission, JobRecord, Setback
from nodeagent.model.jobspec import After, JobSpec, Nodes, Policy, Role
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.waiting import explain
from tests.unit.ctl import samples
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    UID,
    UNFIT,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
    spend,
)

PAIR = make_spec(size=(2, 2))


OFF = Readiness(state="unfit", reason="its clock", passing=True, clock=True)


def taken() -> JobRecord:
    return make_job("running", make_generation(["n1", "n2"]), uid="u-b", spec=make_spec(name="b", size=(2, 2)))


def step(cluster: Cluster, job: JobRecord) -> str:
    return _wait_no_longer(way_out(job, cluster), job.name)


@pytest.mark.parametrize(
    ("nodes", "others", "more", "says"),
    [
        (["n1", make_node("n2", cordon=True)], [], {}, "nodeagentctl uncordon n2"),
        (["n1", make_node("n2", mute=True)], [], {}, "the agent of n2 runs there and reaches the store: systemctl"),
        (["n1", make_node("n2", ready={UID: OFF})], [], {}, "that of n2 or n7, and set it: timedatectl"),
        (["n1"], [], {}, "start more nodes: it needs 2, and of all nodes 1 live"),
        ([make_node("n1", slots=1), make_node("n2", slots=1)], [taken()], {}, "nodes that other jobs hold are free"),
        (["n1", make_node("n2", ready={UID: UNFIT})], [taken()], {}, "correct what Why says of 1 node; the checks"),
        (["n1", make_node("n2", ready={UID: PREPARING})], [], {}, "nothing yet: nodes get ready"),
        (["n1", "n2"], [], {}, "as soon as it is its turn"),
        (["n1", "n2"], [], {"not_before": NOW + 12_000}, "it starts again by itself in 12"),
    ],
    ids=["cordoned", "mute", "clocks", "too few", "held", "unfit", "preparing", "its turn", "backs off"],
)
def test_next_is_true(nodes: list[NodeRecord | str], others: list[JobRecord], more: dict[str, Any], says: str) -> None:
    job = make_job("holding", spec=PAIR, active=1, **more)
    job = job.model_copy(update={"admission": Admission(by="n7", issued=1, expires=2, signature="s")})
    text = step(make_cluster(nodes, job, *others), job)
    assert says in text
    assert ("uncordon" in text) == any(isinstance(n, NodeRecord) and n.cordon is not None for n in nodes)


def test_next_is_true_of_who_waits_for_its_time_or_for_others() -> None:
    later = make_job(spec=PAIR, not_before=NOW + 12_000)
    assert step(make_cluster(["n1", "n2"], later), later) == "nothing: it begins by itself in 12s"
    spec = make_spec(size=(2, 2), after=(After(uid="u-b", name="b"),))
    after = make_job(spec=spec)
    text = step(make_cluster(["n1", "n2"], after, taken()), after)
    assert text == "nothing: it starts by itself then; or end it: nodeagentctl stop a"


@pytest.mark.parametrize(
    ("cap", "says"),
    [
        (1, "so that it needs less: queue research may use 1 slot, and it needs 2 at least"),
        (2, "wait for jobs of its queue to end"),
    ],
)
def test_a_job_that_its_queue_may_never_run_is_not_advised_to_wait(cap: int, says: str) -> None:
    """An operator has lowered the queue's capability since it was submitted."""
    spec = PAIR.model_copy(update={"queue": "research"})
    job, other = make_job(spec=spec), taken()
    other = other.model_copy(update={"spec": other.spec.model_copy(update={"queue": "research"})})
    queue = Queue(name="research", capability=Amount(slots=cap))
    cluster = replace(make_cluster(["n1", "n2"], job, other), queues=Queues(queues=(queue,)))
    assert says in step(cluster, job)


def test_who_waits_for_a_gang_for_which_nodes_are_kept_and_when_that_starts() -> None:
    a = taken().model_copy(update={"first_active": NOW, "since": NOW})
    a = a.model_copy(update={"spec": a.spec.model_copy(update={"time_limit": 3600.0})})
    big, small = (
        make_job(spec=make_spec(name="big", size=(3, 3))),
        make_job(uid="u-s", spec=make_spec(name="s"), order=9),
    )
    cluster = make_cluster([make_node(n, slots=1) for n in ("n1", "n2", "n3")], a, big, small)
    assert step(cluster, small) == "nothing: it starts after job big, or before it where its time_limit is short enough"
    assert start_json(small, cluster, WALL) == {"start_estimate": None, "starts_after": []}
    found = start_json(big, cluster, WALL)
    assert found == {"start_estimate": 4_680_000, "starts_after": ["b"]}
    (line,) = _start(found)
    assert line.startswith("Starts:      by about 1970-01-0") and line.endswith("(when job b ends at its time limit)")
    assert _start(start_json(small, cluster, WALL)) == []


NEW = [make_node(f"n{i}", ready={}) for i in (1, 2, 3)]
"""No node has checked the job: none does as long as there are too few of them."""
SHUT = [*NEW[:2], make_node("n3", ready={}, cordon=True)]


def several(places: int, workers: int) -> JobSpec:
    trainer = Role(
        name="trainer", command=("train",), nodes=Nodes(min=1, max=places, target=places), workers_per_node=workers,
        replicas=Nodes(min=places, max=places, target=places),
    )  # fmt: skip
    return make_spec().model_copy(update={"roles": (trainer, trainer.model_copy(update={"name": "server"}))})


@pytest.mark.parametrize(
    ("nodes", "spec", "why", "says"),
    [
        (NEW, make_spec(size=(5, 5)), ["needs 5 nodes, and only 3 are known"], "start more nodes: it needs 5, "),
        (SHUT, make_spec(size=(5, 5)), ["needs 5 nodes, and only 3 are known", "n3 is cordoned (disk)"], "start more"),
        (
            [*NEW[:2], make_node("n3", ready={}, slots=2)],
            make_spec(size=(3, 3), workers=3),
            [
                "needs 3 nodes with 3 GPUs or worker slots: only 2 of the 3 known nodes are",
                "n3 has 2 free worker slots, 3 needed",
            ],
            "start nodes that will do",
        ),
        (SHUT, make_spec(size=(3, 3)), ["needs 3 nodes, 0 fit, 2 could get ready: n3 is cordoned (disk)"], "uncordon"),
        (NEW, several(2, 4), ["no node has room for server.1 (4 workers)"], "start nodes that will do"),
    ],
    ids=["too few", "too few, one cordoned", "too small", "cordoned", "several roles"],
)
def test_nodes_that_wait_with_their_checks_are_not_the_reason(
    nodes: list[NodeRecord | str], spec: JobSpec, why: list[str], says: str
) -> None:
    job = make_job(spec=spec)
    cluster = make_cluster(nodes, job)
    assert list(explain(cluster, job, WALL)) == why
    assert says in step(cluster, job)
    (reason,) = decide(cluster, job, WALL).why
    assert "has not checked" not in reason and ("could get ready" in reason) == ("could get ready" in why[0])


def test_its_place_and_priority() -> None:
    jobs = [make_job(uid=f"u-{i}", spec=make_spec(name=f"j{i}", priority=i % 2), order=i) for i in range(4)]
    cluster = make_cluster(["n1"], *jobs)
    rows = [job_json(job, cluster, {}, WALL) for job in jobs]
    assert [row["queue"]["place"] for row in rows] == [3, 1, 4, 2]
    assert {row["queue"]["of"] for row in rows} == {4}
    assert job_json(running := taken(), make_cluster(["n1"], running), {}, WALL)["queue"] is None


def test_a_job_whose_queue_may_use_no_more() -> None:
    job = make_job("queued", spec=PAIR.model_copy(update={"queue": "team"}))
    tree = Queues(rev=1, queues=(Queue(name="team", capability=Amount(nodes=1)),))
    assert "have an operator give its queue more" in step(replace(make_cluster(["n1", "n2"], job), queues=tree), job)
    row = job_json(job, make_cluster(["n1"], job), {}, WALL)
    assert (row["in_queue"], _queue(row)[0].split(maxsplit=1)[1]) == ("team", "team: number 1 of 1, priority 0")
    plain = make_job("running", make_generation(["n1"]))
    row = job_json(plain, make_cluster(["n1"], plain), {}, WALL)
    assert (row["in_queue"], _queue(row)) == ("default", [])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "a worker that then does nothing for 5m hangs (finish)"),
        ({"hang": "off"}, "a worker that then does nothing for 5m hangs (finish)"),
        ({"finish": None}, "with finish: off it may stay for ever"),
        ({"hang": {"progress": None, "phases": 7200.0}}, "without progress it is a hang"),
    ],
)
def test_next_names_who_outlives_the_success_of_the_others(more: dict[str, Any], says: str) -> None:
    detail = samples.detail(samples.job())
    workers = [worker for pod in detail["pods"] for worker in pod["workers"]]
    for worker in workers[:-1]:
        worker |= {"state": "exited", "exit": 0}
    detail["spec"] |= more
    line = " ".join(job_lines(detail)[-1].split())
    assert "rank 3 on n2 still runs, others have exited 0" in line
    assert says in line
    assert line.endswith("nodeagentctl logs digits --rank 3")
    for worker in workers[:-1]:
        worker["exit"] = 1
    assert "others have exited 0" not in job_lines(detail)[-1], "they failed"


def test_next_of_a_job_whose_processes_do_not_end_does_not_call_that_well() -> None:
    detail = samples.detail(samples.job())
    detail["pods"][1]["phase"] = "stuck"
    line = " ".join(job_lines(detail)[-1].split())
    assert "see what its processes on n2 wait for (nodeagentctl describe n2)" in line and "nothing is wrong" not in line


@pytest.mark.parametrize(
    ("ready", "says"),
    [
        ({"port": False, "command": ["test", "-e", "a b"]}, "pserver is when its command exits 0: test -e 'a b'"),
        ({"port": True, "command": None}, "pserver is when it listens on its port"),
    ],
)
def test_next_names_the_role_that_others_wait_for(ready: dict[str, Any], says: str) -> None:
    detail = samples.detail(samples.ROLES)
    servers, trainers = detail["spec"]["roles"]
    servers["ready"], trainers["after"] = ready, ["pserver"]
    assert "nothing is wrong" in job_lines(detail)[-1], "all have started"
    for worker in [worker for pod in detail["pods"] for worker in pod["workers"]]:
        if worker["place"].startswith("trainer"):
            worker |= {"state": "starting", "pid": None}
    line = " ".join(job_lines(detail)[-1].split())
    assert f"nothing yet: trainer waits until pserver is ready ({says})" in line
    assert line.endswith("--rank 0")


def test_policies_whose_timeout_runs_are_shown_with_what_is_left() -> None:
    policies = (
        Policy(on=("PodPending",), do="FailJob", timeout=300.0),
        Policy(on=("PodPending",), do="AbortJob", timeout=90.0),
        Policy(on=("PodRunning",), do="TerminateJob", timeout=10.0),
    )
    spec = make_spec(size=(4, 4), policies=policies)
    job = make_job(spec=spec, since=NOW - 60_000)

    def lines(job: JobRecord, served: int = NOW) -> list[str]:
        detail = samples.detail(job, shown=make_cluster(["n1"], job, served=served))
        return [line.split(":", 1)[1].strip() for line in job_lines(detail, False) if line.startswith("Policy")]

    assert lines(job) == [
        "PodPending: AbortJob in 30s, unless its nodes are found before",
        "PodPending: FailJob in 4m, unless its nodes are found before",
    ]
    assert lines(job, NOW + 29_000)[0].startswith("PodPending: AbortJob in 1s,")
    assert lines(job.model_copy(update={"control": job.control.model_copy(update={"desired": "pause"})})) == []
    lost = {"6": spend("node_lost", at=NOW - 20_000)}
    fault = make_spec(size=(4, 4), policies=(Policy(on=("NodeLost",), do="FailJob", timeout=60.0),))
    waits = make_job(
        "holding",
        make_generation(["n1"], state="ended", number=6),
        spec=fault,
        budget=lost,
        since=NOW - 20_000,
        active=6,
    )
    assert lines(waits) == ["NodeLost: FailJob in 40s, unless it runs again before"]


def test_nodes_that_it_goes_on_without_are_shown_with_when_they_are_tried_again() -> None:
    late = (
        Setback(node="n3", kind="unanswered", life=life("n3"), times=2, at=NOW),
        Setback(node="n2", kind="unanswered", life="one from before", times=5, at=NOW),
    )
    job = make_job("running", make_generation(["n1"]), target=3).model_copy(update={"setbacks": late})
    detail = samples.detail(job, shown=make_cluster(["n1", "n2", "n3"], job, served=NOW + 3000))
    lines = [" ".join(line.split()) for line in job_lines(detail, False) if line.startswith("Left out")]
    assert lines == ["Left out: n3 did not acknowledge a generation in time twice in a row: tried again in 117s"]
