"""The known word that a person meant, and what it costs to find none for a stranger."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nodeagent.api.errors import unknown
from nodeagent.spec.errors import CheckError, closest, did_you_mean, raise_all
from nodeagent.spec.jobfile import JobFile
from tests.profiled import calls_of

MOST_CALLS = 40_000
"""Calls of one search: some milliseconds."""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("comand", "command"),
        ("comamnd", "command"),
        ("Working-Dir", "working_dir"),
        ("workdir", "working_dir"),
        ("polices", "policies"),
        ("preloads", "preload"),
        ("nodse", "nodes"),
        ("xyzzy", None),
        ("", None),
        ("command" * 10, None),
    ],
)
def test_the_word_that_was_meant(word: str, meant: str | None) -> None:
    assert closest(word, JobFile.model_fields) == meant


def test_of_many_names_the_nearest_is_found() -> None:
    names = [f"train-{i:04}" for i in range(1500)] + ["resnet50", "llama-7b"]
    assert closest("resnet5O", names) == "resnet50"
    assert closest("lama-7b", names) == "llama-7b"
    assert unknown("job", "resent50", names).next_step == "did you mean 'resnet50'?"


def test_a_word_is_compared_with_what_is_not_text_of_its_length() -> None:
    assert closest("a", ["", "b" * 70]) is None
    assert did_you_mean("a", ["", "b"]) == "known are , b"


ALIKE = [f"{'a' * 28}{i:07b}{'a' * 28}".replace("0", "a").replace("1", "b") for i in range(100)]
LONG = [f"{'ab' * 25}{i:07b}".replace("0", "a").replace("1", "b") for i in range(5000)]


@pytest.mark.parametrize("names", [ALIKE, LONG, ["a" * 64] * 5000, ["a" * 500_000]])
@pytest.mark.parametrize("word", [("ab" * 100)[:145], "ab" * 32, "a" * 63, "ab" * 500_000])
def test_no_word_costs_much_whatever_is_known(word: str, names: Sequence[str]) -> None:
    assert calls_of(lambda: unknown("job", word, names)) < MOST_CALLS
    assert calls_of(lambda: closest(word, names)) < MOST_CALLS


def test_of_a_list_without_end_the_first_mistakes_are_raised() -> None:
    made = 0

    def mistakes() -> CheckError:
        nonlocal made
        made += 1
        return CheckError(f"mistake {made}")

    with pytest.raises(CheckError, match=r"mistake 1$") as raised:
        raise_all(iter(mistakes, None))
    assert (made, len(raised.value.also)) == (100, 99)
