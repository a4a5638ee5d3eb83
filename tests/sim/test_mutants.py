"""The checker works: each rule of the protocol, broken on purpose, is noticed, and the unbroken core is not accused."""

from __future__ import annotations

from types import ModuleType

import pytest

from nodeagent.plan.job import gang
from nodeagent.plan.pods import forming, pod
from tests.groups import seeds
from tests.sim import provocations
from tests.sim.mutants import MUTANTS, SEEDS, Mutant, Provocation, caught, change

PROVOCATIONS = tuple(dict.fromkeys(mutant.provocation for mutant in MUTANTS))
FIRST = tuple({mutant.provocation: mutant for mutant in reversed(MUTANTS)}.values())[::3]
"""One for every third provocation: those that `make test` breaks."""


@pytest.mark.parametrize("seed", seeds([], [1, 2]))  # in `make test` all other schedules show that
@pytest.mark.parametrize("provocation", PROVOCATIONS, ids=lambda p: p.__name__)
def test_unchanged_core_is_not_accused(provocation: Provocation, seed: int) -> None:
    assert caught(provocation, range(seed, seed + 1)) is None


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=() if m in FIRST else pytest.mark.slow) for m in MUTANTS],
)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.mutate(monkeypatch)
    assert caught(mutant.provocation, SEEDS) is not None, mutant.rule


def test_a_mutant_whose_place_is_gone_or_not_one_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("nowhere in it", "redis.call("):
        with pytest.raises(AssertionError, match="times: "):
            change(monkeypatch, (text, ""))


def test_a_mutant_whose_lua_fails_is_not_taken_for_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, ("local function not_ready(job)\n", "local function not_ready(job)\n  local x = nil + 1\n"))
    with pytest.raises(ExceptionGroup) as failed:
        caught(provocations.a_shim_hangs, range(1, 2))
    assert failed.group_contains(RuntimeError, match="ack.lua failed")


@pytest.mark.parametrize(
    ("module", "rule"), [(gang, "completed"), (gang, "_forming"), (pod, "_may"), (forming, "promise")]
)
def test_a_rule_that_raises_ends_the_simulation(module: ModuleType, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Production leaves the job as it is and goes on with the others (``agent/undecided.py``)."""

    def raises(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(module, rule, raises)
    with pytest.raises(ExceptionGroup) as failed:
        caught(provocations.a_shim_hangs, range(1, 2))
    assert failed.group_contains(KeyError, match="a defect")
