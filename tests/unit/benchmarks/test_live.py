"""What the run with real agents takes for wrong, by the workers' steps; and what it writes down."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.scale.live import FAULTS, MARKS, Site, Steps, WrongError, section
from benchmarks.scale.report import DOCUMENT, between


def row(generation: int, rank: int, mono: float) -> dict[str, Any]:
    return {"generation": generation, "rank": rank, "world": 2, "mono": mono}


def test_generations_one_after_the_other_are_fine_whatever_the_order_of_their_lines(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "steps")
    assert steps.newest() is None
    rows = [row(1, 0, 1.0), row(1, 1, 1.1), row(3, 1, 2.0), row(1, 1, 1.5), row(3, 0, 2.5), row(3, 0, 2.9)]
    text = "".join(json.dumps(r) + "\n" for r in rows)
    (tmp_path / "steps").write_text(text[:-20])
    newest = steps.newest()
    assert newest is not None
    assert (newest.number, newest.whole, newest.began) == (3, True, {0: 2.5, 1: 2.0})
    (tmp_path / "steps").write_text(text)
    assert steps.newest() is newest
    assert [(end, round(length, 3)) for end, length in newest.gaps] == [(2.9, 0.4)], "a line counts once it is whole"


@pytest.mark.parametrize(
    "rows",
    [
        [row(1, 0, 1.0), row(2, 0, 2.0), row(1, 1, 2.1)],
        [row(2, 0, 2.0), row(1, 1, 2.1)],
        [row(1, 0, 1.0), row(1, 0, 2.5), row(2, 1, 2.4)],
    ],
)
def test_a_step_of_an_older_generation_beside_a_newer_one_is_wrong(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    steps = Steps(tmp_path / "steps")
    with pytest.raises(WrongError, match=r"generation 1 stepped 0\.100 s after 2 had begun"):
        for one in rows:
            steps.take(one)


def test_a_generation_without_a_fault_is_wrong() -> None:
    steps, one = SimpleNamespace(of={1: None, 2: None, 3: None}), SimpleNamespace(state=str)
    site = cast("Site", SimpleNamespace(steps=steps, one=one))
    Site.explained(site, 2, 3)
    with pytest.raises(WrongError, match=r"more generations than faults: \[2\]"):
        Site.explained(site, 1, 3)


def test_the_section_has_a_row_for_each_fault_that_came_and_a_place_in_the_document() -> None:
    took: dict[str, list[float]] = {name: [] for name in FAULTS}
    took["worker killed"] = [0.1 * n for n in range(1, 21)]
    site = cast("Site", SimpleNamespace(nodes=6, took=took, steps=SimpleNamespace(of={1: 0, 2: 0})))
    about = {"date": "today", "machine": "a machine", "system": "Linux", "load": "1.0 before the run"}
    text = section(site, 10.0, 7, about, "agent 0.40 %, 58.6 MB", 2.0)
    assert "| worker killed | 20 | formed again on all nodes | 1.05 | 1.90 | 2.00 |" in text
    assert "agent killed" not in text
    assert max(map(len, text.splitlines())) <= 120
    document = between(DOCUMENT.read_text(), *MARKS, text)
    assert text in document
    assert between(document, *MARKS, text) == document, "written again, it replaces the old one"
