"""YAML without traps: what scalars mean, where things stand, what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.spec import yamlfile
from nodeagent.spec.errors import SpecError
from nodeagent.spec.yamlfile import YamlPlace, load, scalar
from tests.unit.spec.helpers import problems, unmark


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("010", "010"),
        ("0", 0),
        ("-7", -7),
        ("0x1f", "0x1f"),
        ("0o17", "0o17"),
        ("0b1", "0b1"),
        ("1_000", "1_000"),
        ("12:30:00", "12:30:00"),
        ("2:8", "2:8"),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("01.5", "01.5"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    got = scalar(text)
    assert got == value
    assert type(got) is type(value)
    if text:
        assert load(f"a: {text}", "f").value == {"a": value}


def test_quoted_is_text_and_keys_are_text() -> None:
    document = load("on: '4'\n1: \"true\"\ntrue: |\n  x\nno: [1, a]", "f")
    assert document.value == {"on": "4", "1": "true", "true": "x\n", "no": [1, "a"]}


def test_every_key_and_value_has_its_place() -> None:
    document = load("a: 1\nb:\n  c: [x, {d: 2}]\n", "f")
    assert document.keys == {
        ("a",): YamlPlace(1, 1),
        ("b",): YamlPlace(2, 1),
        ("b", "c"): YamlPlace(3, 3),
        ("b", "c", 1, "d"): YamlPlace(3, 11),
    }
    assert document.values[("b", "c", 0)] == YamlPlace(3, 7)
    assert document.values[("b", "c", 1, "d")] == YamlPlace(3, 14)
    assert document.place(("b", "c", 1, "missing")) == YamlPlace(3, 10)
    assert document.raw[("a",)] == "1"


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("a: 1\n>>\tb: 2", "a tab, indent with spaces"),
        ("a: b>>: c", "a ':' where none can be"),
        ("a:\n  b: 1\n >>c: 2", "does not belong"),
        ("a: [1, 2\nb>>: 3", "not closed here"),
        ("a: {b: 1\n>>", "closing bracket"),
        ("a: 'x>>", "inside of quotes"),
        ("a: >>@x", "put the text in quotes"),
        ("a: >>*b", "undefined alias 'b', define it above as &NAME"),
        ("a: 1\n>>---\nb: 1", "second document"),
        ("a: >>!!python/object:os.system x", "the tag !!python/object:os.system is not allowed"),
        ("a: >>!!int '4'", "the tag !!int"),
        ("a: >>!!str 4", "the tag !!str"),
        ("a: >>!mine 4", "the tag !mine"),
        ("a: >>- b", "start the list on a line of its own"),
        ("a: x\nb: >>\x07", "U+0007"),
        ("[" * 32 + ">>[" + "[" * 40, "more than 32 levels"),
    ],
)
def test_broken_syntax_says_where(marked: str, words: str) -> None:
    text, places = unmark(marked)
    (found,) = problems(lambda: load(text, "f"))
    assert (found.line, found.col) == places[0], found
    assert words in str(found)
    assert str(found).startswith(f"f:{found.line}:{found.col}: ")


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("a: 1\n>>a: 2", "the key 'a' is given twice (first in line 1, column 1)"),
        ("x:\n  a: 1\n  b: 1\n  >>a: 2", "first in line 2, column 3"),
        (">>[1]: 2", "not a word"),
        (">><<: &x {a: 1}", "merge key"),
        ("a: >>&a [*a]", "alias inside"),
    ],
)
def test_readable_but_wrong_is_collected(marked: str, words: str) -> None:
    text, places = unmark(marked)
    (found,) = load(text, "f").problems
    assert (found.line, found.col) == places[0]
    assert words in str(found)


def test_aliases_work_but_not_as_a_bomb() -> None:
    assert load("a: &x [1, 2]\nb: *x", "f").value == {"a": [1, 2], "b": [1, 2]}
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    for i in range(1, 9):
        bomb += f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n"
    (found,) = problems(lambda: load(bomb, "f"))
    assert "once aliases are followed" in found.what


@pytest.mark.parametrize("marked", ['a: >>"\\uD800"', 'a: 1\n>>"\\uDC80": 2', 'a: [1, >>"x\\uD83D"]'])
def test_half_of_a_character_is_refused_alone(marked: str) -> None:
    text, places = unmark(marked)
    (found,) = problems(lambda: load(text, "f"))
    assert (found.line, found.col) == places[0]
    assert "is half of a character" in found.what


def test_long_numbers_stay_what_is_written() -> None:
    assert load("a: " + "9" * 32, "f").value == {"a": int("9" * 32)}
    assert load("a: " + "9" * 5000, "f").value == {"a": "9" * 5000}, "no number: Python reads none as long"


def test_size_is_bounded() -> None:
    (found,) = problems(lambda: load("a: " + "x" * yamlfile.MAX_BYTES, "f"))
    assert "larger than 128 KiB" in found.what


def test_empty() -> None:
    assert load("", "f").value is None
    assert load("# only words\n", "f").value is None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab:- \n\t[]{}&*!|>'\"%@`#?,<0179.e\\\x00é", max_size=60))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        load(text, "f")
    except SpecError as error:
        assert all(p.line >= 1 and p.col >= 1 and p.what for p in error.problems)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcno", max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text("abcno", max_size=4), _JSON, max_size=4))
def test_json_is_read_as_json(value: dict[str, object]) -> None:
    document = load(json.dumps(value), "f")
    assert document.value == value
    assert not document.problems
