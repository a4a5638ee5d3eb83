"""Cells, durations, waits."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.ctl import waiting
from nodeagent.ctl.jobtext import folded
from nodeagent.ctl.main import cli
from nodeagent.ctl.options import Duration
from nodeagent.ctl.output import Column, Json, fold, show, span, table_lines
from nodeagent.ctl.terminal import CtlError, Exit, WaitTimedOutError
from nodeagent.ctl.waiting import wait

SPANS = [
    (None, "-"), (0, "0s"), (59.9, "59s"), (119, "119s"), (120, "2m"), (312, "5m12s"), (3600, "1h"), (3720, "1h2m"),
    (7260, "2h1m"), (3 * 3600, "3h0m"), (47 * 3600, "47h0m"), (52 * 3600, "2d4h"),
]  # fmt: skip


@pytest.mark.parametrize(("seconds", "words"), SPANS)
def test_span(seconds: float | None, words: str) -> None:
    assert span(seconds) == words


GOOD = [("90", 90.0), ("1.5", 1.5), ("500ms", 0.5), ("30s", 30.0), ("1h30m", 5400.0), ("1d", 86400.0)]


@pytest.mark.parametrize(("text", "seconds"), GOOD)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


BAD = [
    ("", "or 1h30m"), ("soon", "or 1h30m"), ("-3s", "or 1h30m"), ("3x", "or 1h30m"), ("m5", "or 1h30m"),
    ("1.2.3", "or 1h30m"), ("5 m", "write 5m"), ("5m5m", "write each unit once, the longest first, as in 1h30m"),
    ("1m1h", "as in 1h30m"), ("3651d", "at most 3650d"), ("9" * 400, "at most 3650d"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), BAD)
def test_what_is_no_duration(text: str, says: str) -> None:
    """As in a job file, but for a number without a unit."""
    with pytest.raises(click.BadParameter, match=says):
        Duration().convert(text, None, None)


def test_an_option_that_is_no_duration_is_refused() -> None:
    result = CliRunner().invoke(cli, ["stop", "train", "--timeout", "5m5m"])
    assert result.exit_code == 2
    assert "'5m5m' is not a duration, write each unit once, the longest first, as in 1h30m" in result.stderr


def test_plain_tables_are_never_cut() -> None:
    columns = (Column("NAME", lambda r: r["n"]), Column("REASON", lambda r: r["r"]))
    lines = table_lines(columns, [{"n": "a", "r": "x" * 500}, {"n": "longer", "r": None}])
    assert lines == ["NAME     REASON", "a        " + "x" * 500, "longer   -"]


NAMES = Column("NAME", lambda r: r["n"])
WHY = Column("REASON", lambda r: r["r"], text=True)
SIZE = Column("SIZE", lambda r: r["s"])
SENTENCE = "its lease lapsed and its workers were given to others; it comes back with a new life"


def words_of(lines: list[str]) -> list[str]:
    return " ".join(lines).split()


@pytest.mark.parametrize("width", [100, 80, 60, 40, 20])
def test_a_table_keeps_within_a_terminal_and_breaks_no_word(width: int) -> None:
    rows: list[Json] = [{"n": "n1", "s": "8/8 free", "r": SENTENCE}, {"n": "n2", "s": "-", "r": None}]
    for columns in ((NAMES, SIZE, WHY), (NAMES, WHY, SIZE)):
        lines = table_lines(columns, rows, width)
        assert max(map(len, lines)) <= width
        assert {*SENTENCE.split(), "8/8", "free", "n1", "n2"} <= set(words_of(lines))


def test_the_last_column_is_folded_where_it_has_room_and_stands_below_where_it_has_none() -> None:
    rows = [{"n": "n1", "r": SENTENCE}]
    assert table_lines((NAMES, WHY), rows, 50) == [
        "NAME   REASON",
        "n1     its lease lapsed and its workers were given",
        "       to others; it comes back with a new life",
    ]
    assert table_lines((NAMES, WHY), rows, 30)[:3] == ["NAME", "n1", "  REASON: its lease lapsed and"]


def test_lists_break_after_commas() -> None:
    names = ",".join(f"n{i}" for i in range(1, 30))
    lines = table_lines((NAMES, WHY), [{"n": "j", "r": names}], 40)
    assert max(map(len, lines)) <= 40
    assert "".join(line.strip() for line in lines[1:]).replace("j", "", 1).strip() == names


@pytest.mark.timeout(30)
def test_a_word_that_begins_beyond_the_width_is_folded() -> None:
    """As in Python's tracebacks, which point below a long line."""
    lines = folded(["    call(a, b)", " " * 90 + "^" * 30], 80)
    assert all(len(line) <= 80 for line in lines)
    assert "".join(lines).count("^") == 30
    assert folded(["Phase:       running"], 10)


@given(st.text("ab, ", max_size=80), st.integers(1, 40), st.integers(0, 60))
def test_folding_loses_nothing(line: str, width: int, indent: int) -> None:
    lines = fold(line, width, indent)
    assert "".join("".join(lines).split()) == "".join(line.split())
    assert all(len(part) <= width for part in lines)


def test_colours_do_not_count_as_width() -> None:
    rows = [{"n": "running", "r": "x"}]
    plain, coloured = table_lines((NAMES, WHY), rows), table_lines((NAMES, WHY), rows, colour=True)
    assert [click.unstyle(line) for line in coloured] == plain
    assert coloured != plain


def test_show_says_nothing_on_stdout_when_there_is_nothing() -> None:
    @click.command()
    def command() -> None:
        show({"items": []}, "table", "job", (), empty="no jobs")

    result = CliRunner().invoke(command)
    assert (result.stdout, result.stderr) == ("", "no jobs\n")


def too_busy() -> str:
    error = CtlError("alice has 32 requests under way; nothing was changed", Exit.REFUSED)
    error.kind = "limit"
    raise error


def test_a_wait_goes_on_while_there_are_too_many_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it waits for was accepted before."""
    monkeypatch.setattr(waiting, "POLL", 0.0)
    states = iter(["", "forming", "", "running"])
    assert wait(lambda: next(states) or too_busy(), lambda s: s == "running", lambda s: s, 5.0, "starting") == "running"
    assert capsys.readouterr().err == "forming\n"
    with pytest.raises(WaitTimedOutError, match="starting: not so after 0s; alice has 32 requests"):
        wait(too_busy, lambda _: False, lambda s: s, 0.0, "starting")


def test_a_wait_tells_changes_once_and_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter(["forming", "forming", "running"])
    assert wait(lambda: next(states), lambda s: s == "running", lambda s: s, 5.0, "starting") == "running"
    assert capsys.readouterr().err == "forming\n"
    with pytest.raises(WaitTimedOutError, match="starting: not so after 0s; forming"):
        wait(lambda: "forming", lambda _: False, lambda s: s, 0.0, "starting")
