"""Every door of a stranger takes anything: a short look at each. ``make fuzz MINUTES=60`` looks longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.api import check
from tests.fuzz.mutate import inputs
from tests.fuzz.targets import API, REQUESTS, TARGETS, Target

pytestmark = pytest.mark.usefixtures("api_ended")
NAMES = [target.name for target in TARGETS]


@pytest.fixture(scope="module")
def api_ended() -> Iterator[None]:
    yield
    API.close()


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_the_examples_are_taken(target: Target) -> None:
    for seed in target.seeds:
        target.take(seed)
    for word in (b"", *target.words):
        target.take(word)


@pytest.mark.parametrize("request_sent", REQUESTS)
def test_the_requests_that_are_mutated_are_ones_that_are_answered(request_sent: bytes) -> None:
    assert API.ask(request_sent, patience=30.0).split(b" ", 2)[1] in (b"200", b"404", b"409")


def test_an_answer_that_blames_the_agent_is_found() -> None:
    with pytest.raises(AssertionError):
        check(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(ValueError, match="Expecting"):
        check(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{x")


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_anything_is_taken_or_refused_in_order(target: Target) -> None:
    @settings(max_examples=60)
    @given(st.data())
    def take(data: st.DataObject) -> None:
        target.take(data.draw(inputs(target)))

    take()
