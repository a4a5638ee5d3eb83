"""Figures as ``top`` says them."""

from __future__ import annotations

import pytest

from nodeagent.ctl.output import size
from nodeagent.ctl.top import percent


@pytest.mark.parametrize(
    ("number", "shown"),
    [(None, "-"), (0, "0"), (512, "512"), (1023, "1023"), (1536, "1.5Ki"), (123_456_789, "118Mi"), (5 << 30, "5Gi"),
     (1020 << 30, "1020Gi"), (3 << 40, "3.0Ti")],
)  # fmt: skip
def test_sizes(number: int | None, shown: str) -> None:
    assert size(number) == shown


def test_percent_is_of_one_core() -> None:
    assert [percent(None), percent(0), percent(0.07), percent(12.5)] == ["-", "0%", "7%", "1250%"]
