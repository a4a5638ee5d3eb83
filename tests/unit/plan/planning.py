"""What a node plans for its pods, asked as ``agent/rounds.py`` asks for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nodeagent.model.node import Incarnation
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.pods.actions import PodAction
from nodeagent.plan.pods.pod import plan_pods
from nodeagent.plan.queueing.heldback import line
from nodeagent.plan.queueing.queue import next_up
from nodeagent.pods.base import PodStatus


def plan_node(
    cluster: Cluster,
    node: str,
    incarnation: Incarnation,
    statuses: Mapping[str, PodStatus],
    standbys: int,
    lent: Collection[str] = (),
) -> tuple[PodAction, ...]:
    """``lent``: as of ``plan_pods``. What is decided about a pod may raise."""
    up = next_up(cluster, line(cluster)).up
    return plan_pods(cluster, node, incarnation, statuses, standbys, lent, up, lambda _uid, find: find())
