"""The lease: what a beat carries (usage goes along with pods, and is never a reason to send them), and when an id that
another life holds is given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from nodeagent.agent.identity import Identity
from nodeagent.agent.lease import PODS_REFRESH, REFUSED_LIMIT, IdTakenError, Lease
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.node import Incarnation, NodeFacts
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing
from nodeagent.model.usage import MachineUsage, PodUsage
from nodeagent.store.base import Store, StoreRefusedError, StoreUnavailableError
from nodeagent.store.memory import MemoryServer, MemoryStore
from nodeagent.store.messages import Beat, BeatReply, JoinReply
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


def make_lease(folder: Path, clock: Clock, store: Store, life: str, metrics: Metrics | None = None) -> Lease:
    parts: dict[str, Any] = {"host": cast(PodHost, Host()), "clock": clock, "identity": Identity(folder, "b")}
    return Lease(
        "n1", node("n1").facts, TIMING, store=store, incarnation=Incarnation(life=life, start=1),
        snapshot=Snapshot(TIMING), metrics=metrics or Metrics(), **parts,
    )  # fmt: skip


class Away(MemoryStore):
    """Answers joins unless it is away."""

    away = False

    async def join(self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing) -> JoinReply:
        if self.away:
            raise StoreUnavailableError("away")
        return await super().join(node, incarnation, facts, timing)


@pytest.mark.parametrize("away", [False, True])
async def test_an_id_is_given_up_when_its_holder_renews_not_when_the_store_was_away(tmp_path: Path, away: bool) -> None:
    clock = Clock()
    server = MemoryServer(clock.now)
    other, store = make_lease(tmp_path / "a", clock, MemoryStore(server), "a"), Away(server)
    lease = make_lease(tmp_path / "b", clock, store, "b")
    await other.join()
    for _ in range(int(TIMING.lease * REFUSED_LIMIT / TIMING.heartbeat) + 1):
        with pytest.raises(StoreRefusedError, match="is held by an agent"):
            await lease.join()
        clock.at += TIMING.heartbeat
        await other.beat()
    if away:
        store.away = True
        with pytest.raises(StoreUnavailableError):
            await lease.join()
        store.away = False
    with pytest.raises(StoreRefusedError if away else IdTakenError):
        await lease.join()


async def test_usage_goes_along_when_pods_are_told(tmp_path: Path) -> None:
    clock = Clock()
    store = Recorder(MemoryServer(clock.now))
    store.sent = []
    lease = make_lease(tmp_path, clock, store, "x")
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


async def test_how_old_the_lease_was_is_measured_at_each_renewal_but_the_first(tmp_path: Path) -> None:
    clock = Clock()
    metrics = Metrics()
    lease = make_lease(tmp_path, clock, MemoryStore(MemoryServer(clock.now)), "x", metrics)
    await lease.join()
    for pause in (0.5, 1.75, 0.0):
        await lease.beat()
        clock.at += pause
    read = metrics.registry.get_sample_value
    assert read("nodeagent_lease_age_seconds_count") == 2
    assert read("nodeagent_lease_age_seconds_sum") == 2.25
    assert read("nodeagent_lease_age_seconds_bucket", {"le": "1.5"}) == 1
