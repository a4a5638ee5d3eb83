"""The table of docs/scale.md, written between two marks in it: the text around it is people's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).parents[2] / "docs" / "scale.md"
BEGIN, END = "<!-- begin: python -m benchmarks.scale -->\n", "<!-- end -->\n"
Figures = Mapping[str, float]


class Line(NamedTuple):
    """A row of the table."""

    text: str
    figure: str
    """Its name in what was measured."""
    grows: str
    """With N nodes."""


LINES = (
    Line("the yardstick: a plain `SET`, us of Redis", "plain command, us", "O(1)"),
    Line("renewal, us of Redis", "renewal, us", "O(1)"),
    Line("renewal, bytes", "renewal, bytes", "O(1)"),
    Line("beat with nothing new, us of Redis", "beat, us", "O(1)"),
    Line("beat with nothing new, bytes", "beat, bytes", "O(1)"),
    Line("Redis at rest, % of a core", "at rest, % of a core", "O(N)"),
    Line("Redis at rest, MB/s", "at rest, MB/s", "O(N)"),
    Line("one change of a job read by one member, us of Redis", "change, us", "O(1)"),
    Line("one change of a job read by one member, bytes", "change, bytes", "O(1)"),
    Line("one acknowledgement, us of Redis", "ack, us", "O(1)"),
    Line("first forming of a job over all, ms of Redis", "first forming, ms", "O(N^2)"),
    Line("fault in a job over all, ms of Redis", "fault in all, ms", "O(N)"),
    Line("- of it: all hear of the fault", "fault in all, received, ms", "O(N)"),
    Line("- of it: all read the new generation", "fault in all, reported, ms", "O(N)"),
    Line("- of it: all acknowledge", "fault in all, acks, ms", "O(N)"),
    Line("- of it: all read that it is active", "fault in all, active, ms", "O(N)"),
    Line("fault in a job over all, MB sent", "fault in all, MB", "O(N)"),
    Line("fault in a job over all, ms of each agent", "fault in all, an agent, ms", "O(N)"),
    Line("fault in a job of 8 nodes, ms of Redis", "fault in 8, ms", "O(1)"),
    Line("fault in a job of 8 nodes, all others read it, ms of Redis", "fault in 8, the others, ms", "O(N)"),
    Line("fault in a job of 8 nodes, all others read it, MB", "fault in 8, the others, MB", "O(N)"),
    Line("stop of a job over all, ms of Redis", "stop of all, ms", "O(N)"),
    Line("stop of a job over all, MB sent", "stop of all, MB", "O(N)"),
    Line("success of a job over all, ms of Redis", "end of all, ms", "O(N)"),
    Line("- of it: all report it and read that", "end of all, reports, ms", "O(N)"),
    Line("success of a job over all, MB sent", "end of all, MB", "O(N)"),
    Line("a newcomer reads everything, us of Redis", "newcomer, us", "O(N)"),
    Line("a newcomer reads everything, bytes", "newcomer, bytes", "O(N)"),
    Line("a newcomer reads everything, ms of its agent", "newcomer, agent ms", "O(N)"),
    Line("join of all, ms of Redis", "join of all, ms", "O(N^2)"),
    Line("Redis emptied until all have read it again, ms of Redis", "emptied, ms", "O(N^2)"),
    Line("200 queued jobs: first round, ms of the agent", "first round with a queue, ms", "O(N + jobs)"),
    Line("200 queued jobs: round at rest, ms of the agent", "round at rest with a queue, ms", "O(1)"),
    Line("200 queued jobs: a node has changed, ms of the agent", "round after a change with a queue, ms", "O(jobs)"),
    Line("`top`, ms of the agent", "top, ms", "O(N)"),
    Line("`top`, ms in which its loop is blocked", "top, on the loop, ms", "O(N)"),
    Line("`top` with 200 queued jobs, ms of Redis", "top and a queue, Redis ms", "O(N)"),
    Line("`get nodes`, ms of the agent", "get nodes, ms", "O(N)"),
    Line("status page with 200 queued jobs, ms of the agent", "page and a queue, ms", "O(N)"),
    Line(
        "status page with 200 queued jobs, ms in which its loop is blocked", "page and a queue, on the loop, ms", "O(N)"
    ),
    Line("memory of an agent's view, MB", "memory, MB", "O(N)"),
)


def table(results: Mapping[str, Figures]) -> str:
    """``results``: number of nodes to what was measured with them."""
    sizes = sorted(results, key=int)
    rows: list[Sequence[str]] = [("nodes", *(f"{int(size):,}" for size in sizes), "grows")]
    rows += [("---", *("--:" for _ in sizes), "---")]
    rows += [(line.text, *(shown(results[size][line.figure]) for size in sizes), line.grows) for line in LINES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def shown(figure: float) -> str:
    """No more digits than mean something."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def render(document: str, results: Mapping[str, Figures], machine: str) -> str:
    """The document with this table in it. Raises ValueError where it has no marks."""
    return between(document, BEGIN, END, f"{table(results)}\n{machine}\n")


def between(document: str, begin: str, end: str, text: str) -> str:
    """The document with this between these two lines. Raises ValueError where it does not have them."""
    before, begin_there, rest = document.partition(begin)
    _, end_there, after = rest.partition(end)
    if not begin_there or not end_there:
        raise ValueError(f"there is no {begin.strip()} ... {end.strip()} in it")
    return f"{before}{begin}\n{text}\n{end}{after}"
