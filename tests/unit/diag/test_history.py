"""The node's own results on disk: bounded, and never guessed at."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.diag.crew import CheckOutcome
from nodeagent.diag.history import MOST_REPORTED, MOST_VALUES, PastResults, figures, load, save, with_results


def outcome(value: float | None, check: str = "matmul", kind: str = "K") -> CheckOutcome:
    return CheckOutcome(check, "GPU-a", kind, value, "GiB/s")


def test_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "state" / "diag.json"
    assert load(file) == ()
    past = with_results((), [outcome(1.0), outcome(2.0, "copy"), outcome(None, "collective")])
    save(file, past)
    assert (
        load(file) == past == (PastResults("K", "matmul", "GiB/s", (1.0,)), PastResults("K", "copy", "GiB/s", (2.0,)))
    )


def test_it_stays_small_and_keeps_the_newest() -> None:
    past = with_results((), [outcome(float(n)) for n in range(MOST_VALUES + 5)])
    assert past[0].values == tuple(float(n) for n in range(5, MOST_VALUES + 5))
    for n in range(MOST_REPORTED):
        past = with_results(past, [outcome(1.0, kind=f"other {n}")])
    assert len(past) == MOST_REPORTED
    assert "K" not in {p.kind for p in past}, "the kind used longest ago goes first"


def test_what_others_hear() -> None:
    (figure,) = figures(with_results((), [outcome(1234.5678), outcome(1236.0), outcome(9.0)]))
    assert (figure.kind, figure.check, figure.value, figure.unit) == ("K", "matmul", 1230.0, "GiB/s")


@pytest.mark.parametrize(
    "text",
    [
        "no json", '{"version": 9}', '{"version": 1, "past": [{}]}', "[]", "[" * 10_000, '{"version": 1, "past": 3}',
        *(
            f'{{"version": 1, "past": [{{"kind": {kind}, "check": "c", "unit": "s", "values": {values}}}]}}'
            for kind, values in (("[]", "[1]"), ("3", "[1]"), ('"k"', '"12"'), ('"k"', '["x"]'), ('"k"', "[null]"))
        ),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_understood_is_reported(tmp_path: Path, text: str) -> None:
    file = tmp_path / "diag.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=str(file)):
        load(file)
