"""The agent's JSON as the tool gets it, fixed to the last digit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nodeagent.api.jobdetail import (
    alone_json,
    failing_node,
    generations,
    policies_due,
    setbacks_json,
    start_json,
    way_out,
)
from nodeagent.api.queues import queue_json
from nodeagent.api.serializers import job_json, node_json
from nodeagent.model.constraints import Constraints
from nodeagent.model.health import Action, Claim, RepairState, Severity, Verdict
from nodeagent.model.job import BudgetEntry, Control, JobEvent, JobRecord, Outcome, Phase
from nodeagent.model.jobspec import After, Array, Nodes, Role, Together
from nodeagent.model.node import Cordon, Gpu, HttpsAddress, Incarnation, NodeFacts, NodeRecord, Readiness
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.model.usage import Held, UsedTime
from nodeagent.model.world import AloneRestart, Cause, Generation, Member, Place, PodReport, Token, WorkerExit
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import standings
from nodeagent.plan.placing.topology import placed_text, placement_asked
from nodeagent.spec.sections import LimitsConfig
from tests.unit.api.fakes import spec
from tests.unit.plan.build import make_holder

NOW = 10_000.0
ERROR = 'Traceback (most recent call last):\n  File "train.py", line 41, in step\nValueError: loss is nan'
SPEND = BudgetEntry(
    at=9_000, wall=9_000.0, kind="worker_failed", counts=True, node="n2", rank=3, exit=1, error=ERROR,
    text="rank 3 on n2 failed first: exit code 1 (ranks 0, 1, 2 ended after it)",
)  # fmt: skip


START = Cause(kind="start", text="first start")


def member(node: str, index: int) -> Member:
    gpus = (f"GPU-{node}-0", f"GPU-{node}-1")
    return Member(node=node, life=f"life-{node}", group_rank=index, first_rank=2 * index, workers=2, devices=gpus)


def generation(number: int = 2, **more: Any) -> Generation:
    values: dict[str, Any] = {
        "number": number, "id": f"g{number}", "state": "active", "since": 9_500,
        "members": {"n1": member("n1", 0), "n2": member("n2", 1)},
        "cause": Cause(kind="worker_failed", text=SPEND.text, node="n2", rank=3),
    }  # fmt: skip
    return Generation(**(values | more))


def job(phase: Phase = "running", **more: Any) -> JobRecord:
    values: dict[str, Any] = {
        "uid": "0f3a9c71d2e84b56", "name": "digits", "owner": 54321, "spec": spec(), "phase": phase,
        "control": Control(rev=1, target=2), "reason": "generation 2 is active", "submitted": NOW - 3_700,
        "started": NOW - 3_660, "generation": generation(), "active": Token(number=2, id="g2"), "budget": {"1": SPEND},
        "first_active": 100, "since": 9_600, "ran": 3_660_000, "restarts": 1,
        "failsafe_members": {n: f"life-{n}" for n in ("n1", "n2", "n3")},
    }  # fmt: skip
    return JobRecord(**(values | more))


FAILED = job(
    "failed", reason="restart budget spent: 10 restarts within 3600 s", ended=NOW - 60,
    outcome=Outcome(code=1, text=SPEND.text, error=ERROR), generation=generation(1, state="ended", cause=START),
    active=Token(number=1, id="g1"), restarts=0, ran=3_600_000,
)  # fmt: skip
HOLDING = job(
    "holding", reason="needs 2 nodes, 1 fits",
    generation=generation(state="ended", outside={"n3": "/shared/resnet is missing"}),
)  # fmt: skip
SILENT = job(failsafe_members={"n4": "life-n4"})
LEFT = job(
    last_number=1,
    last_reports={
        "n1": PodReport(state="left", reason="checkpoint at step 120 in 0.31 s"),
        "n2": PodReport(state="left", reason="grace of 30 s ran out: ranks 2, 3 killed"),
        "n3": PodReport(state="succeeded"),
    },
)
MEMBER = job(
    "queued", generation=None, active=None, budget={}, failsafe_members={}, restarts=0, started=None, first_active=None,
    ran=0, reason="waits for job prepare to succeed (running)",
    spec=spec(
        time_limit=5400.0, after=(After(uid="u1", name="prepare"), After(uid="a1", name="clean", need="any", array=3)),
        array=Array(name="sweep", id="a2", index=7, count=100, first=0, last=99, at_once=8),
    ),
)  # fmt: skip
SERVERS = Role(
    name="pserver", command=("python", "server.py"), nodes=Nodes(min=1, max=2, target=2),
    replicas=Nodes(min=2, max=2, target=2), workers_per_node=1, restart="alone",
)  # fmt: skip
TRAINERS = Role(name="trainer", command=("python", "train.py"), nodes=Nodes(min=2, max=2, target=2), workers_per_node=1)


def places(node: str, index: int) -> Member:
    """A member with a place of each of two roles."""
    one = member(node, index)
    both = zip(("pserver", "trainer"), one.devices, strict=True)
    held = tuple(Place(role=role, index=index, workers=1, devices=(device,)) for role, device in both)
    return one.model_copy(update={"places": held})


RESTARTED = AloneRestart(rank=0, order=0, at=9_700, exit=137, text="pserver.0, rank 0, failed: SIGKILL (9)")
VICTIM = AloneRestart(rank=1, order=2, at=9_750, exit=1, text="trainer.0, rank 1, failed: exit code 1", round=1)
KILLED = AloneRestart(rank=3, order=0, at=9_751, exit=137, text="trainer.1, rank 3, failed: SIGKILL (9)", round=1)
ROLES = job(
    spec=spec().model_copy(update={"roles": (SERVERS, TRAINERS), "completes": "trainer"}),
    generation=generation(
        members={"n1": places("n1", 0), "n2": places("n2", 1)},
        reports={
            "n1": PodReport(state="running", alone=(RESTARTED, RESTARTED.model_copy(update={"order": 1}), VICTIM)),
            "n2": PodReport(state="running", alone=(KILLED,)),
        },
    ),
)
ENDED_PODS = {
    "n2": PodReport(
        state="failed", seq=1, exits=(WorkerExit(rank=3, local_rank=1, pid=613, code=1, error=ERROR),
                                      WorkerExit(rank=2, local_rank=0, pid=612, signal=9, order=1)),
    )
}  # fmt: skip
EVENTS = [
    JobEvent(id="6340000-0", kind="GenerationForming", uid="0f3a9c71d2e84b56", generation=1, text="first start"),
    JobEvent(id="6341000-0", kind="GenerationActive", uid="0f3a9c71d2e84b56", generation=1),
    JobEvent(id="9000000-0", kind="WorkerFailed", uid="0f3a9c71d2e84b56", generation=1),
    JobEvent(id="9000020-0", kind="GenerationForming", uid="0f3a9c71d2e84b56", generation=2, text=SPEND.text),
    JobEvent(id="9000210-0", kind="GenerationActive", uid="0f3a9c71d2e84b56", generation=2),
    JobEvent(
        id="9001220-0",
        kind="GenerationStarted",
        uid="0f3a9c71d2e84b56",
        generation=2,
        node="n1",
        text="workers run again after 0.224 s: detected 0.004, stopped 0.150, acknowledged 0.021, formed 0.206, "
        "started 0.014",
    ),
]


def node(name: str, **more: Any) -> NodeRecord:
    url = f"https://10.0.0.{name[1:]}:9470"
    gpus = tuple(Gpu(uuid=f"GPU-{name}-{i}", index=i, name="H100") for i in range(2))
    facts = NodeFacts(
        address=f"10.0.0.{name[1:]}", hostname=f"host-{name}", boot_id="b", agent_pid=4000 + int(name[1:]),
        agent_version="0.1.0", started=NOW - 8_000, cpu_slots=4, gpus=gpus, labels={"rack": "r7"},
        http="http://127.0.0.1:9470", https=HttpsAddress(url=url, certificate="ab" * 32, proof=""),
    )  # fmt: skip
    life = Incarnation(life=f"life-{name}", start=1)
    return NodeRecord(id=name, incarnation=life, joined=1, facts=facts, **more)


def cluster(*jobs: JobRecord) -> Cluster:
    nodes = {
        "n1": node("n1"),
        "n2": node("n2"),
        "n3": node(
            "n3",
            cordon=Cordon(reason="bad disk", by="olga", at=1.0),
            readiness={"0f3a9c71d2e84b56": Readiness(state="unfit", reason="/shared/resnet is missing")},
        ),
        "n4": node("n4", lost=True),
    }
    return Cluster(served=9_600, nodes=nodes, jobs={j.uid: j for j in jobs}, lapsed=frozenset({"n4"}))


def published(record: JobRecord) -> dict[str, PodState]:
    if record.phase != "running" or record.generation is None:
        return {}
    pods = {
        m.node: PodState(
            uid=record.uid, job=record.name, role="worker", node=m.node, phase="running",
            generation=record.generation.number, shim_pid=500 + m.group_rank, preforked=2, preforked_memory=24_600_000,
            workers=tuple(
                WorkerState(rank=m.first_rank + k, local_rank=k, pid=600 + 10 * m.group_rank + k, state="running")
                for k in range(2)
            ),
        )
        for m in record.generation.ordered()
    }  # fmt: skip
    pods["n4"] = PodState(uid=record.uid, job=record.name, role="worker", node="n4", phase="ready")
    return pods


LIMITS: dict[str, Any] = {
    "owner": "alice",
    "node": "n1",
    "values": LimitsConfig().model_dump(mode="json"),
    "used": {"jobs": 3, "job_bytes": 12_345, "concurrent": 2, "followers": 1},
}
"""What the owner of a job has, and may have."""


def listed(record: JobRecord) -> dict[str, Any]:
    return job_json(record, cluster(record), published(record), NOW)


def shown_line() -> list[dict[str, Any]]:
    """Rows of ``get`` where one job runs and two wait."""
    fresh: dict[str, Any] = {
        "generation": None,
        "active": None,
        "budget": {},
        "failsafe_members": {},
        "restarts": 0,
        "started": None,
        "first_active": None,
        "ran": 0,
    }
    later = [job("queued", uid=f"f{n}", name=name, order=n, **fresh) for n, name in ((8, "resnet50-long"), (7, "gpt"))]
    shown = cluster(job(), *later)
    return [job_json(one, shown, published(one) if one.generation else {}, NOW) for one in shown.jobs.values()]


def racked(*jobs: JobRecord) -> Cluster:
    """The same nodes in two racks, of which the first has H100s."""
    plain = cluster(*jobs)
    labels = {n: {"rack": "r1", "gpu": "h100"} if n in ("n1", "n2") else {"rack": "r2"} for n in plain.nodes}
    nodes = {
        n: record.model_copy(
            update={"facts": record.facts.model_copy(update={"labels": labels[n], "topology": ("rack",)})}
        )
        for n, record in plain.nodes.items()
    }
    return replace(plain, nodes=nodes)


def asking(record: JobRecord, **asked: Any) -> JobRecord:
    """The job with these constraints, in one rack."""
    role = record.spec.role.model_copy(update={"placement": Constraints(**asked)})
    placed = record.spec.model_copy(update={"roles": (role,), "placement": Together(within="rack")})
    return record.model_copy(update={"spec": placed})


USED = job(
    held=Held(at=0),
    used={
        "20780": UsedTime(
            gpu_ms=3_600_000 * 12_345,
            lost_gpu_ms=3_600_000 * 3,
            overhead_gpu_ms=3_600_000 * 2,
            waited_ms=200_000,
            restarts=2,
        )
    },
)
USAGE: list[dict[str, Any]] = [
    {
        "name": name, "user": user, "queue": "default", "uid": uid, "gpu_hours": gpus, "slot_hours": slots,
        "lost_gpu_hours": lost, "lost_slot_hours": 0.0, "overhead_gpu_hours": 2 * lost, "overhead_slot_hours": 0.0,
        "goodput": goodput, "waited_hours": waited, "jobs": jobs,
        "restarts": restarts,
    }
    for name, user, uid, gpus, slots, lost, goodput, waited, jobs, restarts in (
        ("ann", "ann", None, 123_456.78, 0.0, 0.01, 0.99999, 30.5, 140, 7),
        ("maximilian-longest-name", "bob", "0123456789abcdef", 0.0, 1.0, 0.0, 1.0, 0.0, 0, 0),
        ("(all)", None, None, 123_456.78, 1.0, 0.01, None, 30.5, 140, 7),
    )
]  # fmt: skip


def detail(record: JobRecord, why: tuple[str, ...] = (), shown: Cluster | None = None) -> dict[str, Any]:
    from nodeagent.api.accounting import job_use
    from nodeagent.api.serializers import budget_json

    shown = shown or cluster(record)
    return listed(record) | {
        "why": list(why),
        "way_out": way_out(record, shown),
        "policies_due": policies_due(record, shown),
        "setbacks": setbacks_json(record, shown),
        **start_json(record, shown, NOW),
        "store_waits": "",
        "refused": False,
        "failing_node": failing_node(record, shown),
        "no_progress": "",
        "unreachable": [],
        "limits": None,
        "placement": {"asks": placement_asked(record.spec), "placed": placed_text(shown, record)},
        "budget": budget_json(record, shown),
        "usage": job_use(record, shown, NOW),
        "generations": generations(
            record, [e for e in EVENTS if record.generation and e.generation <= record.generation.number]
        ),
        "reports": {node: report.model_dump() for node, report in record.last_reports.items()},
        "alone": alone_json(record),
        "outside": dict(record.generation.outside) if record.generation else {},
        "store_away_since": None,
        "lent": None,
        "private": False,
        "spec": record.spec.model_dump(),
    }


def shown_node(name: str) -> dict[str, Any]:
    stopping = job(generation=generation(holders={"n3": make_holder("n3", "life-n3", ("GPU-n3-0",))}))
    shown = cluster(stopping)
    return node_json(shown.nodes[name], shown, NOW)


def holding_node() -> dict[str, Any]:
    """n2, where processes of a job that is gone do not end."""
    shown = cluster(job())
    uid, record = "c7af3cf94311472db447af8b76d71f4d", shown.nodes["n2"]
    why = "its shim could not end all that it had started, and was killed with it, and processes 462 do not end, even"
    held = {"facts": record.facts.model_copy(update={"held": {"GPU-n2-1": uid, "cpu0": uid}})}
    ready = {"readiness": record.readiness | {uid: Readiness(state="unfit", reason=f"{why} with SIGKILL")}}
    return node_json(record.model_copy(update=held | ready), shown, NOW)


def restarting_node(name: str) -> dict[str, Any]:
    """Its agent was asked to end twelve seconds ago."""
    shown = cluster(job())
    facts = {"restarting": NOW - 12, "http": "", "agent_pid": 5002}
    record = shown.nodes[name].model_copy(update={"facts": shown.nodes[name].facts.model_copy(update=facts)})
    return node_json(record, shown, NOW)


def mute_node(name: str) -> dict[str, Any]:
    """Its agent has been silent for a while; its workers go on."""
    shown = cluster(job())
    return node_json(shown.nodes[name].model_copy(update={"mute": True}), shown, NOW)


def sick_node() -> dict[str, Any]:
    """n1, with a GPU that is lost, one that is hot, and a rule that is only tried."""

    def verdict(rule: str, device: str, severity: Severity, action: Action, text: str, **more: Any) -> Verdict:
        return Verdict(
            rule=rule, device=device, severity=severity, action=action, text=text, since=NOW - 400, seen=NOW, **more
        )

    verdicts = (
        verdict("xid.79", "GPU-n1-0", "fatal", "reboot", "the GPU has fallen off the bus", raw="NVRM: Xid 79, ..."),
        verdict("nvlink.down", "GPU-n1-1", "fatal", "reset_gpu", "an NVLink is down", stage="probation",
                until=NOW + 200, dry_run=True),
        verdict("clocks.slowdown", "GPU-n1-1", "degraded", "service", "clocks lowered by the hardware"),
        verdict("probe.nvml.broken", "", "unknown", "diagnose", "the driver cannot be asked",
                raw="nvml: Driver Not Loaded"),
    )  # fmt: skip
    well = node("n1")
    gpus = (well.facts.gpus[0].model_copy(update={"healthy": False, "why": "xid.79"}), well.facts.gpus[1])
    sick = well.model_copy(update={"facts": well.facts.model_copy(update={"gpus": gpus, "health": verdicts})})
    return node_json(sick, Cluster(served=9_600, nodes={"n1": sick}), NOW)


def repairing_node() -> dict[str, Any]:
    """n1, which makes room for its reboot."""
    found = Verdict(
        rule="xid.79", device="GPU-n1-0", severity="fatal", action="reboot", text="GPU has fallen off the bus",
        since=NOW - 4, seen=NOW,
    )  # fmt: skip
    claim = Claim(
        kind="reboot", rule="xid.79", device="GPU-n1-0", whole=True, phase="holds", since=NOW - 3,
        why="waits until it is free: job digits",
    )  # fmt: skip
    well = node("n1")
    facts = {"health": (found,), "repair_state": RepairState(kinds=("reboot",), claim=claim)}
    sick = well.model_copy(update={"facts": well.facts.model_copy(update=facts)})
    return node_json(sick, Cluster(served=9_600, nodes={"n1": sick}), NOW)


def _shared() -> Cluster:
    """Three teams on n1 to n3, one of which runs."""
    tree = Queues(
        rev=3,
        queues=(
            Queue(name="product", weight=2, priority=10, reclaimable=False, users=("ann",)),
            Queue(name="research", weight=6, guarantee=Amount(gpus=4), capability=Amount(gpus=8, nodes=4)),
            Queue(name="speech", parent="research", state="closed"),
            Queue(name="vision", parent="research", weight=2, groups=("phd",), default=True, min_runtime=600.0),
        ),
    )
    ours = spec().model_copy(update={"queue": "vision"})
    return replace(
        cluster(job(spec=ours), job("queued", spec=ours, uid="f7", name="more", generation=None, order=2)), queues=tree
    )


def shown_queues() -> list[dict[str, Any]]:
    shown = _shared()
    return [queue_json(shown, one) for one in standings(shown).values()]


def queue_detail() -> dict[str, Any]:
    shown = _shared()
    use = {"gpus": 4, "nodes": 2, "slots": 0}
    none = dict.fromkeys(use, 0)
    reason = "queue research may use 8 gpus and has 4 in use; this needs 6 more (job digits holds 4)"
    return queue_json(shown, standings(shown)["vision"]) | {
        "work": [
            {"name": "digits", "owner": "alice", "phase": "running", "used": use, "place": None, "reason": "it runs"},
            {"name": "more", "owner": "bob", "phase": "queued", "used": none, "place": 1, "reason": reason},
        ],
        "by_user": [{"user": "alice", "used": use}],
    }
