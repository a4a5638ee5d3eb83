"""What a request for output may name."""

from __future__ import annotations

import pytest

from nodeagent.api.errors import ApiError
from nodeagent.api.logs import _check_generation
from nodeagent.model.job import JobRecord
from tests.unit.plan.build import make_generation, make_job


@pytest.mark.parametrize(
    ("job", "number", "has"),
    [
        (make_job(), 1, "it has had none yet"),
        (make_job("running", make_generation(["n1"], number=1)), 9, "it has had generation 1 only"),
        (make_job("holding", make_generation(["n1"], number=4, state="forming"), active=3), 5, "generations 1 to 4"),
        (make_job("running", make_generation(["n1"], number=2)), 0, "generations 1 to 2"),
    ],
)
def test_a_generation_that_never_was_is_refused(job: JobRecord, number: int, has: str) -> None:
    with pytest.raises(ApiError, match=f"job 'a' has no generation {number}: .*{has}") as refused:
        _check_generation(job, number)
    assert refused.value.code == "not_found"


@pytest.mark.parametrize("number", [None, 1, 4])
def test_each_that_was_may_be_asked_for(number: int | None) -> None:
    _check_generation(make_job("running", make_generation(["n1"], number=4)), number)
