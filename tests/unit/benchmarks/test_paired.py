"""Shares of pairs: how much is more, how sure that is, and what a disturbance of both does."""

from __future__ import annotations

import random

import pytest

from benchmarks.paired import section, share


def test_a_share_is_found_under_noise_that_both_have() -> None:
    lots = random.Random(1)
    noise = [1 + lots.random() for _ in range(400)]
    found = share([1.01 * n * lots.uniform(0.98, 1.02) for n in noise], noise)
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(1.01, abs=0.002)
    assert 1.005 < found.low < 1.01 < found.high < 1.015


def test_the_same_is_the_same() -> None:
    assert share([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="zip"):
        share([1.0], [1.0, 2.0])


def test_it_is_shown_with_its_interval_and_how_it_was_taken() -> None:
    blocks = {"seconds": [1.0, 1.0], "cpu": [2.0, 2.0], "call": [0.0, 0.0], "call_cpu": [0.0, 0.0]}
    more = {"seconds": [1.02, 1.0], "cpu": [2.0, 2.02], "call": [0.02, 0.0], "call_cpu": [0.01, 0.01]}
    shape = {"state_mb": 49.6, "ranks": 2, "every": 10, "load": "at a load of 1 on 2 cores"}
    text = section(shape | {"with": more, "without": blocks})
    assert "| time of the steps | **+1.00%** | +0.00% to +2.00% |" in text
    assert "| CPU time of all ranks | **+0.50%** | +0.00% to +1.00% |" in text
    assert "| the calls alone, time | **+1.00%** | +0.00% to +2.00% |" in text
    assert "| the calls alone, CPU time | **+0.50%** | +0.50% to +0.50% |" in text
    assert "2 pairs, 40 steps" in text
    assert "at a load of 1 on 2 cores" in text
