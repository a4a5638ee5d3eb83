"""What a node tells of its pods: readiness for placement, states for people."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from nodeagent.agent.published import dated, held, pod_states, readiness, refused_by_clock, standing_verdicts
from nodeagent.model.job import Admission
from nodeagent.model.node import Readiness
from nodeagent.model.pod import PodPhase, PodState, WorkerState
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Refusal, RefusalKind
from nodeagent.plan.nodes.candidates import candidate
from nodeagent.pods.base import PodStatus
from nodeagent.store.codec import decode_pod
from tests.unit.plan.build import NOW, UID, make_cluster, make_generation, make_job, make_node

DAY = 86_400_000
STATES = {"unknown": "preparing", "preparing": "preparing", "gone": "preparing", "unfit": "unfit", "stuck": "unfit"}


@pytest.mark.parametrize("phase", get_args(PodPhase))
def test_readiness_of_each_phase(phase: PodPhase) -> None:
    one = readiness({UID: PodStatus(uid=UID, phase=phase, reason="why", code=127, folder="f1")})[UID]
    assert one.state == STATES.get(phase, "ready")
    assert one.folder == ("" if one.state == "unfit" else "f1")
    assert (one.reason, one.code) == {
        "preparing": ("why", 0), "unfit": ("why", 127), "ready": ("", 0),
    }[one.state]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "since", "n2", "says"),
    [
        ("early", -5 * DAY, None, "by n7, is from the future: one of the two clocks is hours off (timedatectl)"),
        ("expired", 0, None, "by n7, is too old: one of the two clocks is hours off"),
        ("expired", -5 * DAY, Readiness(state="preparing"), "by n7, is too old"),
        ("expired", -5 * DAY, Readiness(state="unfit"), ""),  # nobody takes part: it has expired in truth
        ("expired", -5 * DAY, None, ""),
        ("changed", 0, None, ""),
    ],
)
def test_a_node_that_refuses_a_job_by_its_clock_says_so(
    kind: RefusalKind, since: int, n2: Readiness | None, says: str
) -> None:
    """It was 'has not checked the job yet', for ever, and the truth in this node's own log."""
    admission = Admission(by="n7", issued=1, expires=2, signature="s")
    job = make_job(since=NOW + since).model_copy(update={"admission": admission})
    nodes = [make_node("n1"), make_node("n2", ready={} if n2 is None else {UID: n2})]
    cluster = replace(make_cluster(nodes, job), refused={UID: Refusal(kind, "no", True)})
    found = refused_by_clock(cluster, "n1")
    assert says in found[UID].reason if says else not found
    if not says:
        return
    assert (found[UID].state, found[UID].passing, found[UID].clock) == ("unfit", True, True)
    node = make_node("n1", ready=found)
    assert f"n1 cannot run it: {found[UID].reason}" == candidate(make_cluster([node], job), job, node).why
    assert standing_verdicts(make_cluster([node], job), "n1", {}) == {}, "it ends with the refusal"
    runs = make_job("running", make_generation(["n1", "n2"])).model_copy(update={"admission": admission})
    member = replace(make_cluster(nodes, runs), refused={UID: Refusal(kind, "no", True)})
    assert refused_by_clock(member, "n1") == {}


def test_what_a_module_of_the_job_raised_is_not_in_what_everybody_reads_of_a_node() -> None:
    reason = "trouble with the fork server: preload broken: ValueError: s3cret"
    one = readiness({UID: PodStatus(uid=UID, phase="preparing", reason=reason)})[UID]
    assert one.reason == "trouble with the fork server"


def test_what_a_login_shell_printed_is_apart_from_why_a_node_is_unfit() -> None:
    reason = "modules: foo/1 cannot be loaded on this node: s3cret"
    one = readiness({UID: PodStatus(uid=UID, phase="unfit", reason=reason)})[UID]
    assert (one.reason, one.error) == ("modules: foo/1 cannot be loaded on this node", "s3cret")


def test_a_pod_that_warms_up_its_workers_is_ready_and_says_so() -> None:
    one = readiness({UID: PodStatus(uid=UID, phase="ready", warming=True)})[UID]
    assert (one.state, one.warming) == ("ready", True)


def test_a_node_without_free_ports_says_so_of_a_pod_that_is_ready_otherwise() -> None:
    one = readiness({UID: PodStatus(uid=UID, phase="ready", portless="no free port", folder="f1")})[UID]
    assert one == Readiness(state="unfit", reason="no free port", passing=True, portless=True, folder="f1")
    assert not readiness({UID: PodStatus(uid=UID, phase="unfit", reason="why", portless="no")})[UID].portless


def test_devices_are_held_for_as_long_as_their_pod_is_stuck() -> None:
    stuck = PodStatus(uid="u2", phase="stuck", held=("cpu0", "cpu1"))
    assert held({"u2": stuck, UID: PodStatus(uid=UID, phase="running")}) == {"cpu0": "u2", "cpu1": "u2"}
    assert held({"u2": PodStatus(uid="u2", phase="gone")}) == {}


def test_pods_as_published() -> None:
    workers = (WorkerState(rank=3, local_rank=0, pid=9, state="running"),)
    statuses = {
        "u-z": PodStatus(uid="u-z", phase="exited", refused="hook failed"),
        "u-gone": PodStatus(uid="u-gone", phase="running"),
        UID: PodStatus(
            uid=UID, phase="running", generation=Token(number=4, id="g"), shim_pid=5, workers=workers
        ).model_copy(update={"preforked": {11: 1000, 12: 200}}),
    }
    cluster = make_cluster(["n1"], make_job(), make_job(uid="u-z"))
    first, second = pod_states(cluster, "n1", statuses)
    assert (first.uid, first.job, first.node, first.role) == (UID, "a", "n1", "worker")
    assert (first.generation, first.shim_pid, first.workers) == (4, 5, workers)
    assert (first.preforked, first.preforked_memory, second.preforked) == (2, 1200, 0)
    assert (second.uid, second.generation, second.reason) == ("u-z", 0, "hook failed")


def published(*workers: WorkerState, reason: str = "", others: int = 0) -> PodState:
    """As another agent reads it. ``others``: members that this node cannot reach."""
    status = PodStatus(uid=UID, phase="running", reason=reason, workers=workers)
    unreachable = {UID: {f"node-{i:058}": 1_700_000_000.125 for i in range(others)}}
    (pod,) = pod_states(make_cluster(["n1"], make_job()), "n1", {UID: status}, unreachable)
    return decode_pod(pod.to_json())


def worker(rank: int, doing: str) -> WorkerState:
    return WorkerState(rank=rank, local_rank=rank, pid=4_000_000 + rank, state="running", step=1 << 62, doing=doing)


@pytest.mark.parametrize(("character", "length", "least"), [("x", 600, 600), ("\x01", 100, 600), ('"', 200, 300)])
def test_of_what_other_agents_would_not_read_the_first_workers_are_shown(
    character: str, length: int, least: int
) -> None:
    """Of a pod that said more nothing at all was shown."""
    few = tuple(worker(rank, character * length) for rank in range(least))
    assert (published(*few, reason="ready: no").workers, published(*few).reason) == (few, "")
    many = tuple(worker(rank, character * length) for rank in range(1000))
    pod = published(*many, reason="ready: no")
    shown = len(pod.workers)
    assert least <= shown < 1000 and pod.workers == many[:shown]
    assert pod.reason == f"ready: no; the first {shown} of its 1000 workers are shown"


def test_as_many_workers_as_a_shim_may_have_are_shown_as_far_as_others_read() -> None:
    for reason, others, least in (("", 0, 2500), ("\x01" * 8192, 0, 2000), ("x" * 8192, 4096, 500)):
        pod = published(*(worker(rank, "") for rank in range(4096)), reason=reason, others=others)
        assert least <= len(pod.workers) < 4096 and len(pod.unreachable) == others
        assert pod.reason.endswith(f"the first {len(pod.workers)} of its 4096 workers are shown")


def test_a_state_keeps_the_time_at_which_the_node_first_saw_itself_in_it() -> None:
    def seen(phase: PodPhase, warming: bool = False) -> dict[str, Readiness]:
        return readiness({UID: PodStatus(uid=UID, phase=phase, warming=warming)})

    first = dated(seen("preparing"), {}, 100)
    ready = dated(seen("ready", warming=True), first, 200)
    warm = dated(seen("ready"), ready, 300)
    assert [one[UID].since for one in (first, dated(seen("gone"), first, 150), ready, warm)] == [100, 100, 200, 200]
    assert not warm[UID].warming
