"""Device time of one node, for the metrics: its own devices, each once."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter

from nodeagent.agent.metrics import MAX_SERIES, DeviceTime
from nodeagent.model.job import JobRecord
from nodeagent.model.usage import Held, UsedTime
from nodeagent.plan.cluster import Cluster
from tests.unit.plan.build import make_generation, make_holder, make_job, make_node

MY = "n1"


def device_time() -> DeviceTime:
    return DeviceTime(CollectorRegistry())


def counted(of: Counter) -> dict[tuple[str, str], float]:
    return {
        (s.labels["device"], s.labels["user"]): s.value
        for metric in of.collect()
        for s in metric.samples
        if s.name.endswith("_total")
    }


def cluster(*jobs: JobRecord, served: int = 1000) -> Cluster:
    return Cluster(
        served=served, nodes={n: make_node(n) for n in ("n1", "n2")}, jobs={j.uid: j for j in jobs}
    )  # fmt: skip


def job(**more: object) -> JobRecord:
    return make_job("running", make_generation(["n1", "n2"])).model_copy(update=more)


def test_only_this_nodes_devices_from_one_look_to_the_next() -> None:
    time, view = device_time(), cluster(job())
    time.count(view, MY)
    assert counted(time.seconds) == {}, "nobody knows since when"
    time.count(replace(view, served=3500), MY)
    assert view.jobs["u-a"].generation is not None
    devices = len(view.jobs["u-a"].generation.members[MY].devices)
    user = view.jobs["u-a"].spec.submitter.user
    assert counted(time.seconds) == {("slot", user): 2.5 * devices}
    time.count(replace(view, served=3000), MY)
    time.count(replace(view, served=3500), MY)
    assert counted(time.seconds) == {("slot", user): 2.5 * devices}, "an older view counts nothing twice"
    time.count(cluster(served=4500), MY)
    time.count(cluster(served=9000), MY)
    assert counted(time.seconds) == {("slot", user): 3.5 * devices}, "what it held at the look before"


def test_a_device_that_is_held_twice_counts_once() -> None:
    generation = make_generation(["n1"], state="forming")
    held = make_holder("n1", generation.members["n1"].life, generation.members["n1"].devices)
    view = cluster(job(generation=generation.model_copy(update={"holders": {"n1": held}})))
    time = device_time()
    time.count(view, MY)
    time.count(replace(view, served=2000), MY)
    assert list(counted(time.seconds).values()) == [len(generation.members["n1"].devices)]


def test_users_without_a_bound_are_others() -> None:
    time, served = device_time(), 0
    for number in range(MAX_SERIES + 20):
        spec = make_job().spec
        spec = spec.model_copy(update={"submitter": spec.submitter.model_copy(update={"user": f"u{number}"})})
        served += 1000
        time.count(cluster(job(spec=spec), served=served), MY)
    found = counted(time.seconds)
    assert len(found) == MAX_SERIES + 1
    assert found["slot", "others"] == 19 * found["slot", "u0"]


def test_each_node_bears_its_part_of_what_a_fault_cost_and_of_the_overhead() -> None:
    time, one = device_time(), job()
    assert one.generation is not None
    mine = len(one.generation.members[MY].devices)
    before = job(used={"20000": UsedTime(slot_ms=90_000, lost_slot_ms=10_000)})
    after = job(used={"20000": UsedTime(slot_ms=99_000, lost_slot_ms=16_000, overhead_slot_ms=2000)})
    user = one.spec.submitter.user
    time.count(cluster(before), MY)
    time.count(cluster(after, served=3000), MY)
    assert counted(time.lost) == {("slot", user): 3.0}, "half of the devices are here"
    assert counted(time.overhead) == {("slot", user): 1.0}
    standing = after.model_copy(update={"held": Held(at=3000, slots=2 * mine, stands=3000)})
    time.count(cluster(standing, served=3000), MY)
    time.count(cluster(standing, served=5000), MY)
    assert counted(time.lost) == {("slot", user): 3.0 + 2.0 * mine}, "all of what stands still is lost"
    time.count(cluster(served=6000), MY)
    assert counted(time.lost) == {("slot", user): 3.0 + 2.0 * mine}, "of a job that is gone nothing more is known"


def test_time_is_counted_by_class_of_node() -> None:
    view = cluster(job())
    mine = view.nodes[MY]
    spot = mine.model_copy(update={"facts": mine.facts.model_copy(update={"spot": True})})
    view = replace(view, nodes={**view.nodes, MY: spot})
    for node, class_ in ((MY, "spot"), ("n2", "regular")):
        time = device_time()
        time.count(view, node)
        time.count(replace(view, served=2000), node)
        samples = [
            s
            for of in (time.seconds, time.lost, time.overhead)
            for m in of.collect()
            for s in m.samples
            if s.name.endswith("_total")
        ]
        assert [s.labels["class"] for s in samples] == [class_] * 3


def test_looks_in_quick_succession_count_the_same_time() -> None:
    often, seldom, view = device_time(), device_time(), cluster(job())
    for time, step in ((often, 100), (seldom, 2500)):
        for served in range(1000, 6001, step):
            time.count(replace(view, served=served), MY)
        time.count(cluster(served=6400), MY)
    assert {k: round(v, 6) for k, v in counted(often.seconds).items()} == counted(seldom.seconds)
    assert list(counted(seldom.seconds).values()) == [5.4 * len(make_generation(["n1", "n2"]).members[MY].devices)]
