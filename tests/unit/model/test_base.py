"""What is said of records of others that do not fit."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from nodeagent.model.base import ERRORS_MAX, Listed, Record, first_error


class Entry(Record):
    number: int
    name: str = ""


class Several(Record):
    entries: Listed[Entry]
    names: dict[str, int] = {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ("{}", "entries: Field required"),
        ('{"entries": [{"number": 1}, {}, {}]}', "entries.1.number: Field required"),
        ('{"entries": [{"number": "x", "name": 5}]}', "entries.0.number: Input should be a valid integer (and 1 more)"),
        ('{"entries": [], "new\\nline": 1}', "new\\nline: Extra inputs are not permitted"),
        (json.dumps({"entries": [], "names": dict.fromkeys(map(str, range(ERRORS_MAX + 1)), "")}), "101 mistakes"),
    ],
)
def test_the_first_mistake_is_named_alone(text: str, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Several.from_json(text)
    assert first_error(caught.value) == named


def test_what_it_names_is_cut() -> None:
    with pytest.raises(ValidationError) as caught:
        Several.from_json('{"entries": [], "%s": 1}' % ("\\u00e9" * 100_000))
    assert len(first_error(caught.value)) <= 1200
