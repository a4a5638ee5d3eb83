"""The agent's metrics, on a registry of its own. Labels are bounded: states and phases are fixed words, jobs are those
that the cluster still has a record of.

Counters are raised where things happen; gauges are read from the view when somebody asks.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nodeagent import __version__
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, Phase

if TYPE_CHECKING:
    from nodeagent.agent.care import Care

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NODE_STATES = ("ready", "restarting", "cordoned", "draining", "silent", "lost", "left")
MAX_JOBS = 200
"""Most jobs that have series of their own; jobs beyond it are counted in ``nodeagent_jobs`` only."""


class Metrics:
    """Everything this agent counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.restarts = Counter(
            "nodeagent_restarts",
            "Gangs re-formed, by the node at fault and the kind of cause.",
            ["job", "node", "cause"],
            registry=self.registry,
        )
        self.store_errors = Counter(
            "nodeagent_store_errors", "Calls that the store did not answer.", registry=self.registry
        )
        self.store_roundtrip = Histogram(
            "nodeagent_store_roundtrip_seconds",
            "Time of one heartbeat's round trip to the store.",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
            registry=self.registry,
        )
        self.refused = Counter(
            "nodeagent_refused_signatures",
            "Jobs that this agent does not run since their record is not what was signed, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._recovery = Histogram(
            "nodeagent_recovery_seconds",
            "Phases of re-forming a gang, told by the agent of its group rank 0.",
            ["phase", "cause"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0),
            registry=self.registry,
        )
        self._jobs = Gauge("nodeagent_jobs", "Jobs with a record, by phase.", ["phase"], registry=self.registry)
        self._nodes = Gauge("nodeagent_nodes", "Nodes with a record, by state.", ["state"], registry=self.registry)
        self._generation = Gauge(
            "nodeagent_generation", "Newest generation of each live job.", ["job"], registry=self.registry
        )
        self._margin = Gauge(
            "nodeagent_lease_margin_seconds",
            "Time left of this node's own lease; workers that nobody lends time to are stopped at its end.",
            registry=self.registry,
        )
        self._away = Gauge(
            "nodeagent_store_away_seconds",
            "How long the store has not answered; 0 while it does.",
            registry=self.registry,
        )
        self._lent = Gauge(
            "nodeagent_lent_jobs",
            "Jobs whose workers on this node run on time that their keepers lend.",
            registry=self.registry,
        )
        self._verdicts = Gauge(
            "nodeagent_gpu_verdicts",
            "Verdicts on this node's GPUs, and (without a GPU) on the node itself, in any stage.",
            ["gpu", "rule", "severity"],
            registry=self.registry,
        )
        self._temperature = Gauge(
            "nodeagent_gpu_temperature_celsius", "As the driver told last.", ["gpu"], registry=self.registry
        )
        self._xids = Counter(
            "nodeagent_xids", "Xids of this node's GPUs, since this agent's start.", ["gpu", "xid"],
            registry=self.registry,
        )  # fmt: skip
        self._xids_seen: dict[tuple[str, int], int] = {}
        build = Gauge("nodeagent_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(version=__version__).set(1)

    def recovered(self, cause: str, phases: Mapping[str, float]) -> None:
        """The workers of a re-formed gang run."""
        for phase, seconds in phases.items():
            self._recovery.labels(phase=phase, cause=cause).observe(seconds)

    def page(self, view: AgentView) -> bytes:
        """The page that Prometheus reads, as of now."""
        from nodeagent.api.shapes import node_state  # brings aiohttp: not before the lease is safe

        cluster = view.cluster()
        phases = Tally(job.phase for job in cluster.jobs.values())
        for phase in get_args(Phase):
            self._jobs.labels(phase=phase).set(phases[phase])
        states = Tally(node_state(node, cluster)[0] for node in cluster.nodes.values())
        for state in NODE_STATES:
            self._nodes.labels(state=state).set(states[state])
        self._generation.clear()
        live = (j for j in cluster.jobs.values() if j.phase not in TERMINAL and j.head is not None)
        for job in sorted(live, key=lambda j: j.order)[:MAX_JOBS]:
            self._generation.labels(job=job.name).set(job.head.number if job.head else 0)
        self._forget({job.name for job in cluster.jobs.values()})
        health = view.health()
        since = health.store_away_since
        self._margin.set(health.lease_left)
        self._away.set(0.0 if since is None else max(0.0, time.time() - since))
        self._lent.set(len(health.lent))
        if view.care is not None:
            self._look_after(view.care)
        return generate_latest(self.registry)

    def _look_after(self, care: Care) -> None:
        self._verdicts.clear()
        for verdict in care.monitor.verdicts:
            self._verdicts.labels(gpu=verdict.device, rule=verdict.rule, severity=verdict.severity).set(1)
        self._temperature.clear()
        for gpu in care.monitor.gpus or ():
            if gpu.temperature is not None:
                self._temperature.labels(gpu=gpu.uuid).set(gpu.temperature)
        for (device, code), count in care.monitor.xids.items():
            self._xids.labels(gpu=device, xid=code).inc(count - self._xids_seen.get((device, code), 0))
            self._xids_seen[device, code] = count

    def _forget(self, jobs: set[str]) -> None:
        """Drop the series of jobs whose record is gone."""
        for metric in self.restarts.collect():
            for job, node, cause in {(s.labels["job"], s.labels["node"], s.labels["cause"]) for s in metric.samples}:
                if job not in jobs:
                    self.restarts.remove(job, node, cause)
