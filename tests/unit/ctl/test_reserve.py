"""What ``reserve`` reads from its command line, and how it shows a window."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from nodeagent.ctl.reserve import COLUMNS, parse
from nodeagent.ctl.terminal import CtlError, Exit


def test_the_words_of_a_command() -> None:
    nodes, begins, seconds = parse(("n[1-8]", "node/n9", "from", "2030-01-31T22:00+00:00", "for", "1h30m"))
    assert (nodes, seconds) == (("n[1-8]", "n9"), 5400.0)
    assert begins == (datetime(2030, 1, 31, 22, tzinfo=UTC).timestamp(), False)


def test_a_time_from_now_is_left_to_the_agents_clock() -> None:
    assert parse(("n1", "from", "+2h", "for", "4h"))[1] == (7200.0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("n1", "write NODE... from TIME for DURATION"),
        ("from +2h for 4h", "write NODE... from TIME for DURATION"),
        ("n1 for 4h from +2h", "write NODE... from TIME for DURATION"),
        ("n1 from soon for 4h", "'soon' is not a time"),
        ("n1 from +2h for long", "'long' is not a duration"),
    ],
)
def test_what_cannot_be_read(words: str, message: str) -> None:
    with pytest.raises(CtlError) as error:
        parse(tuple(words.split()))
    assert (error.value.code, error.value.message) == (Exit.USAGE, message)
    assert error.value.next_step


@pytest.mark.parametrize(
    ("state", "text"), [("ahead", "in 2h"), ("open", "open for 1h"), ("over", "over")]
)  # fmt: skip
def test_how_far_a_window_is(state: str, text: str) -> None:
    cell = next(column.cell for column in COLUMNS if column.title == "STATE")
    assert cell({"state": state, "begins": 7200.0, "closes": 3600.0}) == text
