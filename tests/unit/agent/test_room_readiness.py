"""What a node says of its pods in its record stays small and readable, whatever shims say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.published import Publisher, unchecked
from nodeagent.agent.reach import Reach
from nodeagent.model.job import Admission, JobRecord
from nodeagent.model.node import Readiness
from nodeagent.model.world import BRIEF
from nodeagent.plan.cluster import Cluster, Refusal
from nodeagent.pods.base import PodStatus
from nodeagent.pods.bounds import ShimReport
from nodeagent.store import codec
from tests.unit.ctl.samples import node as sample_node
from tests.unit.plan.build import make_cluster, make_job, make_node

ODD = "\x01"
"""Six characters in JSON."""
USER_MOST, NODE_MOST = 100 << 10, 1 << 20
"""Bytes that all pods of one user may take in a node's record, and all of a node."""


def from_shim(uid: str, **words: object) -> PodStatus:
    """As it comes from a shim's socket."""
    line = json.dumps({"v": 1, "status": {"uid": uid, "phase": "running", **words}})
    status = ShimReport.read(line.encode()).status
    assert status is not None
    return status


def uid_of(number: int) -> str:
    return f"{number:032x}"


def cluster_of(owners: Mapping[str, int], kept: Mapping[str, Readiness] | None = None) -> Cluster:
    jobs: list[JobRecord] = [
        make_job(uid=uid, order=number, owner=owner).model_copy(update={"name": f"j{number}"})
        for number, (uid, owner) in enumerate(owners.items())
    ]
    return make_cluster([make_node("n1").model_copy(update={"readiness": dict(kept or {})})], *jobs)


async def published(statuses: Mapping[str, PodStatus], cluster: Cluster) -> dict[str, Readiness]:
    """What a node's agent gives its next beat."""
    given: list[dict[str, Readiness]] = []

    def publish(readiness: dict[str, Readiness], _pods: object) -> bool:
        given.append(readiness)
        return False

    host, reach = SimpleNamespace(status=lambda: statuses), SimpleNamespace(unreachable={})
    context = cast(AgentContext, SimpleNamespace(node="n1", host=host))
    lease = cast(Membership, SimpleNamespace(publish=publish, facts=sample_node("n1").facts))
    await Publisher(context, lease, unchecked, cast(Reach, reach)).publish(cluster)
    return given[0]


async def test_what_its_clock_refuses_is_published_beside_its_pods() -> None:
    admission = Admission(by="n7", issued=1, expires=2, signature="s")
    cluster = cluster_of({uid_of(1): 1, uid_of(2): 1})
    jobs = {uid: job.model_copy(update={"admission": admission}) for uid, job in cluster.jobs.items()}
    cluster = replace(cluster, jobs=jobs, refused={uid_of(2): Refusal("early", "no", True)})
    found = await published({uid_of(1): from_shim(uid_of(1))}, cluster)
    assert {uid: (ready.state, ready.clock) for uid, ready in found.items()} == {
        uid_of(1): ("ready", False), uid_of(2): ("unfit", True),
    }  # fmt: skip
    check_readable(found)


def size(readiness: Mapping[str, Readiness]) -> int:
    return len(codec.encode_readiness(readiness).encode())


def check_readable(readiness: dict[str, Readiness]) -> None:
    record = sample_node("n1").model_copy(update={"readiness": readiness})
    flat = [text for pair in codec.encode_node(record).items() for text in pair]
    assert codec.decode_node(flat, "").readiness == readiness


async def test_pods_of_one_user_that_say_much_take_little_of_the_nodes_record() -> None:
    """86 pods that said one sentence of control characters made a node's record unreadable for every agent, so that
    nothing was decided in the cluster any more."""
    owners = {uid_of(number): 1000 for number in range(90)} | {uid_of(1000): 1001}
    statuses = {uid: from_shim(uid, portless=ODD * 8192) for uid in owners} | {
        uid_of(89): from_shim(uid_of(89), phase="unfit", reason="hook said: " + '\\"' * 4000),
        uid_of(1000): from_shim(uid_of(1000), phase="unfit", reason="/shared/resnet is missing"),
    }
    found = await published(statuses, cluster_of(owners))
    assert found.keys() == owners.keys()
    assert size(found) < USER_MOST
    assert {one.state for one in found.values()} == {"unfit"}
    assert found[uid_of(1000)].reason == "/shared/resnet is missing"
    assert any("too much to say" in one.reason for one in found.values())
    check_readable(found)


async def test_all_users_of_a_node_together_take_little_of_its_record() -> None:
    owners = {uid_of(number): 1000 + number // 4 for number in range(1000)}
    words = "ä" * 8192
    statuses = {uid: from_shim(uid, phase="unfit", reason=words) for uid in owners}
    statuses[uid_of(999)] = from_shim(uid_of(999), phase="unfit", reason="/shared/resnet is missing")
    del statuses[uid_of(998)], statuses[uid_of(997)], statuses[uid_of(996)]
    found = await published(statuses, cluster_of(owners))
    assert found.keys() == statuses.keys()
    assert size(found) < NODE_MOST
    assert found[uid_of(999)].reason == "/shared/resnet is missing", "who says little has room before who says much"
    check_readable(found)


async def test_of_more_verdicts_than_a_record_has_room_for_some_of_each_user_are_kept() -> None:
    """A waiting job's verdict needs no pod here: jobs of several users are more than any node's slots."""
    owners = {uid_of(number): 1000 + min(number // 3000, 1) for number in range(3010)}
    verdict = Readiness(state="unfit", reason="/" + ODD * 4000 + " is missing", error=ODD * 400, code=127, passing=True)
    found = await published({}, cluster_of(owners, dict.fromkeys(owners, verdict)))
    assert 1000 < len(found) <= 2000
    assert {uid for uid, owner in owners.items() if owner == 1001} <= found.keys()
    assert size(found) < NODE_MOST
    check_readable(found)


async def test_what_a_pod_says_in_normal_cases_goes_on_as_it_is() -> None:
    owners = {uid_of(number): 1000 for number in range(100)}
    lines = 'Traceback:\n\tValueError: "no"\n' * 12
    statuses = {uid: from_shim(uid, phase="ready", folder="f" * 32) for uid in owners} | {
        uid_of(0): from_shim(uid_of(0), phase="unfit", reason="/shared/resnet is missing", code=127),
        uid_of(1): from_shim(uid_of(1), phase="unfit", reason=f"modules: foo/1 cannot be loaded on this node: {lines}"),
        uid_of(2): from_shim(uid_of(2), portless="ports 29400 to 29499 are taken, by uid 7"),
    }
    found = await published(statuses, cluster_of(owners))
    assert (found[uid_of(0)].reason, found[uid_of(0)].code) == ("/shared/resnet is missing", 127)
    assert found[uid_of(1)].error == lines[:BRIEF]
    assert found[uid_of(2)].reason == "ports 29400 to 29499 are taken, by uid 7"
    ready = [found[uid_of(number)] for number in range(3, 100)]
    assert {(one.state, one.reason, one.folder) for one in ready} == {("ready", "", "f" * 32)}


async def test_a_reason_that_is_long_keeps_its_beginning_and_its_end() -> None:
    uid = uid_of(1)
    path = "/" + "/".join(["d" * 200] * 10)
    found = await published({uid: from_shim(uid, phase="unfit", reason=f"{path} is missing")}, cluster_of({uid: 1}))
    reason = found[uid].reason
    assert reason.startswith("/ddd")
    assert reason.endswith("ddd is missing")
    assert " ... " in reason
    assert len(reason) <= 800
