"""Bounds of waits: a stall is not given more time, a busy machine is, up to twice as much."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import bounds
from tests.bounds import Bound, starved


@pytest.mark.parametrize(
    ("busy", "gives_up_after"), [(0.0, 10.0), (0.25, 13.3), (0.5, 20.0), (1.0, 20.0)]
)  # fmt: skip
def test_only_seconds_in_which_nothing_waited_for_a_processor_count(busy: float, gives_up_after: float) -> None:
    now = [100.0]
    bound = Bound(10.0, lambda: now[0], lambda: 7.0 + busy * now[0])
    while not bound.over:
        assert bound.passed < 60
        now[0] += 0.1
    assert bound.passed == pytest.approx(gives_up_after, abs=0.2)


def test_where_the_kernel_does_not_say_all_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "PRESSURE", Path("/nowhere/at/all"))
    assert starved() == 0.0


def test_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cpu"
    file.write_text("some avg10=1.00 avg60=0.50 avg300=0.10 total=2500000\nfull avg10=0.00 total=9\n")
    monkeypatch.setattr(bounds, "PRESSURE", file)
    assert starved() == 2.5
    file.write_text("")
    assert starved() == 0.0
