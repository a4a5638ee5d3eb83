"""The agent's counters, on a registry of its own. Labels are bounded: states and phases are fixed words. Re-formed
gangs are counted once in the cluster, also where agents are restarted meanwhile.

Counters and histograms are raised where things happen. What is so now is read when somebody asks, with the page that
shows it all (``gauges.py``).
"""

from __future__ import annotations

import collections
import json
import os
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from nodeagent.agent.stopwatch import STEPPED
from nodeagent.agent.undecided import Guarded
from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.world import CauseKind
from nodeagent.osutil.linux import open_plain, write_atomic
from nodeagent.osutil.threads import Newest
from nodeagent.plan.cluster import Cluster, RefusalKind
from nodeagent.plan.fairshare.resources import used
from nodeagent.plan.fairshare.usage import add, since_written
from nodeagent.plan.nodes.devices import booked

MAX_SERIES = 100
"""Queues and users that have series of their own, by kind of device; all others are ``others`` together."""

Whose = tuple[str, str, str]
"""Kind of device, queue and user."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a job had on this node when it was last looked at."""

    whose: Whose
    devices: int
    part: float
    """Of all its devices of this kind."""
    wasted: tuple[int, int]
    """Milliseconds of all of these that faults had cost it, and that were overhead."""


class DeviceTime:
    """For how long jobs had this node's devices, and how much of that was lost or overhead. The class of a node is
    ``spot`` if it may be taken away, else ``regular``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = "device", "queue", "user", "class"
        self.seconds = Counter(
            "nodeagent_device_seconds",
            "Time for which jobs had devices of this node, summed over the devices, since this agent's start.",
            labels,
            registry=registry,
        )
        self.lost = Counter(
            "nodeagent_lost_device_seconds",
            "Of that, what faults cost: each node bears its part of a job's loss.",
            labels,
            registry=registry,
        )
        self.overhead = Counter(
            "nodeagent_overhead_device_seconds",
            "Of that, what starts, planned changes and ends took, likewise.",
            labels,
            registry=registry,
        )
        self._served: int | None = None
        self._held: Mapping[tuple[str, str], _Share] = {}
        """By job (uid) and kind of device, as of then."""
        self._known: set[Whose] = set()

    def count(self, cluster: Cluster, node: str) -> None:
        """What was held when this was last counted was held until now: to be called with each change, and before
        somebody reads it. Of what a fault cost a job, and of its overhead, each of its nodes bears the part that it has
        of the job's devices."""
        if self._served is not None and cluster.served > self._served:
            class_ = "spot" if node in cluster.nodes and cluster.nodes[node].facts.spot else "regular"
            for (uid, kind), share in self._held.items():
                labels = (*self._series(share.whose), class_)
                self.seconds.labels(*labels).inc(share.devices * (cluster.served - self._served) / 1000)
                job = cluster.jobs.get(uid)
                now = share.wasted if job is None else _wasted(job, kind, cluster.served)
                for counter, ms, before in zip((self.lost, self.overhead), now, share.wasted, strict=True):
                    counter.labels(*labels).inc(max(0.0, (ms - before) * share.part / 1000))
        self._served = max(cluster.served, self._served or 0)
        self._held = _held(cluster, node)

    def _series(self, whose: Whose) -> Whose:
        if whose not in self._known and len(self._known) >= MAX_SERIES:
            return whose[0], "others", "others"
        self._known.add(whose)
        return whose


def _held(cluster: Cluster, node: str) -> dict[tuple[str, str], _Share]:
    counts: Tally[tuple[str, str]] = Tally()
    for uid, device in {(uid, device) for uid, devices in booked(cluster).get(node, ()) for device in devices}:
        counts[uid, "slot" if device.startswith("cpu") else "gpu"] += 1
    found: dict[tuple[str, str], _Share] = {}
    for (uid, kind), devices in counts.items():
        job, all_of = cluster.jobs[uid], used(cluster)[uid]
        whose = kind, queue_of(job.spec.queue), job.spec.submitter.user
        part = devices / (all_of.slots if kind == "slot" else all_of.gpus)
        found[uid, kind] = _Share(whose, devices, part, _wasted(job, kind, cluster.served))
    return found


def _wasted(job: JobRecord, kind: str, served: int) -> tuple[int, int]:
    """Milliseconds of its devices of this kind that faults cost the job up to then, and that were overhead."""
    use = add((*job.used.values(), *since_written(job, served, 0).values()))
    return (use.lost_slot_ms, use.overhead_slot_ms) if kind == "slot" else (use.lost_gpu_ms, use.overhead_gpu_ms)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter and histogram, which nobody reads


class Metrics:
    """Everything that this agent counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.restarts = Counter(
            "nodeagent_restarts",
            "Gangs re-formed, by the node at fault and the kind of cause; reported by the agent of group rank 0.",
            ["job", "node", "cause"],
            registry=self.registry,
        )
        self.store_errors = Counter(
            "nodeagent_store_errors", "Heartbeats and joins that the store did not answer.", registry=self.registry
        )
        self.store_roundtrip = Histogram(
            "nodeagent_store_roundtrip_seconds",
            "Time of one heartbeat's round trip to the store.",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
            registry=self.registry,
        )
        self.lease_age = Histogram(
            "nodeagent_lease_age_seconds",
            "How old the lease was at each heartbeat; workers are stopped at the fence (2.2 s by default).",
            buckets=(0.25, 0.55, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.2, 3.0),
            registry=self.registry,
        )
        self.heartbeat_late = Histogram(
            "nodeagent_heartbeat_late_seconds",
            "How late each heartbeat was: the machine, or the agent, was too busy.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0),
            registry=self.registry,
        )
        self.refused = Counter(
            "nodeagent_refused_signatures",
            "Refusals to run a job, since its record is not what was signed, by reason.",
            ["reason"],
            registry=self.registry,
        )
        for reason in get_args(RefusalKind):
            self.refused.labels(reason=reason)  # from 0 on, so that the first one shows as an increase
        self._undecided = Counter(
            "nodeagent_undecided",
            "Decisions about one job that failed by a defect of nodeagent, each place in the code once for each job; "
            "the job is left as it is, and the agent's log has the traceback.",
            ["decision"],
            registry=self.registry,
        )
        for decision in get_args(Guarded):
            self._undecided.labels(decision=decision)  # from 0 on, as above
        self.save_seconds = Histogram(
            "nodeagent_save_seconds",
            "Time of writing the jobs to this node's disk, fsync included.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
            registry=self.registry,
        )
        self.save_errors = Counter(
            "nodeagent_save_errors", "Times that the jobs could not be written to this node's disk.",
            registry=self.registry,
        )  # fmt: skip
        self._recovery = Histogram(
            "nodeagent_recovery_seconds",
            "Phases of re-forming a gang, reported by the agent of its group rank 0.",
            ["phase", "cause"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0),
            registry=self.registry,
        )
        self._standstill = Counter(
            "nodeagent_standstill_seconds",
            "Downtime of each job while it was re-formed, by cause; reported by the agent of its group rank 0.",
            ["job", "cause"],
            registry=self.registry,
        )
        self._repairs = Counter(
            "nodeagent_repairs",
            "Repairs and verify runs of this node, since this agent's start, by what became of them.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.devices = DeviceTime(self.registry)
        self._xids = Counter(
            "nodeagent_xids", "Xids of this node's GPUs, since this agent's start.", ["gpu", "xid"],
            registry=self.registry,
        )  # fmt: skip
        self._xids_seen: dict[tuple[str, int], int] = {}

    def recovered(self, job: str, cause: str, phases: Mapping[str, float]) -> None:
        """The workers of a re-formed gang run."""
        self._standstill.labels(job=job, cause=cause).inc(phases["whole"])
        for phase, seconds in phases.items():
            if phase != STEPPED:
                self._recovery.labels(phase=phase, cause=cause).observe(seconds)

    def stepped(self, cause: str, phases: Mapping[str, float]) -> None:
        """They made their first step, as far as they tell it."""
        if STEPPED in phases:
            self._recovery.labels(phase=STEPPED, cause=cause).observe(phases[STEPPED])

    def repaired(self, kind: str, outcome: str) -> None:
        """A repair, or a verify run, is over."""
        self._repairs.labels(kind=kind, outcome=outcome).inc()

    def left_undecided(self, decision: Guarded) -> None:
        """A decision failed by a defect of nodeagent."""
        self._undecided.labels(decision=decision).inc()

    def catch_up(self, cluster: Cluster, node: str, here: Iterable[str], xids: Mapping[tuple[str, int], int]) -> None:
        """Before it is read: count what was counted elsewhere, or goes on. ``here``: names of live jobs with a pod on
        this node; ``xids``: how many of each code each GPU has had."""
        self.devices.count(cluster, node)
        for job in here:
            for cause in get_args(CauseKind):  # from 0 on, so that the first one shows as an increase
                self._standstill.labels(job=job, cause=cause)
        self._forget({job.name for job in cluster.jobs.values()})
        for (device, code), count in xids.items():
            self._xids.labels(gpu=device, xid=code).inc(count - self._xids_seen.get((device, code), 0))
            self._xids_seen[device, code] = count

    def _forget(self, jobs: set[str]) -> None:
        """Drop the series of jobs whose record is gone. Those of restarts are their counter's."""
        for metric in self._standstill.collect():
            for job, cause in {(s.labels["job"], s.labels["cause"]) for s in metric.samples}:
                if job not in jobs:
                    self._standstill.remove(job, cause)


VERSION = 1
MAX_BYTES = 8 << 20
"""A file that is longer is none of ours."""


@dataclass(slots=True)
class _Tally:
    """Of one name of a job: the newest active generation that was looked at (numbers of a name only grow), and what
    this node has counted, by node at fault and kind of cause."""

    seen: int = 0
    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)


class RestartCounter:
    """The agent of a gang's group rank 0 counts it: when it sees it active, or else later, from the record's history.

    ``path``: what was counted is kept there, and goes on from there; None: in memory alone."""

    def __init__(self, node: str, metrics: Metrics, path: Path | None = None) -> None:
        self._node, self._metrics, self._path = node, metrics, path
        self._log = structlog.get_logger("agent").bind(node=node)
        self._file = Newest(self._write, "restarts")
        self._tallies = self._load()
        for job, tally in self._tallies.items():
            for (blamed, cause), count in tally.counts.items():
                metrics.restarts.labels(job=job, node=blamed, cause=cause).inc(count)

    def look(self, jobs: Mapping[str, JobRecord]) -> None:
        """Count what is new in a whole view, and drop the series of jobs whose record is gone."""
        changed = self._drop({job.name for job in jobs.values()})
        for job in jobs.values():
            if job.active is None:
                continue
            tally = self._tallies.setdefault(job.name, _Tally())
            if tally.seen >= job.active.number:
                continue
            for blamed, cause in self._missed(job, tally.seen):
                tally.counts[blamed, cause] += 1
                self._metrics.restarts.labels(job=job.name, node=blamed, cause=cause).inc()
                changed = True
            tally.seen = job.active.number
        if changed:
            self._save()

    def _missed(self, job: JobRecord, seen: int) -> Iterator[tuple[str, str]]:
        """Node at fault and kind of cause of the generations after ``seen`` that are this node's to count."""
        active, generation = job.active, job.generation
        assert active is not None
        before: BudgetEntry | None = None
        for number in sorted({*map(int, job.budget), active.number}):
            entry, ended = job.budget.get(str(number)), before
            before = entry
            if number <= seen:
                continue
            if generation is not None and generation.token == active and number == active.number:
                if job.restarts > 0 and generation.ordered()[0].node == self._node:
                    yield generation.cause.node, generation.cause.kind
            elif ended is not None and entry is not None and entry.counted_by == self._node:
                yield ended.node, ended.kind

    def _drop(self, names: set[str]) -> bool:
        gone = [job for job in self._tallies if job not in names]
        for job in gone:
            for blamed, cause in self._tallies.pop(job).counts:
                self._metrics.restarts.remove(job, blamed, cause)
        return bool(gone)

    def _load(self) -> dict[str, _Tally]:
        if self._path is None:
            return {}
        try:
            with open_plain(self._path) as file:
                data = json.loads(file.read(MAX_BYTES))
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}, this agent reads {VERSION}")
            return {
                str(job): _Tally(
                    int(seen), collections.Counter({(str(node), str(cause)): int(n) for node, cause, n in counts})
                )
                for job, (seen, counts) in data["jobs"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = str(error) or type(error).__name__
            self._log.warning("restarts are counted anew from the jobs' records", file=os.fspath(self._path), why=why)
            return {}

    def _save(self) -> None:
        """Beside the loop, as the disk may hang."""
        if self._path is None:
            return
        jobs = {
            job: [tally.seen, [[*key, count] for key, count in sorted(tally.counts.items())]]
            for job, tally in self._tallies.items()
            if tally.counts
        }
        try:
            self._file.put(json.dumps({"version": VERSION, "jobs": jobs}))
        except OSError as error:
            self._warn(error)

    def _write(self, text: str) -> None:
        """Blocking. Not forced to the disk: what a power cut takes is counted again from the record."""
        assert self._path is not None
        try:
            write_atomic(self._path, text, durable=False)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        why = "a restart of this agent may count them again, or not at all"
        self._log.warning("restarts are not kept", file=str(self._path), error=str(error), why=why)
