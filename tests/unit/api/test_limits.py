"""The site's rules about jobs."""

from __future__ import annotations

import grp
import os
from dataclasses import replace

import pytest

from nodeagent.api import limits
from nodeagent.api.errors import ApiError
from nodeagent.model.job import Quota
from nodeagent.model.jobspec import RestartLimits
from nodeagent.spec.sections import LimitsConfig, SubmitConfig
from tests.unit.api.fakes import spec
from tests.unit.api.test_auth import OPERATOR, OTHER, OWNER


def test_everybody_may_submit_unless_the_site_says_who() -> None:
    limits.may_submit_at_all(OWNER, LimitsConfig(), "n1")
    only = LimitsConfig(submit=SubmitConfig(users=("alice",)))
    limits.may_submit_at_all(OWNER, only, "n1")
    limits.may_submit_at_all(OPERATOR, only, "n1")
    with pytest.raises(ApiError, match=r"bob may not submit jobs: limits\.submit in the config of node n1"):
        limits.may_submit_at_all(OTHER, only, "n1")


def test_members_of_a_group_may_submit() -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    member = replace(OTHER, gid=os.getgid())
    limits.may_submit_at_all(member, LimitsConfig(submit=SubmitConfig(groups=(group,))), "n1")
    with pytest.raises(ApiError, match=r"limits\.submit"):
        limits.may_submit_at_all(member, LimitsConfig(submit=SubmitConfig(groups=("no-such-group",))), "n1")


def test_a_job_may_not_ask_for_more_nodes_than_the_site_allows() -> None:
    two = LimitsConfig(nodes_per_job=2)
    limits.within_policy(OWNER, spec(high=2), two, "n1")
    limits.within_policy(OPERATOR, spec(high=3), two, "n1")
    with pytest.raises(ApiError, match=r"up to 3 nodes; limits\.nodes_per_job in the config of node n1 is 2"):
        limits.within_policy(OWNER, spec(high=3), two, "n1")


def test_a_job_may_not_ask_for_more_restarts_than_the_site_allows() -> None:
    site = LimitsConfig(restarts_per_job=5)
    limits.within_policy(OWNER, spec(restarts=RestartLimits(max=5)), site, "n1")
    limits.within_policy(OPERATOR, spec(restarts=RestartLimits(max=60)), site, "n1")
    limits.within_policy(OWNER, spec(restarts=RestartLimits(max=60)), LimitsConfig(), "n1")
    asks = r"asks for 10 restarts within 3600 s; limits\.restarts_per_job in the config of node n1 is 5"
    with pytest.raises(ApiError, match=asks) as refused:
        limits.within_policy(OWNER, spec(), site, "n1")
    assert "restarts: {max: 5}" in refused.value.next_step


def test_a_short_window_does_not_get_around_the_limit_of_restarts() -> None:
    site = LimitsConfig(restarts_per_job=5)
    limits.within_policy(OWNER, spec(restarts=RestartLimits(max=5, window=7200.0)), site, "n1")
    with pytest.raises(ApiError, match=r"5 restarts within 3599 s; .* is 5, within 3600 s or longer"):
        limits.within_policy(OWNER, spec(restarts=RestartLimits(max=5, window=3599.0)), site, "n1")
    limits.within_policy(OWNER, spec(restarts=RestartLimits(max=0, window=60.0)), site, "n1")


@pytest.mark.parametrize("priority", [-5, 0])
def test_everybody_may_stand_back(priority: int) -> None:
    limits.within_policy(OWNER, spec(priority=priority), LimitsConfig(), "n1")


def test_only_operators_prefer_jobs() -> None:
    limits.within_policy(OPERATOR, spec(priority=1), LimitsConfig(), "n1")
    with pytest.raises(ApiError, match="priority 1; priorities above 0 are for operators") as raised:
        limits.within_policy(OWNER, spec(priority=1), LimitsConfig(), "n1")
    assert raised.value.status == 403


def test_operators_have_no_quota() -> None:
    assert limits.quota(OPERATOR, LimitsConfig()) is None
    assert limits.quota(OWNER, LimitsConfig(jobs=3, job_bytes=1_000_000)) == Quota(jobs=3, bytes=1_000_000)
