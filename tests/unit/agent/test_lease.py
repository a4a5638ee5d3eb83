"""What a beat carries: usage goes along with pods, and is never a reason to send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from nodeagent.agent.identity import Identity
from nodeagent.agent.lease import PODS_REFRESH, Lease
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing
from nodeagent.model.usage import MachineUsage, PodUsage
from nodeagent.store.memory import MemoryServer, MemoryStore
from nodeagent.store.messages import Beat, BeatReply
from nodeagent.workers.base import PodHost
from tests.unit.ctl.samples import node

TIMING = Timing()


class Clock:
    """Stands still unless moved."""

    at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class Host:
    """Takes grants and forgets them."""

    def grant(self, until: float, seq: int) -> None:
        pass


class Recorder(MemoryStore):
    """Remembers the pods of each beat."""

    sent: list[tuple[PodState, ...] | None]

    async def beat(self, beat: Beat) -> BeatReply:
        self.sent.append(beat.pods)
        return await super().beat(beat)


def usage(memory: int) -> PodUsage:
    machine = MachineUsage(load=0, cpus=1, memory_used=1, memory_total=2)
    return PodUsage(memory=memory, processes=1, machine=machine)


async def test_usage_goes_along_when_pods_are_told(tmp_path: Path) -> None:
    clock = Clock()
    store = Recorder(MemoryServer(clock.now))
    store.sent = []
    parts: dict[str, Any] = {"host": cast(PodHost, Host()), "clock": clock, "identity": Identity(tmp_path, "b")}
    lease = Lease(
        "n1", node("n1").facts, TIMING, store=store, incarnation=Incarnation(life="x", start=1),
        snapshot=Snapshot(TIMING), metrics=Metrics(), **parts,
    )  # fmt: skip
    await lease.join()
    pod = PodState(uid="u", job="a", role="worker", node="n1", phase="running")
    lease.usage = {"u": usage(5)}
    lease.publish({}, (pod,))
    for memory in (6, 7):
        await lease.beat()
        clock.at += TIMING.heartbeat
        lease.usage = {"u": usage(memory)}
    clock.at += PODS_REFRESH
    await lease.beat()
    told = [None if pods is None else pods[0].usage for pods in store.sent]
    assert told == [usage(5), None, usage(7)]
    assert await store.pods("u") == (pod.model_copy(update={"usage": usage(7)}),)
