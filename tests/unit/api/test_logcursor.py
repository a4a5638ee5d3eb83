"""Reading a stream again after it broke: nothing twice, nothing left out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.api.logcursor import LogCursor

Line = dict[str, Any]


def line(node: str, rank: int, time: int, text: int = 0) -> Line:
    return {"node": node, "generation": 1, "rank": rank, "stream": "stdout", "time": f"{time:03d}", "text": text}


@given(
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 1)), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
def test_broken_anywhere_any_number_of_times(steps: list[tuple[str, int, int]], cuts: list[int]) -> None:
    """Each source's times never go back; several lines may share one."""
    now: dict[tuple[str, int], int] = {}
    lines = []
    for number, (node, rank, later) in enumerate(steps):
        now[node, rank] = now.get((node, rank), 0) + later
        lines.append(line(node, rank, now[node, rank], number))
    marks, got = LogCursor(), []
    for cut in [*sorted(cuts), len(lines)]:
        skipper = marks.again(tail=False)
        for each in lines[: max(cut, 0)]:
            if not skipper.skip(each):
                got.append(each["text"])
                marks.seen(each)
    assert got == [each["text"] for each in lines]


def test_after_a_tail_what_is_older_stays_out() -> None:
    marks = LogCursor()
    marks.seen(line("a", 0, 5))
    skipper = marks.again(tail=True)
    assert [skipper.skip(each) for each in (line("a", 1, 4), line("a", 0, 4), line("a", 0, 5), line("a", 1, 6))] == [
        True,
        True,
        True,
        False,
    ]
