"""Cells, durations, waits."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from nodeagent.ctl.errors import TimedOutError
from nodeagent.ctl.options import Duration
from nodeagent.ctl.output import Column, show, span, table_lines
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


@pytest.mark.parametrize("text", ["", "soon", "5 m", "-3s", "3x", "m5"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="1h30m"):
        Duration().convert(text, None, None)


def test_plain_tables_are_never_cut() -> None:
    columns = (Column("NAME", lambda r: r["n"]), Column("REASON", lambda r: r["r"]))
    lines = table_lines(columns, [{"n": "a", "r": "x" * 500}, {"n": "longer", "r": None}])
    assert lines == ["NAME     REASON", "a        " + "x" * 500, "longer   -"]


def test_show_says_nothing_on_stdout_when_there_is_nothing() -> None:
    @click.command()
    def command() -> None:
        show({"items": []}, "table", "job", (), empty="no jobs")

    result = CliRunner().invoke(command)
    assert (result.stdout, result.stderr) == ("", "no jobs\n")


def test_a_wait_tells_changes_once_and_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter(["forming", "forming", "running"])
    assert wait(lambda: next(states), lambda s: s == "running", lambda s: s, 5.0, "starting") == "running"
    assert capsys.readouterr().err == "forming\n"
    with pytest.raises(TimedOutError, match="starting: not so after 0s; forming"):
        wait(lambda: "forming", lambda _: False, lambda s: s, 0.0, "starting")
