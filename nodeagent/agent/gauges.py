"""The metrics page, and its gauges: what is so now, read from the agent's view when somebody asks. Nothing is counted
here (``metrics.py``), and nothing is done between two questions.

Must never do I/O. Series of a job are written anew for each page, so they end with the job. docs/metrics.md is drawn
from ``families()``.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from nodeagent import __version__
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.view import AgentHealth, AgentView
from nodeagent.model.job import TERMINAL, JobRecord, Phase
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodPhase
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.model.world import CauseKind
from nodeagent.plan.cluster import Cluster, RefusalKind
from nodeagent.plan.failure.budget import alone_restarts, restarts_spent
from nodeagent.plan.fairshare.usage import add, goodput, of_job
from nodeagent.plan.nodes.availability import BY as WINDOW
from nodeagent.plan.nodes.health import claimed
from nodeagent.plan.queueing.queue import places
from nodeagent.plan.repair import described
from nodeagent.pods.base import PodStatus

if TYPE_CHECKING:
    from nodeagent.agent.health import NodeHealth

NODE_STATES = (
    "ready", "restarting", "mute", "repairing", "cordoned", "draining", "drained", "maintenance", "leaving", "silent",
    "lost", "left",
)  # fmt: skip
GPU_STATES = ("used", "free", "unfit")
REPAIRING = ("asks", "holds", "runs", "verifies", "probation")
PLACE_STATES = ("wanted", "running")
MAX_ROLES = 16
"""Most roles of a job that have series of their own, the first of its job file."""
MAX_JOBS = 200
"""Most jobs that have series of their own, the oldest first; jobs beyond it are counted in ``nodeagent_jobs`` only."""


def node_state(node: NodeRecord, cluster: Cluster, busy: Container[str] | None = None) -> tuple[str, str]:
    """The node's state in one word, and the reason. ``busy``: the nodes with work, if the caller has them
    (``busy_nodes``): who asks about many nodes would go through all jobs for each that is drained."""
    cordon = node.cordon
    own = cordon if cordon is not None and cordon.by != WINDOW else None
    kept = "" if own is None else f"; {'drained' if own.drain else 'cordoned'}: {own.reason} (by {own.by})"
    if node.left:
        return (
            "left",
            "its agent was stopped in good order, or was silent for too long: nodeagentctl events says which" + kept,
        )
    if node.lost:
        text = "its lease lapsed and its place was given to others, or it was forgotten; it may come back anew"
        return "lost", text + kept
    if node.id in cluster.lapsed:
        return (
            "silent",
            "its lease has lapsed; it is not declared lost: no job has needed its place, or one waits for it" + kept,
        )
    if node.mute and not node.facts.restarting:
        return "mute", f"its agent is silent or cut off from the store: no new work until it is back{kept}"
    if node.window is not None and node.window.leaves:
        return "maintenance", node.window.text + kept
    if node.facts.notice is not None:
        return "leaving", node.facts.notice.text
    if cordon is not None:
        state = "cordoned"
        if cordon.drain:
            state = "draining" if node.id in (busy_nodes(cluster) if busy is None else busy) else "drained"
        return state, f"{cordon.reason} (by {cordon.by})"
    claim = claimed(node.facts)
    if claim is not None and claim.whole:
        return "repairing", described(node)
    if node.facts.restarting:
        text = "its agent was asked to end; its workers go on until the next start"
        return "restarting", f"{text}, and it gets no new work" if node.mute else text
    return "ready", ""


def busy_nodes(cluster: Cluster) -> frozenset[str]:
    """Those that run work, or are about to. Not kept with the view: it is asked for in threads too."""
    generations = (job.generation for job in cluster.jobs.values())
    return frozenset(node for generation in generations if generation is not None for node in generation.occupied)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as its readers know it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class MetricsPage:
    """The page that Prometheus reads of this agent: what it has counted, and what is so now."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, registry = metrics, metrics.registry
        self._build = _gauge(registry, "build_info", "The agent's version, and its node. Always 1.", "version", "node")
        self._cluster, self._jobs, self._node = ClusterGauges(registry), JobGauges(registry), NodeGauges(registry)

    def text(self, view: AgentView) -> bytes:
        """All of it, as of now."""
        cluster, pods, health = view.cluster(), view.pods(), view.node_health
        self._build.labels(version=__version__, node=view.node).set(1)
        self._cluster.read(cluster)
        self._jobs.read(cluster)
        self._node.read(view, cluster)
        here = (job.name for job in live_jobs(cluster) if job.uid in pods)
        self._metrics.catch_up(cluster, view.node, here, health.monitor.xids if health is not None else {})
        return generate_latest(self._metrics.registry)

    def families(self) -> list[Family]:
        """Every metric that can be on the page, by name."""
        found = []
        for metric in self._metrics.registry._collector_to_names:
            if not isinstance(metric, MetricWrapperBase):
                raise TypeError(f"{metric!r} cannot be described: make it a Counter, Gauge or Histogram")
            kind = str(metric._type)
            name = metric._name + ("_total" if kind == "counter" else "")
            found.append(Family(name, kind, tuple(metric._labelnames), metric._documentation))
        return sorted(found, key=lambda family: family.name)


class ClusterGauges:
    """The cluster, as this agent last read it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(_gauge, registry)
        self.jobs = gauge("jobs", "Jobs with a record, by phase.", "phase")
        self.waiting = gauge("waiting_jobs", "Jobs of each queue that wait in line for nodes.", "queue")
        self.longest_wait = gauge(
            "longest_wait_seconds",
            "How long the job of each queue that waits in line for longest has waited; 0 if none does.",
            "queue",
        )
        self.refused = gauge("jobs_refused", "Jobs that this agent runs nothing of now, by reason.", "reason")
        self.nodes = gauge("nodes", "Nodes with a record, by state.", "state")
        self.repairing = gauge(
            "nodes_repairing",
            "Live nodes with a repair to come, under way or being verified, and those with hardware on probation.",
            "stage",
        )

    def read(self, cluster: Cluster) -> None:
        _set(self.jobs, "phase", get_args(Phase), Tally(job.phase for job in cluster.jobs.values()))
        _set(self.refused, "reason", get_args(RefusalKind), Tally(r.kind for r in cluster.refused.values()))
        busy = busy_nodes(cluster)
        _set(self.nodes, "state", NODE_STATES, Tally(node_state(n, cluster, busy)[0] for n in cluster.nodes.values()))
        _set(self.repairing, "stage", REPAIRING, repair_stages(cluster))
        self._read_line(cluster)

    def _read_line(self, cluster: Cluster) -> None:
        tree, waits = cluster.queues, dict[str, list[int]]()
        for uid in places(cluster):
            job = cluster.jobs[uid]
            waits.setdefault(queue_of(job.spec.queue), []).append(max(0, cluster.served - job.since))
        for gauge in (self.waiting, self.longest_wait):
            gauge.clear()
        for queue in waits.keys() | (tree.by_name.keys() - tree.children.keys()):
            self.waiting.labels(queue=queue).set(len(waits.get(queue, ())))
            self.longest_wait.labels(queue=queue).set(max(waits.get(queue, (0,))) / 1000)


class JobGauges:
    """Each live job, as this agent last read it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(_gauge, registry)
        self.generation = gauge("generation", "Newest generation of each live job.", "job")
        self.cause = gauge(
            "generation_cause",
            "Number of the newest generation of each live job, by what it was formed for.",
            "job",
            "cause",
        )
        self.restarts = gauge("job_restarts", "Generations of each live job that became active after its first.", "job")
        self.places = gauge(
            "role_places",
            "Places of each role of a live job of several roles: that it is to have, and has in an active generation.",
            "job",
            "role",
            "state",
        )
        self.role_workers = gauge(
            "role_workers",
            "Workers of each role in the active generation of a live job of several roles.",
            "job",
            "role",
        )
        self.alone = gauge(
            "role_restarts_alone",
            "Restarts of each role's workers, places, or all of it (one each) while the newest generation went on, as "
            "far as they are on record.",
            "job",
            "role",
        )
        self.goodput = gauge(
            "job_goodput", "Part of the devices' time of each live job that was neither lost nor overhead.", "job"
        )
        self.phase = gauge("phase_seconds", "How long each live job has been in its present phase.", "job", "phase")
        self.ends = gauge(
            "generation_ends",
            "Generations of each live job that ended within its restart window, by cause, planned ends included.",
            "job",
            "cause",
        )
        self.spent = gauge("budget_spent", "Restarts within the window that spent each live job's budget.", "job")
        self.limit = gauge("budget_limit", "Restarts that each live job may spend within its window.", "job")
        self.checkpoint = gauge("checkpoint_step", "Step of the newest committed checkpoint of each live job.", "job")

    def read(self, cluster: Cluster) -> None:
        mine = (
            self.generation, self.cause, self.restarts, self.phase, self.ends, self.spent, self.limit, self.checkpoint,
            self.goodput, self.places, self.role_workers, self.alone,
        )  # fmt: skip
        for gauge in mine:
            gauge.clear()
        for job in live_jobs(cluster):
            self._read_roles(job)
            self.phase.labels(job=job.name, phase=job.phase).set(max(0, cluster.served - job.since) / 1000)
            self.spent.labels(job=job.name).set(restarts_spent(job, cluster.served))
            self.limit.labels(job=job.name).set(job.spec.restarts.max)
            self.restarts.labels(job=job.name).set(job.restarts)
            use = add(line.use for line in of_job(job, cluster.served, int(time.time() * 1000)))
            if (part := goodput(use)) is not None:
                self.goodput.labels(job=job.name).set(part)
            since = cluster.served - millis(job.spec.restarts.window)
            causes = Tally(entry.kind for entry in job.budget.values() if entry.at >= since)
            for cause in causes.keys() & set(get_args(CauseKind)):
                self.ends.labels(job=job.name, cause=cause).set(causes[cause])
            if job.generation is not None:
                self.generation.labels(job=job.name).set(job.generation.number)
                self.cause.labels(job=job.name, cause=job.generation.cause.kind).set(job.generation.number)
            if job.checkpoint is not None:
                self.checkpoint.labels(job=job.name).set(job.checkpoint.step)

    def _read_roles(self, job: JobRecord) -> None:
        if not job.spec.several:
            return
        members = job.generation.members if job.generation is not None and job.generation.state == "active" else {}
        running = Tally(place.role for member in members.values() for place in member.places)
        alone = Tally(one.role for one in alone_restarts(job.generation) if one.node in members)
        for role in job.sized.roles[:MAX_ROLES]:
            self.places.labels(job=job.name, role=role.name, state="wanted").set(role.places)
            self.places.labels(job=job.name, role=role.name, state="running").set(running[role.name])
            workers = sum(len(member.ranks_of(role.name)) for member in members.values())
            self.role_workers.labels(job=job.name, role=role.name).set(workers)
            self.alone.labels(job=job.name, role=role.name).set(alone[role.name])


class NodeGauges:
    """This node: its agent, its pods and its devices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(_gauge, registry)
        self.joined = gauge("joined", "1 while this agent holds its node's id, otherwise 0.")
        self.margin = gauge(
            "lease_margin_seconds",
            "Time left of this node's own lease; workers without failsafe time are stopped at its end.",
        )
        self.away = gauge("store_away_seconds", "How long the store has not answered; 0 while it does.")
        self.failsafe = gauge(
            "failsafe_jobs", "Jobs whose workers on this node run on failsafe time from their failsafe members."
        )
        self.failsafe_refused = gauge(
            "failsafe_refused_jobs",
            "Jobs of this node that get no failsafe time while the store is away: their workers end.",
        )
        self.lag = gauge("loop_lag_seconds", "How late the agent's last heartbeat was; above 1 s /healthz fails.")
        self.pods = gauge("pods", "Pods on this node, by phase.", "phase")
        self.stalled = gauge("stalled_pods", "Pods on this node that see no progress for longer than the job allows.")
        self.unreachable = gauge(
            "unreachable_peers",
            "Members and failsafe members of each job that this node's agent cannot reach, though their leases run.",
            "job",
        )
        self.step = gauge("step", "Newest step that workers on this node reported, of jobs whose workers do.", "job")
        self.gpus = gauge("gpus", "GPUs of this node, by whether work has them, may have them, or must not.", "state")
        self.preforked = gauge("preforked_workers", "Workers on this node that wait for the next start, by job.", "job")
        self.preforked_bytes = gauge(
            "preforked_bytes", "Memory that pre-forked workers on this node share with nobody.", "job"
        )
        self.verdicts = gauge(
            "gpu_verdicts",
            "Verdicts on this node's GPUs, and (without a GPU) on the node itself, in any stage. Always 1.",
            "gpu",
            "rule",
            "severity",
        )
        self.temperature = gauge(
            "gpu_temperature_celsius", "Temperature of each GPU, as the driver reported last.", "gpu"
        )
        self.snapshot_bytes = gauge("snapshot_bytes", "Memory that shims on this node keep for snapshots.", "job")

    def read(self, view: AgentView, cluster: Cluster) -> None:
        """``cluster`` is the view's."""
        self._read_gpus(view.node, cluster)
        self._read_health(view.health())
        self._read_pods(cluster, view.pods(), view.health().unreachable)
        if view.node_health is not None:
            self._read_node_health(view.node_health)

    def _read_gpus(self, node: str, cluster: Cluster) -> None:
        record = cluster.nodes.get(node)
        used = {
            device
            for job in cluster.jobs.values()
            if job.generation is not None and job.generation.state != "ended" and node in job.generation.members
            for device in job.generation.members[node].devices
        }
        gpus = record.facts.gpus if record is not None else ()
        states = ("unfit" if not gpu.healthy else "used" if gpu.uuid in used else "free" for gpu in gpus)
        _set(self.gpus, "state", GPU_STATES, Tally(states))

    def _read_health(self, health: AgentHealth) -> None:
        since = health.store_away_since
        self.joined.set(health.joined)
        self.margin.set(health.lease_left)
        self.away.set(0.0 if since is None else max(0.0, time.time() - since))
        self.failsafe.set(len(health.lent))
        self.failsafe_refused.set(len(health.not_lent))
        self.lag.set(health.loop_lag)

    def _read_node_health(self, node_health: NodeHealth) -> None:
        self.verdicts.clear()
        for verdict in node_health.monitor.verdicts:
            self.verdicts.labels(gpu=verdict.device, rule=verdict.rule, severity=verdict.severity).set(1)
        self.temperature.clear()
        for gpu in node_health.monitor.devices:
            if gpu.temperature is not None:
                self.temperature.labels(gpu=gpu.uuid).set(gpu.temperature)

    def _read_pods(
        self, cluster: Cluster, pods: Mapping[str, PodStatus], unreachable: Mapping[str, Mapping[str, float]]
    ) -> None:
        _set(self.pods, "phase", get_args(PodPhase), Tally(pod.phase for pod in pods.values()))
        self.stalled.set(sum(pod.stall is not None and pod.stall.suspects for pod in pods.values()))
        for gauge in (self.preforked, self.preforked_bytes, self.snapshot_bytes, self.unreachable, self.step):
            gauge.clear()
        for job in live_jobs(cluster):
            if (pod := pods.get(job.uid)) is not None:
                self.preforked.labels(job=job.name).set(len(pod.preforked))
                self.preforked_bytes.labels(job=job.name).set(sum(pod.preforked.values()))
                self.snapshot_bytes.labels(job=job.name).set(pod.snapshot_bytes)
                self.unreachable.labels(job=job.name).set(len(unreachable.get(job.uid, {})))
                if steps := [worker.step for worker in pod.workers if worker.step is not None]:
                    self.step.labels(job=job.name).set(max(steps))


def _gauge(registry: CollectorRegistry, name: str, help_text: str, *labels: str) -> Gauge:
    return Gauge(f"nodeagent_{name}", help_text, labels, registry=registry)


def repair_stages(cluster: Cluster) -> Tally[str]:
    """How many live nodes are how far on their way back to health; one may be counted in two."""
    live = [record.facts for record in cluster.nodes.values() if cluster.live(record.id)]
    found: Tally[str] = Tally(
        f.repair_state.claim.phase for f in live if f.repair_state is not None and f.repair_state.claim
    )
    found["probation"] = sum(any(v.bars and v.stage == "probation" for v in facts.health) for facts in live)
    return found


def live_jobs(cluster: Cluster) -> list[JobRecord]:
    """Those that have series of their own."""
    live = (job for job in cluster.jobs.values() if job.phase not in TERMINAL)
    return sorted(live, key=lambda job: job.order)[:MAX_JOBS]


def _set(gauge: Gauge, label: str, words: Iterable[str], counts: Mapping[str, int]) -> None:
    """Every word has its series, also at 0: an alert can tell none from unknown."""
    for word in words:
        gauge.labels(**{label: word}).set(counts.get(word, 0))
