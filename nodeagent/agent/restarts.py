"""Counts re-formed gangs for the metrics: each once in the cluster, also where agents are restarted meanwhile. Owns one
file; decides nothing and writes no store."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from nodeagent.agent.metrics import Metrics
from nodeagent.model.job import JobRecord, Spend
from nodeagent.osutil.linux import write_atomic

VERSION = 1
MAX_BYTES = 8 << 20
"""A file that is longer is none of ours."""


@dataclass(slots=True)
class _Tally:
    """Of one name of a job: the newest active generation that was looked at (numbers of a name only grow), and what
    this node has counted, by node at fault and kind of cause."""

    seen: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


class RestartCounter:
    """The agent of a gang's group rank 0 counts it: when it sees it active, or else later, from the record's history.

    ``path``: what was counted is kept there, and goes on from there; None: in memory alone."""

    def __init__(self, node: str, metrics: Metrics, path: Path | None = None) -> None:
        self._node, self._metrics, self._path = node, metrics, path
        self._log = structlog.get_logger("agent").bind(node=node)
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
        active, head = job.active, job.head
        assert active is not None
        before: Spend | None = None
        for number in sorted({*map(int, job.budget), active.number}):
            entry, ended = job.budget.get(str(number)), before
            before = entry
            if number <= seen:
                continue
            if head is not None and head.token == active and number == active.number:
                if job.restarts > 0 and head.ordered()[0].node == self._node:
                    yield head.cause.node, head.cause.kind
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
            with self._path.open("rb") as file:
                data = json.loads(file.read(MAX_BYTES))
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}, this agent reads {VERSION}")
            return {
                str(job): _Tally(int(seen), Counter({(str(node), str(cause)): int(n) for node, cause, n in counts}))
                for job, (seen, counts) in data["jobs"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = str(error) or type(error).__name__
            self._log.warning("restarts are counted anew from the jobs' records", file=os.fspath(self._path), why=why)
            return {}

    def _save(self) -> None:
        """Not forced to the disk: what a power cut takes is counted again from the record."""
        if self._path is None:
            return
        jobs = {
            job: [tally.seen, [[*key, count] for key, count in sorted(tally.counts.items())]]
            for job, tally in self._tallies.items()
            if tally.counts
        }
        try:
            write_atomic(self._path, json.dumps({"version": VERSION, "jobs": jobs}), durable=False)
        except OSError as error:
            why = "a restart of this agent may count them again, or not at all"
            self._log.warning("restarts are not kept", file=os.fspath(self._path), error=str(error), why=why)
