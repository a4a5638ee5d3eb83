"""Whether a figure is good enough: the node's own past, devices of the same kind, and what proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nodeagent.diag.crew import CheckOutcome
from nodeagent.diag.history import judge
from nodeagent.model.health import Figure

KIND = "NVIDIA H200"


def outcome(value: float | None, gpu: str = "GPU-a", why: str = "") -> CheckOutcome:
    return CheckOutcome("matmul", gpu, KIND, value, "TFLOP/s", why)


def peers(*values: float, kind: str = KIND) -> list[Figure]:
    return [Figure(kind=kind, check="matmul", value=value, unit="TFLOP/s") for value in values]


@pytest.mark.parametrize(
    ("own", "others", "value", "passed"),
    [
        ((), (), 1.0, True),  # nothing to hold it against
        ((600, 610), (), 100.0, True),  # two results are no history
        ((600, 610, 590), (), 481.0, True),
        ((600, 610, 590), (), 479.0, False),
        ((600, 610, 100), (), 481.0, True),  # one bad result does not lower what is usual
        ((100, 100, 100), (), 600.0, True),  # faster is fine
        ((), (600,), 100.0, True),  # of two, nobody knows which is the odd one
        ((), (600, 610), 483.0, False),
        ((), (600, 610), 485.0, True),
        ((400, 400, 400), (600, 600), 400.0, False),  # as ever, and too slow all the same
    ],
)
def test_how_slow_is_too_slow(own: Sequence[float], others: Sequence[float], value: float, passed: bool) -> None:
    (result,) = judge([outcome(value)], [(KIND, "matmul", own)], peers(*others), 0.8)
    assert (result.passed, result.value) == (passed, value), result.why
    assert bool(result.why) is not passed


def test_other_kinds_of_devices_and_other_checks_are_no_standard() -> None:
    own = [("NVIDIA H100", "matmul", (900.0,) * 5), (KIND, "collective", (900.0,) * 5)]
    (result,) = judge([outcome(100.0)], own, peers(900.0, 900.0, kind="NVIDIA H100"), 0.8)
    assert result.passed


def test_one_slow_gpu_among_its_neighbours_is_found_at_the_first_run() -> None:
    found = judge([outcome(600.0, "GPU-a"), outcome(610.0, "GPU-b"), outcome(300.0, "GPU-c")], [], [], 0.8)
    assert [(r.gpu, r.passed) for r in found] == [("GPU-a", True), ("GPU-b", True), ("GPU-c", False)]
    assert found[2].why == (
        "300 TFLOP/s is 50% of 605, the median of devices of the same kind (at least 80% is asked)"
    )  # fmt: skip


def test_a_result_that_is_wrong_fails_whatever_its_speed() -> None:
    (result,) = judge([outcome(None, why="checksum 3, not 4")], [(KIND, "matmul", (1.0,) * 9)], [], 0.8)
    assert (result.passed, result.value, result.why) == (False, None, "checksum 3, not 4")


def test_speeds_need_not_be_judged() -> None:
    (result,) = judge([outcome(1.0)], [(KIND, "matmul", (600.0,) * 9)], peers(600, 600), 0.0)
    assert result.passed
