"""On whose time a job's workers run while the store is away."""

from __future__ import annotations

from typing import Literal

import pytest

from nodeagent.agent.view import AgentHealth
from nodeagent.api.jobpods import workers_time
from nodeagent.pods.base import PodStatus
from tests.unit.api.test_server_away import UID, health
from tests.unit.ctl import samples


def pod(phase: Literal["running", "exited"] = "running") -> PodStatus:
    return PodStatus(uid=UID, phase=phase)


CASES: list[tuple[str, AgentHealth, PodStatus | None, str, tuple[str, float, str]]] = [
    ("own lease still", health(lease_left=1.24), pod(), "n1", ("lease", 1.24, "")),
    ("lent", health(lent={UID: 2.1}), pod(), "n1", ("lent", 2.1, "")),
    (
        "refused",
        health(lease_left=0.7, not_lent={UID: "n2 is leaving"}),
        pod(),
        "n1",
        ("refused", 0.7, "n2 is leaving"),
    ),
    ("refused since", health(lent={UID: 1.5}, not_lent={UID: "no"}), pod(), "n1", ("refused", 1.5, "no")),
    ("stopped", health(not_lent={UID: "no"}), pod("exited"), "n1", ("stopped", 0.0, "no")),
    ("no pod", health(), None, "n1", ("stopped", 0.0, "")),
    ("not a member", health(lease_left=1.0), None, "n3", ("elsewhere", 0.0, "")),
]


@pytest.mark.parametrize(("_case", "now", "here", "node", "answered"), CASES, ids=[c[0] for c in CASES])
def test_on_whose_time(
    _case: str, now: AgentHealth, here: PodStatus | None, node: str, answered: tuple[str, float, str]
) -> None:
    state, left, why = answered
    assert workers_time(samples.job(), node, now, here) == (state, node, left, why)


def test_nothing_is_reported_of_time_while_the_store_answers_or_nothing_trains() -> None:
    assert workers_time(samples.job(), "n1", health(since=None), pod()) is None
    assert workers_time(samples.FAILED, "n1", health(), None) is None
    assert workers_time(samples.HOLDING, "n1", health(), None) is None
