"""The benchmark of large clusters measures what it says, and its table is whole."""

from __future__ import annotations

import pytest

from benchmarks.scale.crew import Crew
from benchmarks.scale.meter import Meter
from benchmarks.scale.report import BEGIN, END, LINES, render, shown
from benchmarks.scale.rows import measure
from nodeagent.local.privateredis import PrivateRedis

pytestmark = pytest.mark.redis


@pytest.mark.slow
async def test_every_row_of_the_table_is_measured() -> None:
    figures = await measure(10)
    assert {line.figure for line in LINES} <= figures.keys()
    cost_nothing = {name for name, figure in figures.items() if figure <= 0}
    assert all("the others" in name for name in cost_nothing), "two nodes more may read in what a renewal costs"
    document = render(f"before\n{BEGIN}old\n{END}after\n", {"10": figures}, "here")
    assert document.startswith("before\n") and document.endswith("after\n") and "old" not in document
    assert document.count("\n| ") == len(LINES) + 2


async def test_what_a_renewal_sends_is_the_same_in_a_larger_cluster_and_what_a_newcomer_reads_is_not() -> None:
    renewed, read = [], []
    with PrivateRedis() as server:
        for nodes in (10, 40):
            async with Meter(server) as meter, Crew(server, meter, nodes, nodes) as crew:
                await crew.join()
                read.append((await crew.each(crew.agents)).sent)
                renewed.append((await crew.renewal()).sent)
    assert renewed[1] == pytest.approx(renewed[0], abs=20)
    assert read[1] > 2 * read[0]


def test_digits() -> None:
    assert [shown(figure) for figure in (0.123, 12.34, 123.4, 12_345.6)] == ["0.12", "12.3", "123", "12,346"]


def test_a_document_without_its_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="begin"):
        render("no marks", {}, "")
