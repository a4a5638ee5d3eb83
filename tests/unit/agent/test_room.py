"""What a beat says of a node's pods stays small, whatever shims say, and normal pods are shown whole."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nodeagent.agent.published import pod_states
from nodeagent.agent.room import OF_BEAT, OF_OWNER
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.pods.base import PodStatus
from nodeagent.store.codec import decode_pod
from tests.unit.plan.build import make_cluster, make_job

OWN = 2048
"""Bytes of a pod apart from what its shim says."""


def uid_of(number: int) -> str:
    return f"{number:032x}"


def status(number: int, workers: int, doing: str = "train", reason: str = "") -> PodStatus:
    states = tuple(
        WorkerState(rank=rank, local_rank=rank, pid=1 + rank, state="running", doing=doing) for rank in range(workers)
    )
    return PodStatus(uid=uid_of(number), phase="running", workers=states, reason=reason)


def published(
    statuses: list[PodStatus], owners: Mapping[int, int], unreachable: Mapping[str, Mapping[str, float]] | None = None
) -> dict[int, PodState]:
    """By number, as others read them. ``owners``: of these numbers' jobs; all others are 1000's."""
    numbers = [int(one.uid, 16) for one in statuses]
    jobs = [make_job(uid=uid_of(n), order=n, owner=owners.get(n, 1000)) for n in numbers]
    found = pod_states(make_cluster(["n1"], *jobs), "n1", {one.uid: one for one in statuses}, unreachable or {})
    return {int(pod.uid, 16): decode_pod(pod.to_json()) for pod in found}


def size(*pods: PodState) -> int:
    return sum(len(pod.to_json().encode()) for pod in pods)


def test_pods_of_one_user_that_say_much_take_no_more_of_a_beat_than_one_pod_may() -> None:
    """Sixty pods could have 30 MiB of each beat: more than the store takes at a time."""
    fat = [status(n, 60 + n, "\x01" * 100, '"' * 8192) for n in range(60)]
    usual = [status(60, 8, reason="ready: no"), status(61, 1000)]
    found = published([*fat, *usual], {61: 1001})
    assert size(*(found[n] for n in range(61))) <= OF_OWNER + 61 * OWN
    assert (found[60].workers, found[60].reason) == (usual[0].workers, "ready: no")
    assert (found[61].workers, found[61].reason) == (usual[1].workers, "")
    for one in fat:
        pod = found[int(one.uid, 16)]
        assert 0 < len(pod.workers) < len(one.workers) and pod.workers == one.workers[: len(pod.workers)]
        assert pod.reason.endswith(f"; the first {len(pod.workers)} of its {len(one.workers)} workers are shown")


def test_pods_of_all_users_together_are_bounded_and_who_says_little_is_shown_whole() -> None:
    fat = [status(n, 1000, "x" * 1000, "x" * 8192) for n in range(40)]
    usual = status(40, 8)
    found = published([*fat, usual], {n: 1000 + n for n in range(41)})
    assert size(*found.values()) <= OF_BEAT + len(found) * OWN
    assert (found[40].workers, found[40].reason) == (usual.workers, "")
    assert min(len(found[n].workers) for n in range(40)) > 10


def test_nodes_that_cannot_be_reached_have_the_same_room() -> None:
    away = {uid_of(n): {f"node-{i:058}": 1_700_000_000.125 for i in range(4000)} for n in range(4)}
    found = published([status(n, 1) for n in range(4)], {}, away)
    assert size(*found.values()) <= OF_OWNER + 4 * OWN
    for pod in found.values():
        count = re.search(r"(\d+) of the 4000 nodes that this one cannot reach are shown", pod.reason)
        assert count is not None and 500 < int(count[1]) == len(pod.unreachable)


def test_many_usual_pods_of_one_user_are_shown_whole() -> None:
    statuses = [status(n, 8, "evaluate", "waits for its file system") for n in range(128)]
    found = published(statuses, {})
    assert all((found[int(one.uid, 16)].workers, found[int(one.uid, 16)].reason) == (one.workers, one.reason)
               for one in statuses)  # fmt: skip
