"""The checker works: each rule of the protocol, broken on purpose, is noticed, and the unbroken core is not accused."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS, SEEDS, Mutant, Provocation, caught

PROVOCATIONS = tuple(dict.fromkeys(mutant.provocation for mutant in MUTANTS))


@pytest.mark.parametrize("provocation", PROVOCATIONS, ids=lambda p: p.__name__)
def test_unchanged_core_is_not_accused(provocation: Provocation) -> None:
    assert caught(provocation, range(1, 5)) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.mutate(monkeypatch)
    assert caught(mutant.provocation, SEEDS) is not None, mutant.rule
