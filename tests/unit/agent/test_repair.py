"""One node's repairs from the claim on: what is written down first, what ends it, what a restart makes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from nodeagent.agent.repair import AGAIN, SETTLE, RepairBounds, Repairer
from nodeagent.agent.repaircommands import FAILED, MOST_TRIES, Ended, Started
from nodeagent.model.health import Action, Attempt, Kind, RepairState, Verdict
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.repair import Means
from nodeagent.pods.base import PodStatus
from nodeagent.store.base import StoreUnavailableError
from tests.sim.virtual import SimClock, run_virtual
from tests.unit.plan.build import make_cluster, make_node, verdict

GPU = "GPU-n1-0"
DEADLINE = 60.0
MEANS = Means({"reset_gpu": False, "reboot": True, "service": False}, per_day=5)


class World:
    """Ward, disk, hands and agent of one node, and what was asked of each."""

    def __init__(self, *past: Attempt, boot: str = "b") -> None:
        self.clock, self.boot = SimClock(), boot
        self.verdicts: tuple[Verdict, ...] = ()
        self.waiting: frozenset[str] = frozenset()
        self.processes: Mapping[str, Sequence[int]] | None = {}
        self.strangers: frozenset[int] = frozenset()
        self.expected = frozenset({GPU, "GPU-n1-1"})
        self.did: list[str] = []
        self.disk: tuple[Attempt, ...] = past
        self.full = self.unreadable = False
        self.codes: list[int | None] = []
        """How the next commands end; 0 beyond them."""
        self.takes = 1.0
        self.away = False
        self.settled = True
        self.counted: Counter[tuple[str, str]] = Counter()
        self.notes: list[str] = []
        self.node = make_node("n1", gpus=2)
        self.repairer = self.another()

    def another(self) -> Repairer:
        """An agent that starts."""
        self.repairer = Repairer(
            "n1", self.boot, RepairBounds(MEANS, DEADLINE), self, self, self, self.clock,
            lambda kind, outcome: self.counted.update([(kind, outcome)]),
        )  # fmt: skip
        self.publish_repair(self.repairer.repair_state)
        return self.repairer

    def find(self, action: Action, rule: str = "xid.95", device: str = GPU) -> None:
        found = verdict(rule, device, since=self.clock.wall()).model_copy(update={"action": action})
        self.verdicts = (*self.verdicts, found)

    def _stage(self, devices: Collection[str], **changes: object) -> None:
        self.verdicts = tuple(v.model_copy(update=changes) if v.device in devices else v for v in self.verdicts)

    # --- ward

    def repaired(self, devices: Collection[str], action: Action) -> None:
        self.did.append(f"repaired {','.join(devices)} {action}")
        self._stage(devices, stage="repaired")
        self.waiting = frozenset(devices)

    def passed(self, devices: Collection[str]) -> None:
        self.did.append(f"passed {','.join(devices)}")
        self._stage(devices, stage="probation")
        self.waiting -= set(devices)

    def escalate(self, keys: Collection[tuple[str, str]], why: str) -> None:
        self.did.append(f"escalated: {why}")
        self._stage([device for _, device in keys], stage="active", action="service")
        self.waiting -= {device for _, device in keys}

    async def pause(self) -> None:
        self.did.append("pause")

    def resume(self) -> None:
        self.did.append("resume")

    # --- disk

    def load(self) -> tuple[Attempt, ...]:
        if self.unreadable:
            raise ValueError("repairs.json cannot be read")
        return self.disk

    async def save(self, attempts: Sequence[Attempt]) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.disk = tuple(attempts)

    # --- hands

    async def repair(self, attempt: Attempt, started: Started) -> Ended:
        assert self.disk[-1].model_dump(exclude={"pid", "start"}) == attempt.model_dump(exclude={"pid", "start"})
        self.did.append(attempt.kind)
        await started(7, 8)
        return await self._end()

    async def verify(self, devices: Sequence[str]) -> Ended:
        self.did.append(f"verify {','.join(devices)}")
        return await self._end()

    async def _end(self) -> Ended:
        await asyncio.sleep(self.takes)
        code = self.codes.pop(0) if self.codes else 0
        return Ended(code, f"exit code {code}")

    async def outlived(self, attempt: Attempt, seconds: float) -> None:
        self.did.append(f"waited for {attempt.pid} for at most {seconds:g} s")

    # --- agent

    @property
    def advert(self) -> Any:
        return self

    def note(self, kind: str, text: str) -> None:
        assert text
        self.notes.append(kind)

    def cluster(self) -> Cluster:
        facts = self.node.facts.model_copy(update={"health": self.verdicts})
        return make_cluster([self.node.model_copy(update={"facts": facts}), "n2"])

    def pods(self) -> Mapping[str, PodStatus]:
        return {}

    def publish_repair(self, repair_state: RepairState) -> None:
        self.reported = repair_state
        if not self.away:
            self._take()

    def _take(self) -> None:
        facts = self.node.facts.model_copy(update={"repair_state": self.reported})
        self.node = self.node.model_copy(update={"facts": facts})

    async def refresh(self) -> None:
        await asyncio.sleep(0.01)
        if self.away:
            raise StoreUnavailableError("away")
        self._take()

    async def round_over(self) -> None:
        self.did.append("round over")


def attempt(kind: Kind = "reset_gpu", boot: str = "b", **more: object) -> Attempt:
    fields: dict[str, object] = {
        "kind": kind, "rule": "xid.95", "device": GPU, "whole": False, "at": 1.7e9 + 1000, "boot": boot, "pid": 7,
    }  # fmt: skip
    return Attempt.model_validate(fields | more)


@asynccontextmanager
async def repair_state(world: World) -> AsyncIterator[World]:
    """Its agent runs."""
    task = asyncio.create_task(world.repairer.run(world))
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test in virtual time."""

    def run() -> None:
        run_virtual(test())

    run.__name__ = test.__name__
    return run


def last(world: World) -> tuple[str, str, bool]:
    return world.disk[-1].kind, world.disk[-1].outcome, world.disk[-1].over


@virtual
async def test_a_reset_verified_and_over() -> None:
    async with repair_state(World()) as world:
        world.find("reset_gpu")
        await asyncio.sleep(10.0)
        assert world.did == [
            "round over", "pause", "reset_gpu", "resume", f"repaired {GPU} reset_gpu", f"verify {GPU}", f"passed {GPU}",
        ]  # fmt: skip
        (kept,) = world.disk
        assert (kept.outcome, kept.over, kept.pid, kept.start) == ("done", True, 7, 8)
        assert world.repairer.repair_state == RepairState(kinds=("reboot", "reset_gpu", "service"))
        assert world.counted == {("reset_gpu", "done"): 1, ("verify", "done"): 1}
        assert world.notes == ["RepairStarted", "RepairDone", "VerifyPassed"]
        world.verdicts = ()
        await asyncio.sleep(1.0)
        assert world.notes[-1] == "Readmitted"


@virtual
async def test_a_command_that_fails_asks_for_what_is_heavier() -> None:
    codes = (3, None)
    for code in codes:
        async with repair_state(World()) as world:
            world.codes = [code]
            world.find("reset_gpu")
            await asyncio.sleep(5.0)
            assert world.did[-2:] == [f"escalated: GPU reset did not help: exit code {code}", "service"]
            assert [(a.kind, a.outcome) for a in world.disk] == [("reset_gpu", "failed"), ("service", "done")]
            assert world.counted == {("reset_gpu", "failed"): 1, ("service", "done"): 1}


@virtual
async def test_a_machine_that_does_not_go_down_was_not_rebooted() -> None:
    async with repair_state(World()) as world:
        world.find("reboot")
        await asyncio.sleep(DEADLINE - 5)
        assert (last(world), world.did) == (("reboot", "", False), ["round over", "reboot"])
        await asyncio.sleep(10.0)
        assert world.did[2].endswith("and the machine is still up after 60 s")
        assert (world.disk[0].outcome, world.disk[0].over) == ("failed", True)


@virtual
async def test_after_the_reboot_it_is_verified_and_never_done_again() -> None:
    world = World(attempt("reboot", "before", whole=True))
    claim = world.repairer.repair_state.claim
    assert claim is not None
    assert (claim.kind, claim.phase) == ("reboot", "runs"), "the others hear of it with the first join"
    world.find("reboot")
    world._stage([GPU], stage="repaired")
    async with repair_state(world):
        await asyncio.sleep(2.0)
        assert (world.did, last(world)) == ([], ("reboot", "done", False))
        world.waiting = frozenset({GPU})
        await asyncio.sleep(5.0)
        assert world.did == ["verify ", f"passed {GPU}"]
        assert last(world) == ("reboot", "done", True)
        assert world.counted["reboot", "done"] == 1


@virtual
async def test_a_start_in_the_same_boot_waits_for_what_was_left_and_does_not_believe_it() -> None:
    async with repair_state(World(attempt())) as world:
        await asyncio.sleep(1.0)
        assert world.did == ["pause", "waited for 7 for at most 60 s", "resume"]
        assert last(world) == ("reset_gpu", "interrupted", True)
        assert world.repairer.repair_state.claim is None
    async with repair_state(World(attempt("reboot", whole=True))) as world:
        world.find("reboot")
        await asyncio.sleep(DEADLINE - 1)
        assert last(world) == ("reboot", "", False)
        await asyncio.sleep(5.0)
        assert world.did[2] == "escalated: reboot did not help: the agent was started again, and the machine was not"
    async with repair_state(World(attempt(boot="before"))) as world:
        await asyncio.sleep(1.0)
        assert (world.did, last(world)) == ([], ("reset_gpu", "interrupted", True))


@virtual
async def test_a_start_while_it_is_verified_goes_on_with_that() -> None:
    world = World(attempt(outcome="done"))
    world.find("reset_gpu")
    world._stage([GPU], stage="repaired")
    world.waiting = frozenset({GPU})
    async with repair_state(world):
        await asyncio.sleep(5.0)
        assert world.did == [f"verify {GPU}", f"passed {GPU}"]
        assert last(world) == ("reset_gpu", "done", True)


@virtual
async def test_a_verify_run_that_fails_asks_for_what_is_heavier() -> None:
    for code in (FAILED, None):
        async with repair_state(World()) as world:
            world.codes = [0, code]
            world.find("reset_gpu")
            await asyncio.sleep(4.0)
            assert f"escalated: verify run: exit code {code}" in world.did
            assert (world.disk[0].outcome, world.disk[0].text) == ("failed", "it was verified, and failed")
            assert "VerifyFailed" in world.notes


@virtual
async def test_a_verify_run_that_cannot_run_is_tried_thrice_and_proves_nothing() -> None:
    async with repair_state(World()) as world:
        world.codes = [0, *[1] * 10]
        world.find("reset_gpu")
        await asyncio.sleep(10.0)
        claim = world.repairer.repair_state.claim
        assert claim is not None
        assert claim.why == "its verify run is broken: exit code 1"
        await asyncio.sleep(400.0)
        assert world.did.count(f"verify {GPU}") == MOST_TRIES
        assert last(world) == ("reset_gpu", "interrupted", True)
        assert world.verdicts[0].stage == "repaired"
        assert world.repairer.repair_state.claim is None
        assert world.repairer.repair_state.why == "its verify run is broken, and is not tried again: exit code 1"
        assert world.counted["verify", "interrupted"] == MOST_TRIES


@virtual
async def test_a_fault_that_is_still_read_was_not_repaired() -> None:
    world = World(attempt("reboot", "before", whole=True))
    world.find("reboot")
    async with repair_state(world):
        await asyncio.sleep(SETTLE - 5)
        assert world.did == []
        await asyncio.sleep(10.0)
        assert world.did[0] == ("escalated: reboot did not help: it could not be read without a fault within 300 s")


@virtual
async def test_a_fault_that_comes_back_after_its_repair_is_not_waited_for() -> None:
    """The GPU was set aside for five minutes after a reset that had cleared nothing."""
    for seen, over in ((1.0, True), (-1.0, False)):
        world = World(attempt("reboot", "before", whole=True))
        world.find("reboot")
        started = world.clock.wall()
        async with repair_state(world):
            await asyncio.sleep(2.0)
            world.verdicts = tuple(v.model_copy(update={"seen": started + seen}) for v in world.verdicts)
            await asyncio.sleep(AGAIN + 1.0)
            assert (world.did[:1] == ["escalated: reboot did not help: its fault is there again"]) == over


@virtual
async def test_a_verdict_that_asks_for_something_heavier_already_is_not_made_heavier_again() -> None:
    world = World(attempt(outcome="done"))
    world.find("reboot", rule="xid.95")
    async with repair_state(world):
        await asyncio.sleep(1.0)
        world.verdicts = tuple(v.model_copy(update={"seen": world.clock.wall()}) for v in world.verdicts)
        await asyncio.sleep(AGAIN + 1.0)
        assert (world.disk[0].outcome, world.disk[0].text) == ("failed", "its fault is there again")
        assert not any("escalated: GPU reset" in did for did in world.did)


@virtual
async def test_nothing_is_begun_that_cannot_be_written_down_or_was_not_read() -> None:
    async with repair_state(World()) as world:
        world.full = True
        world.find("reset_gpu")
        await asyncio.sleep(5.0)
        assert "reset_gpu" not in world.did
    world = World()
    world.unreadable = True
    world.find("reset_gpu")
    world.another()
    async with repair_state(world):
        await asyncio.sleep(5.0)
        assert world.did == []
        assert world.repairer.repair_state.why == "repairs.json cannot be read"


@virtual
async def test_nothing_is_begun_while_the_store_has_not_got_the_claim() -> None:
    async with repair_state(World()) as world:
        world.away = True
        world.find("reset_gpu")
        await asyncio.sleep(5.0)
        claim = world.repairer.repair_state.claim
        assert claim is not None
        assert (claim.phase, world.did) == ("asks", [])
        world.settled = False
        world.away = False
        await asyncio.sleep(5.0)
        assert world.did == []
        world.publish_repair(world.repairer.repair_state)
        world.settled = True
        await asyncio.sleep(5.0)
        assert "reset_gpu" in world.did


@virtual
async def test_service_is_called_once_and_heals_nothing() -> None:
    async with repair_state(World()) as world:
        world.find("service", "xid.64")
        await asyncio.sleep(20.0)
        assert (world.did, last(world)) == (["service"], ("service", "done", True))
        assert world.verdicts[0].stage == "active"
        assert world.notes == ["ServiceCalled"]
        world.another()
    async with repair_state(world):
        await asyncio.sleep(5.0)
        assert world.did == ["service"]


@virtual
async def test_what_other_hands_repaired_is_verified_once_nobody_uses_it() -> None:
    world = World()
    world.find("diagnose", "xid.94.repeats")
    world._stage([GPU], stage="repaired")
    world.waiting, world.processes = frozenset({GPU}), {GPU: [77]}
    async with repair_state(world):
        await asyncio.sleep(5.0)
        assert (world.did, world.repairer.repair_state.why) == ([], "it is verified once it is free: process 77")
        world.processes = {}
        await asyncio.sleep(5.0)
        assert world.did == [f"verify {GPU}", f"passed {GPU}"]
    world = World()
    world.find("reset_gpu")
    world._stage([GPU], stage="repaired", severity="degraded")
    world.waiting = frozenset({GPU})
    async with repair_state(world):
        await asyncio.sleep(5.0)
        assert world.did == [f"passed {GPU}"], "work may run on it"
