"""Events in lines."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner

from nodeagent.ctl.events import _text, event_line
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import printable

EVENT = {
    "id": "1700000000000-0", "kind": "GenerationForming", "job": "digits", "node": "", "generation": 3,
    "text": "n2 is lost (its lease has lapsed); the gang is formed anew on n1, n3",
}  # fmt: skip


def test_an_event_is_one_line_where_no_width_is_to_be_kept() -> None:
    line = event_line(EVENT)
    assert line.endswith(f"  GenerationForming   job/digits generation 3  {EVENT['text']}")
    assert "\n" not in line and event_line(EVENT, wide=True) == f"{EVENT['id']}  {line}"


@pytest.mark.parametrize(("width", "indent"), [(80, 41), (69, 41), (60, 4)])
def test_on_a_terminal_it_is_folded_below_its_sentence(width: int, indent: int) -> None:
    first, *more = event_line(EVENT, width=width).split("\n")
    assert more and all(len(line) <= width for line in (first, *more))
    assert {len(line) - len(line.lstrip()) for line in more} == {indent}
    assert " ".join([first, *(line.strip() for line in more)]) == event_line(EVENT)


def test_no_text_looks_like_another_event() -> None:
    forged = EVENT | {"text": "why\n2026-11-25 12:00:00  JobDeleted          job/digits"}
    line = event_line(forged)
    assert "\n" not in line and line.endswith("why\\n2026-11-25 12:00:00  JobDeleted          job/digits")


def test_as_yaml_it_reads_back_as_it_was() -> None:
    odd = EVENT | {"text": "a\u200eb"}
    assert yaml.safe_load(printable(_text(odd, "yaml"))) == odd


def test_the_help_speaks_of_no_argument_that_is_not_there() -> None:
    assert "argument" not in CliRunner().invoke(cli, ["events", "--help"]).output
