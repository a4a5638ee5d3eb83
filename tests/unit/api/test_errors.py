"""How the store's refusals reach a person: the status, which the tool maps to its exit code, and the next step."""

from __future__ import annotations

import pytest

from nodeagent.api.errors import from_refused
from nodeagent.store.base import StoreRefusedError


@pytest.mark.parametrize(
    ("code", "status", "step"),
    [("recovering", 503, "when that is over"), ("not_found", 404, "nodeagentctl get"), ("busy", 409, "again")],
)
def test_a_refusal_says_what_to_do(code: str, status: int, step: str) -> None:
    error = from_refused(StoreRefusedError(code, "why not"))
    assert (error.status, str(error)) == (status, "why not")
    assert step in error.next_step
