"""Counts the calls of some work, in place of its time, which a busy machine stretches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType


def profiled(work: Callable[[], object], count: Callable[[FrameType, str], None]) -> None:
    """Calls ``count`` with each event of ``sys.setprofile`` while it works."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _argument: count(frame, event))
    try:
        work()
    finally:
        sys.setprofile(before)


def calls_of(work: Callable[[], object]) -> int:
    """Calls, Python's and C's."""
    calls = 0

    def count(_frame: FrameType, event: str) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    profiled(work, count)
    return calls


def counted(work: Callable[[], object]) -> Counter[CodeType]:
    """How often each of Python's functions is called."""
    calls = Counter[CodeType]()

    def count(frame: FrameType, event: str) -> None:
        calls[frame.f_code] += event == "call"

    profiled(work, count)
    return calls
