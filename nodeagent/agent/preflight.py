"""Checks by work before a node takes part in a gang: until they pass, the node is not ready for any job it is no member
of. Where the config asks for it (``health.preflight``).

Must never hold up a gang that the node is in already, and never take "could not be checked" for "passed".
"""

from __future__ import annotations

from collections.abc import Callable

from nodeagent.agent.clock import Clock
from nodeagent.agent.diagnosis import Diagnosis
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Readiness
from nodeagent.plan.bookings import booked, used_devices
from nodeagent.plan.cluster import Cluster
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.healthconfig import PreflightConfig

AGAIN = 300.0
"""Seconds after which a node that did not pass is checked again by itself."""


class Preflight:
    """One node's. A run that passed counts for every job, whoever asked for it."""

    def __init__(self, config: PreflightConfig, node: str, diagnosis: Diagnosis, clock: Clock) -> None:
        self._config, self._node, self._diagnosis, self._clock = config, node, diagnosis, clock

    def amend(self, readiness: dict[str, Readiness], cluster: Cluster) -> dict[str, Readiness]:
        """Readiness by job uid, as it is with the checks in it. Begins a run when one is due."""
        waiting = [uid for uid, one in readiness.items() if one.state == "ready" and not self._inside(cluster, uid)]
        if not waiting:
            return readiness
        verdict = self._verdict(cluster)
        if verdict is None:
            return readiness
        return readiness | {uid: verdict.model_copy(update={"folder": readiness[uid].folder}) for uid in waiting}

    def _inside(self, cluster: Cluster, uid: str) -> bool:
        job = cluster.jobs.get(uid)
        return job is not None and _member(job, self._node)

    def _verdict(self, cluster: Cluster) -> Readiness | None:
        """What stands between this node and a gang now; None: nothing."""
        diagnosis = self._diagnosis
        if diagnosis.running:
            return Readiness(state="preparing", reason=f"preflight: {diagnosis.step}")
        age = self._clock.wall() - diagnosis.ended
        report = diagnosis.report if diagnosis.whole and age >= 0 else None
        if report is not None and report["passed"] and age < self._config.reuse:
            return None
        if report is not None and not report["passed"] and age < AGAIN:
            bad = [f"{c['name']} {c['gpu']}".strip() + f": {c['why']}" for c in report["checks"] if not c["passed"]]
            return Readiness(state="unfit", reason="preflight failed: " + (report["problem"] or "; ".join(bad[:4])))
        return self._start(cluster)

    def _start(self, cluster: Cluster) -> Readiness:
        record = cluster.nodes.get(self._node)
        if record is None:
            return Readiness(state="preparing", reason="preflight: this node's record has not been read yet")
        used = used_devices(booked(cluster), self._node, by_others_than="")
        gpus = [gpu.uuid for gpu in record.facts.gpus if gpu.healthy]
        free = [uuid for uuid in gpus if uuid not in used]
        if gpus and not free:
            return Readiness(state="preparing", reason="preflight waits: every GPU is in use")
        others = [other for other in cluster.nodes.values() if other.id != self._node]
        self._diagnosis.start(free, (), "skip", others, bound=self._config.bound, whole=True)
        return Readiness(state="preparing", reason="preflight: start")


def preflight(
    config: AgentConfig, node: str, diagnosis: Diagnosis, clock: Clock
) -> Callable[[dict[str, Readiness], Cluster], dict[str, Readiness]]:
    """Readiness as it is with the checks in it; as it was where the config asks for none."""
    if config.health is None or config.health.preflight is None:
        return lambda readiness, _cluster: readiness
    return Preflight(config.health.preflight, node, diagnosis, clock).amend


def _member(job: JobRecord, node: str) -> bool:
    """The gang that the node belongs to must not wait for a check when it re-forms."""
    return job.head is not None and node in job.head.members
