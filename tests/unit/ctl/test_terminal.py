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


def test_a_colour_of_others_ends_with_its_line() -> None:
    """It does not colour what is printed below it, nor the prompt after that."""
    assert shown("Why: \x1b[1;31mred\nNext: wait") == "Why: \x1b[1;31mred\x1b[0m\nNext: wait\n"
    assert shown("Why: \x1b[0;33m\x1b[0mplain\x1b[32m") == "Why: \x1b[0;33m\x1b[0mplain\x1b[32m\x1b[0m\n"
    assert shown(f"{click.style('error', fg='red', bold=True)}  fix it") == "\x1b[31m\x1b[1merror\x1b[0m  fix it\n"


@pytest.mark.parametrize("look", ["30", "37", "97", "1;30", "8", "31;8", "7", "40", "38;5;0", "38;2;0;0;0"])
def test_in_what_others_wrote_nothing_is_hidden(look: str) -> None:
    assert shown(f"\x1b[{look}mx") == f"\\u001b[{look}mx\n"


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


def test_a_worker_colours_nothing_but_its_own_text() -> None:
    assert worker_text("\x1b[31m10%\r20%", "[0] ") == "\x1b[31m10%\x1b[0m\r[0] 20%\x1b[0m"
    assert worker_text("\x1b[31m10%\r20%") == "\x1b[31m10%\r20%\x1b[0m", "where nothing stands before it"


@pytest.mark.parametrize(
    ("look", "kept"),
    [
        ("", True), ("01;31", True), ("38;5;8", True), ("1;48;5;8", True), ("38;2;8;8;8;4", True), ("30;42", True),
        ("8", False), ("08", False), ("1;8", False), ("8;31", False), ("38;5;8;8", False), ("48;5;38;5;8", False),
        ("38;2;1;8", False), ("38;8", False), ("1;" * 12 + "1", False),
    ],
)  # fmt: skip
def test_no_worker_conceals_its_text(look: str, kept: bool) -> None:
    assert worker_text(f"\x1b[{look}mx") == (f"\x1b[{look}mx\x1b[0m" if kept else f"\\u001b[{look}mx\x1b[0m")
