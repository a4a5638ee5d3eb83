"""A short soak: that the soak itself works, and two trainings under random faults."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import soak


@pytest.mark.endurance
@pytest.mark.e2e
@pytest.mark.torch
@pytest.mark.redis
@pytest.mark.timeout(1800)
def test_trainings_under_random_faults_are_exact_and_leave_nothing() -> None:
    rows = soak(180, seed=1, each=60)
    assert [text for row in rows for text in row.wrong] == []
