"""Of a job's pods: which belong to its gang and which are spare, what is known of one that nothing is published of, and
on whose time workers run while the store is unreachable. Pure; ``serializers.py`` gives it its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from nodeagent.agent.view import AgentHealth
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.pod import PodState
from nodeagent.model.world import PodReport
from nodeagent.plan.cluster import Cluster
from nodeagent.pods.base import PodStatus


class WorkersTime(NamedTuple):
    """On whose time a job's workers on one node run."""

    state: Literal["lent", "lease", "refused", "stopped", "elsewhere"]
    """``lent`` time, or their node's own ``lease``. Or: they get none and stop soon (``refused``), they are
    ``stopped``, or they are ``elsewhere``."""
    node: str
    left: float
    """Seconds."""
    why: str
    """No failsafe member lends them time."""


def workers_time(job: JobRecord, node: str, health: AgentHealth, pod: PodStatus | None) -> WorkersTime | None:
    """Of this ``node``. None while the store answers, and for a job that does not train."""
    generation = job.generation
    if health.store_away_since is None or job.phase in TERMINAL or generation is None or generation.state != "active":
        return None
    lent, why = health.lent.get(job.uid, 0.0), health.not_lent.get(job.uid, "")
    if node not in generation.members:
        return WorkersTime("elsewhere", node, 0.0, why)
    if pod is None or pod.quiet:
        return WorkersTime("stopped", node, 0.0, why)
    return WorkersTime("refused" if why else "lent" if lent else "lease", node, max(lent, health.lease_left), why)


def beside_the_gang(
    job: JobRecord, cluster: Cluster, published: Mapping[str, PodState]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(nodes that left the gang and are still stopping, spares that are ready), of those that publish a pod. Any other
    published it before it left the gang, and the store keeps it until it expires: nothing runs there."""
    generation = job.generation
    members = generation.members if generation is not None else {}
    holders = generation.holders if generation is not None else {}
    others = [node for node in sorted(published) if node not in members]
    quiet = {node for node in others if all(worker.state == "exited" for worker in published[node].workers)}
    spares = tuple(node for node in others if node not in holders and node in quiet and cluster.live(node))
    return tuple(node for node in others if node in holders), spares


def unpublished(node: str, report: PodReport | None, *, over: bool, live: bool, asked: bool) -> tuple[str, str]:
    """The phase of a member's pod, and why, where the node publishes none of this generation. ``over``: the generation
    has ended; ``asked``: the store was asked, and has none."""
    if over or (report is not None and report.state != "running"):
        return "exited", "" if report is None else report.reason
    if not live:
        return "gone", f"node {node} is silent"
    return ("preparing", "") if asked else ("unknown", "the store does not answer")
