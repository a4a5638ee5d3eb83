"""Judgement of the cluster and of what is between its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from nodeagent.model.health import Verdict
from nodeagent.model.job import Filled, Owned, Quota
from nodeagent.model.node import Gpu, NodeRecord, Readiness
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster, Refusal
from nodeagent.plan.findings.cluster import (
    AgentStanding,
    PeerAnswer,
    judge_agent,
    judge_cluster,
    judge_peers,
    judge_recovery,
    judge_room,
    judge_users,
    ranked,
)
from nodeagent.store.errors import waits_for
from tests.unit.plan.build import (
    PORTLESS,
    UID,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
    verdict,
)

READY = ("ready", "")
OUTCOMES = get_args(PeerAnswer.model_fields["outcome"].annotation)


def reported(
    cluster: Cluster, states: dict[str, tuple[str, str]] | None = None, why: dict[str, tuple[str, ...]] | None = None
) -> list[str]:
    """``severity where: what | fix`` of each finding."""
    found = judge_cluster(cluster, states or dict.fromkeys(cluster.nodes, READY), why or {})
    return [f"{f.severity} {where}: {f.what} | {f.fix}" for where, f in found]


def changed(cluster: Cluster, node: str, **facts: Any) -> Cluster:
    """The cluster with other facts of one node."""
    old = cluster.nodes[node]
    new = old.model_copy(update={"facts": old.facts.model_copy(update=facts)})
    return with_node(cluster, new)


def with_node(cluster: Cluster, node: NodeRecord) -> Cluster:
    return Cluster(
        served=cluster.served, nodes={**cluster.nodes, node.id: node}, jobs=cluster.jobs, lapsed=cluster.lapsed
    )


def test_a_sound_cluster_has_no_findings() -> None:
    assert reported(make_cluster(["n1", "n2"], make_job(phase="running"))) == []


def test_nodes_that_are_not_ready() -> None:
    states = {
        "n1": ("silent", "its lease has lapsed"), "n2": ("cordoned", "disk (by olga)"),
        "n3": ("left", "its agent was stopped"), "n4": READY, "n5": ("restarting", "its agent was asked to end"),
        "n6": ("mute", "its agent is silent"),
    }  # fmt: skip
    lines = reported(make_cluster(["n1", "n2", "n3", "n4", "n5", "n6"]), states)
    assert [line.partition(" |")[0] for line in lines] == [
        "error node/n1: silent: its lease has lapsed",
        "warning node/n2: cordoned: disk (by olga)",
        "info node/n3: its agent was stopped",
        "info node/n5: its agent was asked to end",
        "warning node/n6: mute: its agent is silent",
    ]
    assert lines[3].endswith("nodeagentctl drain n5 --reason TEXT")
    assert lines[4].endswith("on n6: systemctl status nodeagent; journalctl -u nodeagent -n 50")
    assert "systemctl status nodeagent" in lines[0]
    assert lines[1].endswith("nodeagentctl uncordon n2")


def test_nodes_whose_kernels_log_is_closed_are_one_sentence_with_true_advice() -> None:
    """In containers that is every node."""
    cluster = make_cluster(["n1", "n2", "n3"])
    closed = Verdict(
        rule="probe.kernel_log", severity="info", action="none", text="the kernel's log cannot be read",
        since=1.0, seen=1.0,
    )  # fmt: skip
    for node in ("n1", "n3"):
        old = cluster.nodes[node]
        cluster = with_node(
            cluster, old.model_copy(update={"facts": old.facts.model_copy(update={"health": (closed,)})})
        )
    (line,) = reported(cluster)
    assert line.startswith("warning cluster: the kernel's log cannot be read on n1, n3: ")
    assert "health.ignore: [probe.kernel_log]" in line
    assert "doctor" not in line


def test_a_job_that_is_not_run_is_reported() -> None:
    refusal = Refusal("unsigned", "it has no signature; delete it", controlled=False)
    cluster = replace(make_cluster(["n1"], make_job()), refused={UID: refusal})
    assert reported(cluster) == ["error job/a: is not run: it has no signature; delete it | nodeagentctl describe a"]


def test_jobs_that_wait_say_for_what() -> None:
    holding = make_cluster(["n1"], make_job(phase="holding", reason="old"))
    assert reported(holding, why={UID: ("needs 2 nodes, 1 fits",)}) == [
        "error job/a: holds, nothing of it trains: needs 2 nodes, 1 fits | nodeagentctl describe a"
    ]
    backs_off = make_job(phase="holding", reason="worker 3 failed").model_copy(update={"not_before": 8_000})
    assert reported(replace(make_cluster(["n1"], backs_off), served=2_000)) == [
        "warning job/a: backs off, and starts again in 6 s: worker 3 failed | nodeagentctl describe a"
    ]
    queued = make_cluster(["n1"], make_job(phase="queued", reason="has only just come"))
    assert reported(queued) == ["warning job/a: waits to start: has only just come | nodeagentctl describe a"]
    assert reported(make_cluster(["n1"], make_job(phase="failed"))) == []


def test_a_job_whose_failsafe_members_are_all_silent_is_named_in_every_phase() -> None:
    for phase in ("running", "forming", "pausing", "paused"):
        job = make_job(phase, make_generation(["n2"]), active=1).model_copy(
            update={"failsafe_members": {"n2": life("n2")}}
        )
        (line,) = reported(make_cluster(["n1", "n2"], job, lapsed=["n2"]))
        assert line.startswith("error job/a: nothing has been received from n2, which may keep generation 1 running")
        assert reported(make_cluster(["n1", "n2"], job)) == []
    assert reported(make_cluster(["n1"], make_job(phase="paused"))) == []


def test_a_node_that_cannot_run_a_job_says_why() -> None:
    cluster = make_cluster(["n1", "n2"], make_job(phase="paused"))
    unfit = Readiness(state="unfit", reason="/shared is missing")
    cluster = with_node(cluster, cluster.nodes["n2"].model_copy(update={"readiness": {UID: unfit}}))
    assert reported(cluster) == ["warning node/n2: cannot run job a: /shared is missing | nodeagentctl describe a"]


def test_a_node_without_free_ports_says_who_has_them() -> None:
    cluster = make_cluster(["n1", "n2"], make_job(phase="paused"))
    cluster = with_node(cluster, cluster.nodes["n2"].model_copy(update={"readiness": {UID: PORTLESS}}))
    (line,) = reported(cluster)
    assert line.startswith("warning node/n2: cannot lead job a: no free port in 1-9 on n1 (uid 7 has 9 of them)")


def test_the_work_grows_with_nodes_and_jobs_and_not_with_their_product() -> None:
    asked: list[str] = []

    class Counting(Cluster):
        def live(self, node: str, life: str | None = None) -> bool:
            asked.append(node)
            return super().live(node, life)

    nodes = {n: make_node(n) for n in (f"n{i}" for i in range(20))}
    jobs = {uid: make_job("running").model_copy(update={"uid": uid}) for uid in (f"u{i}" for i in range(20))}
    assert judge_cluster(Counting(served=0, nodes=nodes, jobs=jobs), dict.fromkeys(nodes, READY), {}) == ()
    assert len(asked) <= 10 * len(nodes)


def test_gpus_that_are_left_out() -> None:
    gpu = Gpu(uuid="GPU-1", index=1, healthy=False, why="Xid 79")
    (line,) = reported(changed(make_cluster(["n1"]), "n1", gpus=(gpu,), hostname="host1"))
    assert line == "warning node/n1: GPU 1 (GPU-1) is left out: Xid 79 | on host1: nvidia-smi -q -i GPU-1"


def test_devices_that_processes_have_which_do_not_end_are_named() -> None:
    unfit = Readiness(state="unfit", reason="processes 7 do not end, even with SIGKILL")
    cluster = make_cluster([make_node("n1", ready={"gone": unfit}), "n2"])
    (line,) = reported(changed(cluster, "n1", held={"cpu0": "gone", "cpu1": "gone"}, hostname="host1"))
    assert line == (
        "warning node/n1: processes of job gone do not end (processes 7 do not end, even with SIGKILL); nobody is "
        "given what they may have: cpu0, cpu1 | on host1: ps -eo pid,stat,wchan:30,cmd; if it lasts: nodeagentctl "
        "drain n1 --reason TEXT, then reboot it"
    )


def test_sick_nodes_are_named_with_what_repairs_them() -> None:
    lost = verdict(device="GPU-n1-0")
    cluster = make_cluster([make_node("n1", gpus=1, health=[lost]), "n2"])
    fix = "reboot the machine, then: nodeagentctl health ack n1"
    assert reported(cluster) == [f"error node/n1: GPU 0 is fatal: it is lost (xid.79) | {fix}"]
    worn = verdict("disk", severity="degraded")
    assert reported(make_cluster([make_node("n1", health=[worn])]))[0].startswith(
        "warning node/n1: the node is degraded:"
    )
    for harmless in (verdict(severity="info"), verdict(severity="app")):
        assert reported(make_cluster([make_node("n1", health=[harmless])])) == []
    for over in (verdict(dry_run=True), lost.model_copy(update={"stage": "probation"})):
        (line,) = reported(make_cluster([make_node("n1", gpus=1, health=[over])]))
        assert line.startswith("info node/n1:")


def test_an_open_breaker_is_named() -> None:
    lines = reported(make_cluster([make_node(n, health=[verdict()]) for n in ("n1", "n2")]))
    assert [line.startswith("warning node/n1: the breaker is open: 2 of 2 nodes") for line in lines].count(True) == 1


def test_agents_that_differ_in_version() -> None:
    (line,) = reported(changed(make_cluster(["n1", "n2", "n3"]), "n2", agent_version="9.9"))
    assert line.startswith("warning cluster: agents differ in version: ")
    assert "9.9 on n2" in line
    assert " on n1, n3" in line


def test_addresses_that_other_machines_cannot_use() -> None:
    one = make_cluster(["n1", "n2"])
    here = changed(changed(one, "n1", address="127.0.0.1", boot_id="b"), "n2", address="127.0.0.1", boot_id="b")
    assert reported(here) == [], "one machine may use its loopback"
    there = changed(here, "n2", address="10.0.0.2", boot_id="other")
    (line,) = reported(there)
    assert line.startswith("error node/n1: its address is 127.0.0.1: no other machine can reach")
    same = changed(changed(one, "n1", address="10.0.0.9", boot_id="b"), "n2", address="10.0.0.9", boot_id="other")
    (line,) = reported(same)
    assert line.startswith("error cluster: n1, n2 are different machines with the same address 10.0.0.9")


def test_the_agent_that_is_asked() -> None:
    sound = AgentStanding(node="n1", joined=True, lease_left=2.0)
    assert judge_agent(sound) == ()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"joined": False, "reason": "the id is taken"}, "error", "the id is taken"),
        ({"lease_left": 0.0}, "error", "lease has run out, since its lease process does not renew it: its workers"),
        ({"lease_left": 0.0, "lent": 2}, "error", "stopped, but for those that run on failsafe time (jobs: 2)"),
        ({"store_away": 7.2}, "error", "no answer from the store for 7 s"),
        ({"store_away": 7.2, "lease_left": 0.0, "lent": 1}, "error", "no answer from the store for 7 s"),
        (
            {"store_away": 7.2, "lease_left": 0.0},
            "error",
            "for 7 s, and nothing runs on this node, which has no lease",
        ),
        (
            {"store_unusable": "full", "store_away": 7.2, "lease_left": 0.0},
            "error",
            "as if it were away, and nothing runs on this node, which has no lease: full",
        ),
        ({"store_unusable": "version 9", "store_away": 7.2}, "error", "cannot use the store for 7 s, and goes on"),
        ({"undecided": {"j": "KeyError in job/gang.py, line 9"}}, "error", "its agent cannot decide about job j, and"),
        ({"unread": {"job:u1": "bad mood"}}, "error", "the record job:u1 in the store cannot be read (bad mood)"),
        ({"beyond": ("nodes",)}, "error", "the store has more nodes than any cluster"),
        ({"beyond": ("days",)}, "error", "the store has more days of use than any cluster"),
        ({"beyond": ("jobs",)}, "error", "until some are gone nothing is decided; of those that it reads most"),
        ({"beyond": ("jobs",), "most": ("eve (9 jobs of 7 bytes)", "bob")}, "error", "to eve (9 jobs of 7 bytes), bob"),
        ({"loop_lag": 3.0}, "warning", "3.0 s late"),
        ({"unsaved": "no space left on device"}, "error", "jobs on its disk (no space left on device)"),
        (
            {"loopback": "cannot listen: uid 5"},
            "warning",
            "no health and metrics here: cannot listen: uid 5",
        ),
        ({"https_missing": True}, "warning", "serves nobody over https"),
    ]
    for change, severity, what in cases:
        (found,) = judge_agent(sound.model_copy(update=change))
        assert (found.severity, what in found.what) == (severity, True)


def test_whom_the_store_waits_for() -> None:
    assert judge_recovery("") == ()
    ((where, found),) = judge_recovery(waits_for(("n7", "n8"), 2, 42.0))
    assert (where, found.severity) == ("store", "warning")
    assert "waits for nodes that may know it: n7, n8; nothing is decided until enough of them are back" in found.what
    assert "start the agents of those nodes" in found.fix


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_each_answer_of_a_peer(outcome: str) -> None:
    peer = PeerAnswer.model_validate({"node": "n2", "address": "10.0.0.2", "outcome": outcome, "detail": "so"})
    found = judge_peers("n1", [peer])
    if outcome in ("accepted", "refused"):
        assert found == ()
        return
    ((where, finding),) = found
    assert where == "node/n2"
    assert finding.severity == ("warning" if outcome == "unknown" else "error")
    assert "10.0.0.2" in finding.what and "n1" in finding.what and "so" in finding.what
    assert finding.fix or outcome == "unknown"


def test_errors_first_otherwise_in_order() -> None:
    nodes = {"n1": ("left", "gone"), "n2": ("cordoned", "x"), "n3": ("lost", "y"), "n4": ("cordoned", "z")}
    found = ranked(judge_cluster(make_cluster(["n1", "n2", "n3", "n4"]), nodes, {}))
    assert [where for where, _ in found] == ["node/n3", "node/n2", "node/n4", "node/n1"]


def test_users_at_a_limit_are_named() -> None:
    owned = {"bob": Owned(jobs=1, bytes=2000), "ann": Owned(jobs=2, bytes=2000)}
    assert judge_users("n1", owned, Quota(jobs=3, bytes=10_000), {}) == ()
    found = judge_users("n1", owned, Quota(jobs=2, bytes=10_000), {"eve": ("requests", "followers")})
    reported = {where: (f.severity, f.what) for where, f in found}
    assert reported == {
        "user/ann": ("warning", "ann has 2 live jobs, and limits.jobs is 2: only operators may submit more"),
        "user/eve": (
            "warning", "eve was refused by the agent of node n1 in the last 5 min: limits.followers, limits.requests"
        ),
    }  # fmt: skip
    nearly = judge_users("n1", owned, Quota(jobs=9, bytes=2000), {})
    assert [where for where, _ in nearly] == ["user/ann", "user/bob"]
    assert all("limits.job_bytes" in f.what and "limits.job_bytes" in f.fix for _, f in nearly)


def test_users_who_have_nearly_all_that_they_may_fill_together() -> None:
    filled = {"ann": Filled(2, 10), "bob": Filled(1, 70), "eve": Filled(40, 3), "kim": Filled(1, 1)}
    assert judge_room(filled, Filled(100, 100)) == ()
    ((where, found),) = judge_room(filled, Filled(100, 90))
    assert (where, found.severity) == ("cluster", "warning")
    assert found.what == (
        "all users together have 44 jobs of 84 bytes, and may fill 100 jobs or 90 bytes: then who has more than a few "
        "is refused. Most have bob (1 job of 70 bytes), eve (40 jobs of 3 bytes), ann (2 jobs of 10 bytes)"
    )
    assert "nodeagentctl delete JOB" in found.fix
    assert judge_room(filled, Filled(48, 900))


def test_what_is_wrong_with_the_queues() -> None:
    lost = make_job("pausing", spec=make_spec().model_copy(update={"queue": "gone"}))
    tree = Queues(
        rev=2, queues=(Queue(name="a", guarantee=Amount(slots=9)), Queue(name="b", guarantee=Amount(nodes=1)))
    )
    found = replace(make_cluster(["n1", "n2"], lost), queues=tree, queues_rev=2)
    assert reported(found) == [
        "error job/a: its queue gone does not exist any more: it gets no nodes that it does not have | "
        "nodeagentctl queue create gone; or: nodeagentctl stop a",
        "warning cluster: queues are guaranteed 9 slots, and the live nodes have 8 | bring the nodes back, or lower "
        "guarantees: nodeagentctl queue set QUEUE guarantee.NAME=N",
    ]
    assert "were changed past the agents" in reported(replace(found, queues_rev=3))[0]
    ended = lost.model_copy(update={"phase": "failed"})
    assert reported(replace(make_cluster(["n1"], ended), queues=Queues(rev=1), queues_rev=1)) == []
