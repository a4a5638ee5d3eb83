"""What others wrote reaches a terminal as text, whatever it holds."""

from __future__ import annotations

import json
import unicodedata

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.ctl.jobtext import job_lines
from nodeagent.ctl.output import dump, text
from nodeagent.ctl.terminal import echo, printable, worker_text
from tests.unit.ctl import samples

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[1A\rforged\x9b31m\u202egnp.exe\x08"


@given(st.text())
def test_nothing_but_text_line_ends_and_tabs_is_left(value: str) -> None:
    shown = printable(value)
    assert {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} <= {"\n", "\t"}
    assert not set(shown) & set("\x1b\x07\x08\r\x9b\u202e\u2066\x7f")


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_stays_the_same_json(value: object) -> None:
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value


def shown(words: str) -> str:
    @click.command()
    def command() -> None:
        echo(words)

    return CliRunner().invoke(command, color=True).output


def test_escape_sequences_are_shown_and_our_own_colours_work() -> None:
    out = shown(EVIL + click.style("running", fg="green"))
    assert out.count("\x1b") == 2, "the colour and its end"
    assert "\\u001b]0;owned\\u0007\\u001b[2J" in out
    assert "forged\\u009b31m\\u202egnp.exe\\u0008" in out
    assert "\x1b" not in shown("\x1b[8m hidden")


def test_a_cell_is_one_line() -> None:
    assert text("fine\nNext: nothing is wrong") == "fine\\nNext: nothing is wrong"


def test_a_reason_cannot_forge_a_line_of_describe() -> None:
    forged = "\x1b[2Jfine\nNext:        nothing is wrong"
    lines = job_lines(samples.detail(samples.job(reason=forged)))
    assert sum(line.startswith("Next:") for line in lines) == 1
    assert not any("\x1b" in line or "\n" in line for line in lines)


@pytest.mark.parametrize("fmt", ["json", "yaml"])
def test_data_is_neither_changed_nor_sent_raw(fmt: str) -> None:
    import yaml

    @click.command()
    def command() -> None:
        dump({"reason": EVIL}, fmt)

    out = CliRunner().invoke(command).output
    assert not set(out) & set("\x1b\x07\x9b\u202e")
    assert (json.loads(out) if fmt == "json" else yaml.safe_load(out)) == {"reason": EVIL}


def test_a_workers_line_keeps_its_colours_and_shows_where_its_progress_bar_stands() -> None:
    assert worker_text(" 10%\r 20%\r", "[0] ") == " 10%\r[0]  20%\r[0] "
    assert worker_text("\x1b[38;5;9mloss\x1b[0m \x1b[2J") == "\x1b[38;5;9mloss\x1b[0m \\u001b[2J\x1b[0m"
    assert worker_text("[3]<stdout>: x\x1b[1A") == "[3]<stdout>: x\\u001b[1A\x1b[0m"
