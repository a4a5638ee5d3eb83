"""The agent's side of the checks by work: one run at a time, in a process of its own, and what came of the last;
and the checks that a node passes before it takes part in a gang.

Must never import torch, judge a figure, or wait without a bound.

Must never hold up a gang that the node is in already, and never take "could not be checked" for "passed".
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from nodeagent import hardware_missing
from nodeagent.model.health import Figure
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.osutil.clock import Clock
from nodeagent.osutil.commands import end
from nodeagent.osutil.untrusted import UntrustedError, aside
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.devices import booked, used_devices
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.errors import CheckError
from nodeagent.spec.healthconfig import HealthConfig, PreflightConfig

if TYPE_CHECKING:
    from nodeagent.agent.health import NodeHealth

Report = dict[str, Any]
STEPS = 16
"""How many bounds of one check a whole run may take: the lock, the driver, the start (4), four checks, the collective
(2), and room for them to end."""
ROOT = Path(__file__).parents[2]


class Diagnosis:
    """``changed`` is called when ``figures`` or ``held`` are others."""

    def __init__(
        self,
        config: AgentConfig,
        environ: Mapping[str, str],
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._config, self._clock, self._changed = config, clock, changed
        self._bound = (config.health or HealthConfig()).diag.bound
        self._environ = {**environ, "PYTHONPATH": str(ROOT)}
        self._log = structlog.get_logger("diag")
        self._task: asyncio.Task[Report] | None = None
        self.request = ""
        """Of the newest run: its id, and which checks it asked for."""
        self.step, self.began, self.ended = "", 0.0, 0.0
        """Of the newest run: what it does; Unix times."""
        self.report: Report | None = None
        """Of the newest run, once it has ended."""
        self.whole = False
        """The newest run was of all that this node has free."""
        self.held: frozenset[str] = frozenset()
        """GPUs that are being checked, and so not given to anybody."""
        self.figures = self._remembered()

    @property
    def running(self) -> bool:
        return self._task is not None and not self.ended

    def facts(self, node_health: NodeHealth | None) -> dict[str, object]:
        """Those of the node's facts that follow from its figures and its health."""
        found: dict[str, object] = {"figures": self.figures}
        return found | node_health.facts(self.held) if node_health is not None else found

    def start(
        self, gpus: Collection[str], used: Collection[str], busy: Literal["refuse", "skip", "check"],
        peers: Iterable[NodeRecord], request: str = "", *, whole: bool, bound: float | None = None,
    ) -> asyncio.Task[Report]:  # fmt: skip
        """Begin a run on these GPUs (none: the CPU); ``used`` are those of them that jobs have. ``whole``: all that
        could be checked is; ``bound``: seconds for all of it. Not while one is running."""
        assert not self.running
        from nodeagent.diag.command import make_order

        figures = [figure for node in peers for figure in node.facts.figures]
        order = make_order(self._config, sorted(gpus), busy, figures)
        self.request, self.step, self.report, self.whole = request, "start", None, whole
        self.began, self.ended = self._clock.wall(), 0.0
        self.held = frozenset(gpus) - frozenset(used)
        self._changed()
        self._task = asyncio.create_task(self._run(order.to_json(), bound or STEPS * self._bound))
        return self._task

    async def _run(self, order: str, bound: float) -> Report:
        try:
            self.report = await self._work(order, bound)
        except OSError as error:
            self.report = could_not(f"the checks cannot be started: {error.strerror}")
        finally:
            self.ended, self.held = self._clock.wall(), frozenset()
            self._changed()
        report = self.report
        await self._recall()
        bad = [f"{c['name']} {c['gpu']}: {c['why']}" for c in report["checks"] if not c["passed"]]
        log = self._log.info if report["passed"] else self._log.warning
        log("checked by work", passed=report["passed"], failed=bad, problem=report["problem"])
        return report

    async def _work(self, order: str, bound: float) -> Report:
        """Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "nodeagent.diag.order", env=self._environ, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        found: Report | None = None
        try:
            async with asyncio.timeout(bound):
                process.stdin.write(order.encode())
                process.stdin.close()
                async for text in process.stdout:
                    line = json.loads(text)
                    if "step" in line:
                        self.step = str(line["step"])
                    else:
                        found = line
        except TimeoutError:
            return could_not(f"the checks did not end within {bound:g} s (at: {self.step})")
        except (ConnectionError, ValueError) as error:
            return could_not(f"the checks broke off: {error}")
        finally:
            await end(process)
        return found if found is not None else could_not(f"the process of the checks died (at: {self.step})")

    async def _recall(self) -> None:
        try:
            self.figures = await aside(self._remembered)
        except UntrustedError as error:
            self._log.warning("the results are not known to other nodes", why=str(error))
        else:
            self._changed()

    def _remembered(self) -> tuple[Figure, ...]:
        """Blocking."""
        from nodeagent.diag import history

        file = self._config.dirs.state / history.FILE
        try:
            return history.figures(history.load(file))
        except (OSError, ValueError) as error:
            self._log.warning("earlier results are not known", why=str(error))
            return ()


def could_not(why: str) -> Report:
    """The report of a run that did not come about."""
    return {"passed": False, "checks": [], "notes": [], "problem": why}


AGAIN = 300.0
"""Seconds after which a node that did not pass is checked again by itself."""


class Preflight:
    """One node's. A run that passed counts for every job and every user."""

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
        used = used_devices(booked(cluster), self._node, by_others_than="") | record.facts.held.keys()
        gpus = [gpu.uuid for gpu in record.facts.gpus if gpu.healthy]
        free = [uuid for uuid in gpus if uuid not in used]
        if gpus and not free:
            return Readiness(state="preparing", reason="preflight waits: every GPU is in use")
        others = [other for other in cluster.nodes.values() if other.id != self._node]
        self._diagnosis.start(free, (), "skip", others, bound=self._config.bound, whole=True)
        return Readiness(state="preparing", reason="preflight: start")


def preflight(config: AgentConfig, node: str, diagnosis: Diagnosis, clock: Clock) -> Preflight | None:
    """As the config asks for it; None where it asks for none. Raises CheckError where it asks for what is not there."""
    if config.health is None or config.health.preflight is None:
        return None
    if missing := hardware_missing():
        raise CheckError(f"health.preflight cannot be done: {missing}", "take it out, or install all of nodeagent")
    return Preflight(config.health.preflight, node, diagnosis, clock)


def _member(job: JobRecord, node: str) -> bool:
    """The gang that the node belongs to must not wait for a check when it re-forms."""
    return job.generation is not None and node in job.generation.members
