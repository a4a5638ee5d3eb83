"""Clusters and jobs in few words, for the tests of ``plan/``. Builds records only; must never decide anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import settings

from nodeagent.model.constraints import Constraints
from nodeagent.model.health import Severity, Verdict
from nodeagent.model.job import BudgetEntry, Control, Desired, JobRecord, Phase, Scale
from nodeagent.model.jobspec import After, Array, JobSpec, Nodes, Policy, RestartLimits, Role, Submitter, Together
from nodeagent.model.node import Cordon, Gpu, Incarnation, NodeFacts, NodeRecord, Notice, Readiness
from nodeagent.model.timing import Timing
from nodeagent.model.world import Cause, CauseKind, Generation, GenerationState, Member, PodReport, Token, WorkerExit
from nodeagent.plan.cluster import Cluster

REPEATABLE = settings(derandomize=True, deadline=None, database=None, max_examples=60)
"""For property tests: the same examples each time, judged by what they show, not by how long they take."""

UID = "u-a"
WALL = 1000.0
NOW = 1_000_000
"""Served time of every cluster built here, unless said otherwise: long after everything else happened."""
READY = Readiness(state="ready")
WARMING = Readiness(state="ready", warming=True)
PREPARING = Readiness(state="preparing", reason="imports torch")
UNFIT = Readiness(state="unfit", reason="/shared/x is missing", code=127)
PORTLESS = Readiness(
    state="unfit", reason="no free port in 1-9 on n1 (uid 7 has 9 of them)", passing=True, portless=True
)


def life(node: str) -> str:
    return f"life-{node}"


def make_node(
    name: str,
    *,
    slots: int = 4,
    gpus: int = 0,
    sick: Iterable[int] = (),
    ready: Mapping[str, Readiness] | None = None,
    cordon: bool = False,
    drain: bool = False,
    lost: bool = False,
    left: bool = False,
    joined: int = 0,
    of_life: str | None = None,
    peer: bool = False,
    health: Iterable[Verdict] = (),
    labels: Mapping[str, str] | None = None,
    topology: tuple[str, ...] = (),
    spot: bool = False,
    notice: Notice | None = None,
    mute: bool = False,
) -> NodeRecord:
    """A node, ready for job ``UID`` unless said otherwise. ``peer``: other agents can ask it. GPUs that a verdict in
    ``health`` bars are sick."""
    verdicts = tuple(health)
    bad = set(sick) | {int(v.device.rpartition("-")[2]) for v in verdicts if v.bars and v.device}
    installed = tuple(
        Gpu(uuid=f"GPU-{name}-{i}", index=i, healthy=i not in bad, why="Xid 79" if i in bad else "")
        for i in range(gpus)
    )
    return NodeRecord(
        id=name,
        incarnation=Incarnation(life=of_life or life(name), start=1),
        lost=lost,
        left=left,
        mute=mute,
        joined=joined,
        facts=NodeFacts(
            address=f"10.0.0.{len(name)}",
            hostname=name,
            boot_id="b",
            agent_pid=1,
            agent_version="0",
            started=0.0,
            cpu_slots=slots,
            gpus=installed,
            peer=f"{name}:29400" if peer else "",
            health=verdicts,
            labels=dict(labels or {}),
            topology=topology,
            spot=spot,
            notice=notice,
        ),
        cordon=Cordon(reason="disk", by="op", at=0.0, drain=drain) if cordon or drain else None,
        readiness=dict({UID: READY} if ready is None else ready),
    )


def verdict(
    rule: str = "xid.79",
    device: str = "",
    severity: Severity = "fatal",
    since: float = WALL,
    dry_run: bool = False,
) -> Verdict:
    """``device``: empty for the node, else the uuid that ``make_node`` gives its GPUs."""
    return Verdict(
        rule=rule, device=device, severity=severity, action="reboot", text="it is lost", since=since, seen=since,
        since_served=NOW + round(1000 * (since - WALL)), dry_run=dry_run,
    )  # fmt: skip


def make_cluster(
    nodes: Iterable[NodeRecord | str],
    *jobs: JobRecord,
    lapsed: Iterable[str] = (),
    served: int = NOW,
    next_lapse: int | None = None,
    lapsed_at: Mapping[str, int] | None = None,
    returned: Mapping[str, int] | None = None,
) -> Cluster:
    """Nodes (a name is a ready node with 4 slots) and jobs."""
    records, silent = [make_node(n) if isinstance(n, str) else n for n in nodes], frozenset(lapsed)
    return Cluster(
        served=served,
        nodes={n.id: n for n in records},
        jobs={j.uid: j for j in jobs},
        lapsed=silent,
        timing=Timing(),
        next_lapse=next_lapse,
        lapsed_at=dict.fromkeys(silent, served) if lapsed_at is None else lapsed_at,
        returned=returned or {},
    )


def make_spec(
    *,
    size: tuple[int, int] = (1, 4),
    workers: int | str = 1,
    gpus: int | None = None,
    uneven: bool = False,
    restarts: RestartLimits | None = None,
    policies: tuple[Policy, ...] = (),
    hold_timeout: float | None = None,
    priority: int = 0,
    name: str = "a",
    checkpoint_dir: str | None = None,
    time_limit: float | None = None,
    begin: float | None = None,
    ttl: float | None = None,
    after: tuple[After, ...] = (),
    array: Array | None = None,
    placement: Constraints | None = None,
    within: str = "",
    segments: int = 0,
) -> JobSpec:
    return JobSpec(
        name=name,
        roles=(
            Role(
                command=("python", "train.py"),
                nodes=Nodes(min=size[0], max=size[1], target=size[1]),
                workers_per_node="gpu" if workers == "gpu" else int(workers),
                gpus_per_worker=gpus,
                uneven=uneven,
                placement=placement,
            ),
        ),
        working_dir="/w",
        checkpoint_dir=checkpoint_dir,
        user="u",
        priority=priority,
        placement=Together(within=within, segments=segments) if within or segments else None,
        restarts=restarts or RestartLimits(),
        policies=policies,
        hold_timeout=hold_timeout,
        time_limit=time_limit,
        begin=begin,
        ttl=ttl,
        after=after,
        array=array,
        submitter=Submitter(user="u", uid=1, gid=1, host="h", cwd="/w"),
    )


def make_generation(
    nodes: Iterable[str],
    *,
    state: GenerationState = "active",
    number: int = 1,
    workers: int = 1,
    cause: CauseKind = "start",
    acks: Iterable[str] = (),
    holders: Iterable[str] = (),
    reports: Mapping[str, PodReport] | None = None,
    planned: bool = False,
    grace: float | None = None,
    since: int = 0,
    deadline: int = NOW + 15_000,
    control_rev: int = 1,
    released: bool = False,
) -> Generation:
    """A generation of the named nodes in this order of rank, with cpu slots 0.. on each. ``acks``: those that have
    acknowledged it; all have where it is not forming."""
    nodes = tuple(nodes)
    answered = set(acks) if state == "forming" else set(nodes)
    slots = tuple(f"cpu{i}" for i in range(workers))
    return Generation(
        number=number,
        id=f"g{number}",
        state=state,
        members={
            n: Member(node=n, life=life(n), group_rank=i, first_rank=i * workers, workers=workers, devices=slots)
            for i, n in enumerate(nodes)
        },
        holders={n: make_holder(n, devices=slots) for n in holders},
        missing={n: life(n) for n in nodes if n not in answered},
        released=released,
        reports=dict(reports or {}),
        cause=Cause(kind=cause, text=f"because of {cause}"),
        planned=planned,
        grace=grace,
        since=since,
        deadline=deadline,
        control_rev=control_rev,
    )


def make_holder(node: str, of_life: str = "", devices: tuple[str, ...] = ("cpu0",)) -> Member:
    """The only member of an earlier generation; in the node's usual life if none is given."""
    workers = len(devices)
    return Member(
        node=node, life=of_life or life(node), group_rank=0, first_rank=0, workers=workers, devices=devices
    )  # fmt: skip


def make_job(
    phase: Phase = "queued",
    generation: Generation | None = None,
    *,
    spec: JobSpec | None = None,
    uid: str = UID,
    desired: Desired = "run",
    target: int | None = None,
    scale: Scale | None = None,
    rev: int = 1,
    restart: int = 0,
    delete: bool = False,
    active: int | None = None,
    budget: Mapping[str, BudgetEntry] | None = None,
    last_reports: Mapping[str, PodReport] | None = None,
    restarts: int = 1,
    since: int = 0,
    order: int = 0,
    owner: int = 1,
    not_before: int = 0,
    reason: str = "as built",
    failsafe_members: Iterable[str] = (),
    silent: Iterable[str] = (),
    last_number: int | None = None,
) -> JobRecord:
    """A job; ``active`` is the number of its newest generation that was ever active (by default, if running: this
    one)."""
    spec = spec or make_spec()
    if active is None and generation is not None and generation.state == "active":
        active = generation.number
    return JobRecord(
        uid=uid,
        name=spec.name,
        owner=owner,
        spec=spec,
        control=Control(
            rev=rev,
            desired=desired,
            target=target or spec.nodes.target,
            restart=restart,
            delete=delete,
            by="ann",
            scale=scale,
        ),
        phase=phase,
        reason=reason,
        submitted=0.0,
        since=since,
        order=order,
        generation=generation,
        active=None if active is None else Token(number=active, id=f"g{active}"),
        first_active=None if active is None else 0,
        budget=dict(budget or {}),
        last_reports=dict(last_reports or {}),
        last_number=(active or 0) if last_number is None else last_number,
        silent={n: life(n) for n in silent},
        restarts=restarts,
        not_before=not_before,
        failsafe_members={n: life(n) for n in failsafe_members},
    )


def make_exit(
    rank: int = 0,
    *,
    code: int | None = None,
    signal: int | None = None,
    stopped: bool = False,
    order: int = 0,
    error: str = "",
) -> WorkerExit:
    if code is None and signal is None:
        code = 1
    return WorkerExit(
        rank=rank, local_rank=0, pid=1, code=code, signal=signal, stopped=stopped, order=order, error=error
    )


def failed(*exits: WorkerExit, seq: int = 1) -> PodReport:
    return PodReport(state="failed", exits=exits, seq=seq)


SUCCEEDED = PodReport(state="succeeded", exits=(make_exit(code=0),))
VICTIM = "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def spend(kind: str, *, counts: bool = True, at: int = NOW, exit_code: int | None = 1) -> BudgetEntry:
    return BudgetEntry(at=at, wall=0.0, kind=kind, counts=counts, text=f"it was {kind}", exit=exit_code)
