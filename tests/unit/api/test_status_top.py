"""What ``top`` answers: from the snapshot and from what agents publish."""

from __future__ import annotations

from typing import Any

from nodeagent.api.status import live_jobs, top_json
from nodeagent.model.facts import MachineUsage, PodUsage
from nodeagent.model.job import JobRecord
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from tests.unit.ctl import samples
from tests.unit.plan.build import make_holder, make_job, make_node

HERE = MachineUsage(load=0.5, cpus=2, memory_used=10, memory_total=100)
THERE = MachineUsage(load=9.0, cpus=64, memory_used=20, memory_total=200)


def pod(node: str, cpu: float | None = 1.5, **more: Any) -> PodState:
    usage = PodUsage(cpu=cpu, memory=1000, processes=3, machine=THERE)
    values: dict[str, Any] = {
        "uid": samples.job().uid, "job": "digits", "role": "worker", "node": node, "phase": "running", "usage": usage,
    }  # fmt: skip
    return PodState(**(values | more))


def answer(*pods: PodState, here: str = "elsewhere", **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    job = samples.job(**more)
    found = top_json(samples.cluster(job), {job.uid: pods}, here, HERE)
    return {n["name"]: n for n in found["items"]}, found["jobs"][0]


def test_a_job_is_the_sum_of_its_gang() -> None:
    nodes, job = answer(pod("n1"), pod("n2", cpu=0.25), pod("n3"))
    assert (job["cpu"], job["memory"], job["processes"]) == (1.75, 2000, 6), "a spare on n3 is not the gang's"
    assert (job["nodes"], job["world_size"], job["gpus"]) == (2, 4, 4)
    assert [p["node"] for p in job["pods"]] == ["n1", "n2"]
    assert (nodes["n3"]["cpu"], nodes["n3"]["jobs"]) == (1.5, [])
    assert (nodes["n1"]["gpus_used"], nodes["n1"]["gpus"], nodes["n1"]["jobs"]) == (2, 2, ["digits"])


def test_what_was_not_measured_is_not_zero() -> None:
    nodes, job = answer(pod("n1", cpu=None), pod("n2", usage=None))
    assert (job["cpu"], job["memory"]) == (None, 1000)
    assert (nodes["n2"]["cpu"], nodes["n2"]["memory"], nodes["n2"]["load"]) == (None, None, None)


def test_the_machine_is_as_measured_here_or_as_reported() -> None:
    nodes, _ = answer(pod("n1"))
    assert (nodes["n1"]["load"], nodes["n1"]["cpus"]) == (9.0, 64)
    here, _ = answer(pod("n1"), here="b")
    assert (here["n3"]["load"], here["n3"]["memory_total"]) == (0.5, 100)


def test_a_dead_node_uses_nothing() -> None:
    nodes, job = answer(pod("n4"), here="b", generation=samples.generation(holders={"n4": make_holder("n4", "x")}))
    assert (nodes["n4"]["load"], nodes["n4"]["cpu"]) == (None, None)
    assert job["pods"] == []


def test_what_is_kept_for_a_paused_job_is_counted() -> None:
    _, job = answer(pod("n1"), pod("n3"), phase="paused", generation=samples.generation(state="ended"))
    assert (job["nodes"], job["memory"], [p["node"] for p in job["pods"]]) == (0, 1000, ["n1"])


def test_ended_jobs_are_left_out_once_nothing_of_them_runs() -> None:
    assert live_jobs(samples.cluster(samples.FAILED)) == []
    stopping = samples.job(
        "stopped", generation=samples.generation(state="ended", holders={"n1": make_holder("n1", "x")})
    )
    assert live_jobs(samples.cluster(stopping)) == [stopping]


class Walked(dict[str, JobRecord]):
    """Counts how often all jobs are gone through."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def test_jobs_are_gone_through_once_not_once_for_each_node() -> None:
    """`top` at 1,000 nodes and as many jobs took 6 s."""
    few, many = list[int](), list[int]()
    for counts, size in ((few, 2), (many, 200)):
        nodes = {f"n{i}": make_node(f"n{i}") for i in range(size)}
        jobs = Walked({f"u{i}": make_job().model_copy(update={"uid": f"u{i}"}) for i in range(size)})
        found = top_json(Cluster(served=0, nodes=nodes, jobs=jobs), {}, "", HERE)
        assert len(found["items"]) == len(found["jobs"]) == size
        counts.append(jobs.walks)
    assert few == many
