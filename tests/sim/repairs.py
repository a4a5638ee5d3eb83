"""Nodes of the simulated cluster that repair themselves: the real decisions and their carrying out, over machines whose
reboot is a power cut and whose verify run always passes.

Keeps count of what must never happen: two nodes away at once, a repair with workers on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nodeagent.agent.repair import RepairBounds, Repairer
from nodeagent.agent.repaircommands import Ended, Started
from nodeagent.hardware.judging.judge import JudgeMemory, JudgePolicy, escalated, judge, repaired, verified
from nodeagent.hardware.readings import Readings
from nodeagent.model.health import Action, Attempt, RepairState, Verdict
from nodeagent.plan.repair import Means
from tests.sim.virtual import SimClock

if TYPE_CHECKING:
    from nodeagent.agent.loop import Agent
    from tests.sim.cluster import Node, SimCluster

PROBATION = 10.0
BOUNDS = RepairBounds(Means({"reboot": True}, per_day=3), deadline=120.0)


@dataclass
class Watch:
    """What all of them did."""

    away: set[str] = field(default_factory=set)
    reboots: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Repairs:
    """One node's: its ward, its disk and its hands at once."""

    def __init__(self, cluster: SimCluster, node: Node, watch: Watch) -> None:
        self._cluster, self._node, self._watch = cluster, node, watch
        self._memory, self._policy, self._clock = JudgeMemory(), JudgePolicy(probation=PROBATION), SimClock()
        self._attempts: tuple[Attempt, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._mender: Repairer | None = None
        node.repairs = self

    # --- the agent's life

    def begin(self) -> tuple[tuple[Verdict, ...], RepairState]:
        """What an agent that starts tells from its first join on."""
        self._mender = Repairer(
            self._node.name, self._boot, BOUNDS, self, self, self, self._clock, lambda _kind, _outcome: None
        )
        return self.verdicts, self._mender.repair_state

    def run(self, agent: Agent) -> None:
        assert self._mender is not None
        self._tasks = [
            self._cluster.tasks.create_task(self._look(agent)),
            self._cluster.tasks.create_task(self._repair(agent, self._mender)),
        ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _repair(self, agent: Agent, repairer: Repairer) -> None:
        await agent.joined.wait()
        await repairer.run(agent)

    async def _look(self, agent: Agent) -> None:
        """The health monitor, of whose probes nothing but the boot is left."""
        while True:
            before = self.verdicts
            readings = Readings(boot=self._boot)
            self._memory = judge(self._memory, readings, None, self._clock.wall(), 0.0, policy=self._policy)
            if self.verdicts != before:
                agent.advert.health({"health": self.verdicts})
            await asyncio.sleep(1.0)

    @property
    def _boot(self) -> str:
        return f"boot-{self._node.boots}"

    # --- the ward

    def fall_sick(self, ago: float) -> None:
        """A fault that only a reboot mends, found so many seconds ago."""
        at = self._clock.wall() - ago
        verdict = Verdict(
            rule="xid.79", severity="fatal", action="reboot", text="off the bus", since=at, seen=at, boot=self._boot
        )
        self._memory = JudgeMemory((*self.verdicts, verdict), repairs=self._memory.repairs)
        self._tell()

    def _tell(self) -> None:
        if self._node.agent is not None:
            self._node.agent.advert.health({"health": self.verdicts})

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self._memory.verdicts

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(v.device for v in self.verdicts if v.stage == "repaired")

    @property
    def processes(self) -> Mapping[str, Sequence[int]] | None:
        return None

    @property
    def strangers(self) -> frozenset[int]:
        return frozenset()

    @property
    def expected(self) -> frozenset[str]:
        return frozenset()

    def repaired(self, devices: Collection[str], action: Action) -> None:
        for device in devices:
            self._memory = repaired(self._memory, device, action, self._clock.wall())
        self._tell()

    def passed(self, devices: Collection[str]) -> None:
        self._memory = verified(self._memory, devices, self._clock.wall(), self._policy)
        self._tell()

    def escalate(self, keys: Collection[tuple[str, str]], why: str) -> None:
        self._watch.wrong.append(f"{self._node.name}: {why}")
        self._memory = escalated(self._memory, keys, self._clock.wall(), why)

    async def pause(self) -> None:
        raise AssertionError("no GPU is reset here")

    def resume(self) -> None:
        raise AssertionError("no GPU is reset here")

    # --- the disk

    def load(self) -> tuple[Attempt, ...]:
        return self._attempts

    async def save(self, attempts: Sequence[Attempt]) -> None:
        await asyncio.sleep(0.01)
        self._attempts = tuple(attempts)

    # --- the hands

    async def repair(self, attempt: Attempt, started: Started) -> Ended:
        name = self._node.name
        if self._watch.away:
            self._watch.wrong.append(f"{name} goes while {sorted(self._watch.away)} is away")
        if any(pod.alive for pod in self._node.machine.pods.values()):
            self._watch.wrong.append(f"{name} is rebooted under its workers")
        self._watch.reboots.append(name)
        self._watch.away.add(name)
        await started(1, 1)
        self._cluster.tasks.create_task(self._reboot())
        return Ended(0, "exit code 0")

    async def _reboot(self) -> None:
        await asyncio.sleep(self._cluster.rng.uniform(0.1, 3.0))
        await self._node.power_cut()
        await asyncio.sleep(self._cluster.rng.uniform(5.0, 30.0))
        self._node.power_on()
        self._watch.away.discard(self._node.name)

    async def verify(self, devices: Sequence[str]) -> Ended:
        await asyncio.sleep(1.0)
        return Ended(0, "exit code 0")

    async def outlived(self, attempt: Attempt, seconds: float) -> None:
        await asyncio.sleep(0.1)


def repairing(cluster: SimCluster) -> tuple[dict[str, Repairs], Watch]:
    """Every node repairs itself from its next start on."""
    watch = Watch()
    return {name: Repairs(cluster, node, watch) for name, node in cluster.nodes.items()}, watch
