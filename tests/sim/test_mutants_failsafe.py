"""The rules of the failsafe, each broken on purpose, are noticed. See ``test_mutants.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from nodeagent.agent.failsafe import Failsafe
from nodeagent.plan import gang, lending
from nodeagent.plan.lending import Answer, Ask, Promises
from nodeagent.store.twin import generation
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_failsafe import cut, members, started
from tests.sim.virtual import run_virtual

Scenario = Callable[[SimCluster], Awaitable[None]]
Mutate = Callable[[pytest.MonkeyPatch], None]


async def part_of_the_members(c: SimCluster) -> None:
    """Two members of three are cut off from the store, their third keeper is not."""
    await started(c, 1, 3)
    cut(c, members(c)[:2])
    await asyncio.sleep(20)


async def all_keepers(c: SimCluster) -> None:
    """All members are cut off, a spare, which would be enough, is not."""
    await started(c, 1, 3)
    cut(c, members(c))
    await asyncio.sleep(20)


async def back_one_by_one(c: SimCluster) -> None:
    """A keeper that is no member comes back to the store at once after it lent."""
    await started(c, 2, 2)
    cut(c, ["n1", "n2", "n3"])
    await asyncio.sleep(8)
    cut(c, ["n3"], False)
    await asyncio.sleep(10)


async def forgetful(c: SimCluster) -> None:
    """The agent of that keeper is started anew in the same moment, and so knows nothing of its promise."""
    await started(c, 2, 2)
    cut(c, ["n1", "n2", "n3"])
    await asyncio.sleep(8)
    await c.nodes["n3"].kill_agent()
    cut(c, ["n3"], False)
    c.nodes["n3"].start_agent()
    await asyncio.sleep(10)


async def one_alone(c: SimCluster) -> None:
    """One member alone is cut off: replaced as soon as its lease has lapsed."""
    await started(c, 2, 3)
    victim = members(c)[1]
    cut(c, [victim])
    await c.until(lambda: c.whole("j") and victim not in members(c), TIMING.lease + 1.5, "replaced")


def one_yes_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A member asks itself only."""
    real = Failsafe._ask

    async def ask(self: Failsafe, node: str, question: Ask) -> Answer | None:
        return await real(self, self._lease.node, question)

    patch.setattr(Failsafe, "_ask", ask)


def keepers_need_not_let_go(patch: pytest.MonkeyPatch) -> None:
    """A new generation becomes active though no keeper of the old one let go, and is proposed without hearing one."""
    real = generation._not_ready
    patch.setattr(generation, "_not_ready", lambda s, job, head: real(s, job.model_copy(update={"keepers": {}}), head))
    patch.setattr(gang, "silence", lambda cluster, job: "")


def promises_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A keeper lets go right after it lent."""
    patch.setattr(Promises, "give", lambda self, uid, now: None)


def no_wait_after_a_start(patch: pytest.MonkeyPatch) -> None:
    """An agent lets go at once after its start, whatever the one before it promised."""
    real = Promises.__init__
    patch.setattr(Promises, "__init__", lambda self, timing, started: real(self, timing, -1e9))


def lends_while_served(patch: pytest.MonkeyPatch) -> None:
    """A keeper says yes though the store answers it: its promise then holds up the gang for nothing."""
    real = lending.answer
    patch.setattr("nodeagent.agent.failsafe.answer", lambda cluster, node, renewed, ask: real(cluster, node, 1e9, ask))


def counted_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """Lent time is counted from the last answer and in units of the promise, not from before the question."""
    real = Failsafe._ask_all

    async def late(self: Failsafe, question: Ask) -> None:
        lend = self._lease.lend
        patch.setattr(self._lease, "lend", lambda uid, until: lend(uid, until + self._timing.promise))
        await real(self, question)

    patch.setattr(Failsafe, "_ask_all", late)


def _caught(scenario: Scenario, seeds: range) -> bool:
    async def main(seed: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            cluster = SimCluster(seed, 4, tasks)
            for node in cluster.nodes.values():
                node.start_agent()
            try:
                await scenario(cluster)
            finally:
                await cluster.close()

    caught = False
    for seed in seeds:
        try:
            run_virtual(main(seed))
        except* AssertionError:
            caught = True
        if caught:
            break
    return caught


SCENARIOS = (part_of_the_members, all_keepers, back_one_by_one, forgetful, one_alone)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_unchanged_core_is_not_accused(scenario: Scenario) -> None:
    assert not _caught(scenario, range(1, 4))


MUTANTS: tuple[tuple[Mutate, Scenario], ...] = (
    (one_yes_is_enough, part_of_the_members),
    (keepers_need_not_let_go, all_keepers),
    (promises_not_kept, back_one_by_one),
    (no_wait_after_a_start, forgetful),
    (lends_while_served, one_alone),
    (counted_from_the_answer, back_one_by_one),
)


@pytest.mark.parametrize(("mutate", "scenario"), MUTANTS)
def test_mutant_is_caught(mutate: Mutate, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert _caught(scenario, range(1, 9)), mutate.__doc__
