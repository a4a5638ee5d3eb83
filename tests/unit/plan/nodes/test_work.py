"""The work on each node: whose devices are booked there, and which pods it has."""

from __future__ import annotations

from nodeagent.plan.nodes.work import work_on
from tests.unit.plan.build import make_cluster, make_generation, make_job, make_node, make_spec


def test_members_and_holders_book_devices_and_others_have_no_work() -> None:
    forms = make_generation(["n1", "n2"], state="forming", workers=2, holders=["n3"], number=2)
    waits = make_job("queued", uid="u-w", spec=make_spec(name="w"))
    job = make_job("forming", forms, uid="u-b", spec=make_spec(name="b"))
    found = work_on(make_cluster([make_node(f"n{i}") for i in range(1, 5)], job, waits))
    assert {node: work.booked for node, work in found.items()} == {
        node: {"cpu0": "b", "cpu1": "b"} for node in ("n1", "n2", "n3")
    }
    assert [(pod.member is None, pod.holder is None) for node in ("n1", "n3") for pod in found[node].pods] == [
        (False, True), (True, False),
    ]  # fmt: skip


def test_of_an_ended_generation_only_what_still_stops_is_there() -> None:
    ended = make_generation(["n1", "n2"], state="ended", holders=["n2"])
    found = work_on(make_cluster(["n1", "n2"], make_job("holding", ended)))
    assert list(found) == ["n2"]
    assert found["n2"].pods[0].member is None


def test_the_pods_of_a_node_are_in_the_order_of_their_jobs_names() -> None:
    jobs = [make_job("running", make_generation(["n1"]), uid=f"u-{n}", spec=make_spec(name=n)) for n in ("z", "a")]
    found = work_on(make_cluster(["n1"], *jobs))["n1"]
    assert [pod.job.name for pod in found.pods] == found.jobs() == ["a", "z"]
