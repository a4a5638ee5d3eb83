"""Every door of a stranger takes anything: a short look at each. ``make fuzz MINUTES=60`` looks longer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import inputs
from tests.fuzz.targets import TARGETS, Target

NAMES = [target.name for target in TARGETS]


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_the_examples_are_taken(target: Target) -> None:
    for seed in target.seeds:
        target.take(seed)
    for word in (b"", *target.words):
        target.take(word)


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_anything_is_taken_or_refused_in_order(target: Target) -> None:
    @settings(max_examples=60)
    @given(st.data())
    def take(data: st.DataObject) -> None:
        target.take(data.draw(inputs(target)))

    take()
