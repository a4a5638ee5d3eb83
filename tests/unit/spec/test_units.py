"""Durations, sizes, ranges, whole numbers: what is read, and what a person is told to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30), ("10m", 600), ("1h30m", 5400), ("500ms", 0.5), ("0s", 0), ("2d", 172800), ("1.5h", 5400),
        ("1m500ms", 60.5), (30, 30), (0.25, 0.25), (0, 0), (" 5s ", 5),
    ],
)  # fmt: skip
def test_durations(text: object, seconds: float) -> None:
    assert units.duration(text) == seconds


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("30", "write 30s for seconds or 30m for minutes"),
        ("30 sec", "write 30s"),
        ("10 minutes", "write 10m"),
        ("5S", "write 5s"),
        ("1 h", "write 1h"),
        ("30m1h", "write each unit once, the longest first"),
        ("1.2.3", "write for instance"),
        ("1.2.3 sec", "write for instance"),
        ("3651d", "it must be at most 3650d"),
        (10**400, "it must be at most 3650d"),
        ("99999999999999h", "write for instance"),
        ("1s1s", "write each unit once"),
        ("-5s", "write for instance"),
        ("", "write for instance"),
        ("soon", "write for instance"),
        (-1, "must not be below zero"),
        (True, "write for instance"),
        (None, "write for instance"),
        ([], "write for instance"),
        (float("inf"), "it must be at most 3650d"),
        (float("nan"), "must not be"),
    ],
)
def test_no_durations(value: object, right: str) -> None:
    with pytest.raises(CheckError) as caught:
        units.duration(value)
    assert right in caught.value.right


@given(st.integers(0, 87_000), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_parts_add_up(hours: int, minutes: int, seconds: int, ms: int) -> None:
    want = hours * 3600 + minutes * 60 + seconds + ms / 1000
    assert units.duration(f"{hours}h{minutes}m{seconds}s{ms}ms") == pytest.approx(want)


@pytest.mark.parametrize(
    ("text", "ends"), [("0s..30s", (0, 30)), ("1s .. 1m", (1, 60)), ("5s", (5, 5)), (5, (5, 5)), ("2..3s", None),
                       ("30s..0s", None), ("..", None), ("1s..", None), (None, None), ("1s..2s..3s", None)],
)  # fmt: skip
def test_ranges_of_durations(text: object, ends: tuple[float, float] | None) -> None:
    if ends is None:
        with pytest.raises(CheckError):
            units.duration_range(text)
    else:
        assert units.duration_range(text) == ends


@pytest.mark.parametrize(
    ("text", "count"), [("64MiB", 64 * 1024**2), ("512KiB", 512 * 1024), ("1 GiB", 1024**3), ("17", 17), ("17B", 17),
                        (17, 17), ("1TiB", 1024**4)],
)  # fmt: skip
def test_sizes(text: object, count: int) -> None:
    assert units.size(text) == count


@pytest.mark.parametrize(
    ("value", "right"),
    [("64MB", "write 64MiB"), ("64m", "write 64MiB"), ("64G", "write 64GiB"), ("x", "for instance"),
     (-1, "for instance"), (1.5, "for instance"), (True, "for instance"), ("64 parsecs", "for instance")],
)  # fmt: skip
def test_no_sizes(value: object, right: str) -> None:
    with pytest.raises(CheckError) as caught:
        units.size(value)
    assert right in caught.value.right


@pytest.mark.parametrize("value", ["29400", "2-1", "0-10", "1-70000", 5, [1], None, "a-b", [1, True]])
def test_no_port_ranges(value: object) -> None:
    with pytest.raises(CheckError, match=r"29400-29899|ports go from"):
        units.port_range(value)


def test_port_ranges() -> None:
    assert units.port_range("29400-29899") == units.port_range([29400, 29899]) == (29400, 29899)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("010", "write 10"),
        ("4", "write 4 without quotes"),
        ("1_0", "write 10"),
        (10.0, "write 10"),
        (1000.0, "write a whole number from 1 to 99"),
        (1e32, "write a number such as 1"),
        (1.5, "write a number such as 1"),
        ("four", "write a number such as 1"),
        (True, "write a number such as 1"),
        (None, "write a number such as 1"),
        (0, "write a whole number from 1 to 99"),
        (100, "write a whole number from 1 to 99"),
    ],
)
def test_no_whole_numbers(value: object, right: str) -> None:
    with pytest.raises(CheckError) as caught:
        units.whole(value, 1, 99)
    assert caught.value.right == right


@pytest.mark.parametrize("read", [units.duration, units.size, units.port_range, units.duration_range])
@given(value=st.text(max_size=30) | st.integers() | st.floats() | st.none() | st.booleans())
def test_anything_else_is_a_check_error(read: Callable[[object], object], value: object) -> None:
    try:
        read(value)
    except CheckError as error:
        assert error.what
        assert error.right
