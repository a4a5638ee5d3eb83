"""Brings the health monitor into the agent: what of the machine it looks at, and what the others hear of it.

Judges nothing (``hardware/judging/``), and decides nothing (``plan/nodes/health.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TypedDict

from nodeagent.agent.repair import FileRepairLog, RepairBounds, Repairer
from nodeagent.agent.repaircommands import Commands
from nodeagent.hardware.discovery import asked_for_gpus, installed_slots
from nodeagent.hardware.judging.judge import JudgePolicy, offered_gpus
from nodeagent.hardware.monitor import Machine, Monitor, OwnWork
from nodeagent.hardware.plugins import installed
from nodeagent.model.health import LABEL, RepairState, Verdict
from nodeagent.model.node import Gpu, NodeFacts
from nodeagent.osutil.clock import Clock
from nodeagent.osutil.commands import SiteCheck
from nodeagent.osutil.linux import descends, in_container
from nodeagent.plan.repair import Means
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.healthconfig import HealthConfig

MOST_PROCESSES = 1024
"""The most processes on a node's GPUs of which it is found out whose they are."""


class Facts(TypedDict):
    """Those of a node's facts that follow from its health."""

    gpus: tuple[Gpu, ...]
    health: tuple[Verdict, ...]
    repair_state: RepairState | None


class PodWork(OwnWork):
    """What the pods run, and the agent itself: checks of the GPUs, for one."""

    def __init__(self, statuses: Callable[[], Mapping[str, PodStatus]]) -> None:
        self._statuses = statuses
        self._own_pids = in_container()
        """Pids of its own: the driver may list other numbers than /proc."""

    @property
    def working(self) -> bool:
        return self._own_pids and any(not status.quiet for status in self._statuses().values())

    def among(self, pids: Collection[int]) -> frozenset[int]:
        """They are looked up from the listed process to what a shim names, so that a shim which names thousands that
        are not there costs nothing, and takes no other pod's processes out of sight. Where there is no descriptor to
        look with, nobody is accused: it counts as ours."""
        roots = {os.getpid(), *(pid for status in self._statuses().values() for pid in status.pids)}

        def ours(pid: int) -> bool:
            try:
                return descends(pid, roots)
            except OSError:
                return True

        return frozenset(filter(ours, sorted(pids)[:MOST_PROCESSES]))


class NodeHealth:
    """Made once nobody else writes this node's memory of its health: with the lock in hand."""

    def __init__(
        self,
        config: AgentConfig,
        node: str,
        facts: NodeFacts,
        environ: Mapping[str, str],
        clock: Clock,
        own: OwnWork,
        *,
        changed: Callable[[], None],
        counted: Callable[[str, str], None],
    ) -> None:
        """``changed`` is called when ``facts`` are others, ``counted`` with each repair and what became of it."""
        health = config.health or HealthConfig()
        self._found = facts.gpus
        self._may_join = config.node.gpus == "auto"
        self.policy = JudgePolicy(health.probation, health.dry_run, health.ignore)
        self.monitor = Monitor(
            machine(config, health, facts), config.dirs.state, environ, clock,
            policy=self.policy, changed=changed, own=own,
            checked=bool(health.repair.commands()) and health.repair.verify is not None,
        )  # fmt: skip
        self.repairer = repairer(config, health, node, facts.boot_id, environ, self.monitor, clock, counted)
        """Repairs the node; None where no repair is configured."""

    def facts(self, held: Collection[str] = ()) -> Facts:
        """The facts that follow from the verdicts, as of now. ``held``: GPUs that are being checked by work."""
        monitor = self.monitor
        found = offered_gpus(self._found, monitor.last_gpus, monitor.published, self._may_join, held, monitor.unlisted)
        repair_state = self.repairer.repair_state if self.repairer is not None else None
        claim = repair_state.claim if repair_state is not None else None
        if claim is not None:
            aside = {"healthy": False, "why": f"is set aside for its repair ({LABEL[claim.kind]})"}
            found = tuple(
                gpu.model_copy(update=aside) if gpu.healthy and claim.takes(gpu.uuid) else gpu for gpu in found
            )
        return {"gpus": found, "health": monitor.published, "repair_state": repair_state}


def machine(config: AgentConfig, health: HealthConfig, facts: NodeFacts) -> Machine:
    """What there is to look at: the driver is asked where there is one, or where the config says so. What is in the
    slots stands for GPUs where no driver has listed any."""
    gpus = config.node.gpus
    named = None if gpus == "auto" else () if gpus == "none" else gpus
    interface = config.node.data_interface
    models = installed_slots() if gpus == "auto" else {}
    return Machine(
        boot=facts.boot_id, gpus=asked_for_gpus(config), configured=named, folders=health.folders,
        slots=() if facts.gpus else tuple(models), models=models,
        interfaces=(interface,) if interface else (), plugins=installed() if config.node.gpus == "auto" else (),
        checks=tuple(SiteCheck(name, c.command, c.every, c.bound) for name, c in health.checks.items()),
    )  # fmt: skip


def repairer(
    config: AgentConfig, health: HealthConfig, node: str, boot: str, environ: Mapping[str, str], monitor: Monitor,
    clock: Clock, counted: Callable[[str, str], None],
) -> Repairer | None:  # fmt: skip
    """What repairs the node, as far as there is a command for it."""
    repair = health.repair
    if not repair.commands():
        return None
    bounds = RepairBounds(Means(repair.whole(), repair.per_day), repair.deadline)
    runner = Commands(repair, node, config.dirs.logs / "repairs", environ)
    log = FileRepairLog(config.dirs.state / "repairs.json")
    return Repairer(node, boot, bounds, monitor, log, runner, clock, counted)
