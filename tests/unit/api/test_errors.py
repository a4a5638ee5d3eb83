"""How the store's refusals reach a person: the status, which the tool maps to its exit code, and the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.api.errors import from_refused, store_away
from nodeagent.store.base import StoreBusyError, StoreRefusedError
from tests.unit.api.fakes import FakeView


@pytest.mark.parametrize(
    ("code", "status", "step"),
    [("recovering", 503, "when that is over"), ("not_found", 404, "nodeagentctl get"), ("busy", 409, "again")],
)
def test_a_refusal_says_what_to_do(code: str, status: int, step: str) -> None:
    error = from_refused(StoreRefusedError(code, "why not"))
    assert (error.status, str(error)) == (status, "why not")
    assert step in error.next_step


async def test_who_had_no_turn_at_the_store_is_not_called_away_from_it(tmp_path: Path) -> None:
    error = store_away(FakeView(tmp_path), "unknown", StoreBusyError("the store answers late"))
    assert (error.status, error.code) == (429, "limit")
    assert str(error) == "node n1: the store answers late; nothing was changed"
