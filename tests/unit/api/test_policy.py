"""The site's rules about jobs."""

from __future__ import annotations

import grp
import os
from dataclasses import replace

import pytest

from nodeagent.api import policy
from nodeagent.api.errors import ApiError
from nodeagent.model.job import Quota
from nodeagent.spec.limitsconfig import LimitsConfig, SubmitConfig
from tests.unit.api.fakes import spec
from tests.unit.api.test_auth import OPERATOR, OTHER, OWNER


def test_everybody_may_submit_unless_the_site_says_who() -> None:
    policy.may_submit_at_all(OWNER, LimitsConfig(), "n1")
    only = LimitsConfig(submit=SubmitConfig(users=("alice",)))
    policy.may_submit_at_all(OWNER, only, "n1")
    policy.may_submit_at_all(OPERATOR, only, "n1")
    with pytest.raises(ApiError, match=r"bob may not submit jobs: limits\.submit in the config of node n1"):
        policy.may_submit_at_all(OTHER, only, "n1")


def test_members_of_a_group_may_submit() -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    member = replace(OTHER, gid=os.getgid())
    policy.may_submit_at_all(member, LimitsConfig(submit=SubmitConfig(groups=(group,))), "n1")
    with pytest.raises(ApiError, match=r"limits\.submit"):
        policy.may_submit_at_all(member, LimitsConfig(submit=SubmitConfig(groups=("no-such-group",))), "n1")


def test_a_job_may_not_ask_for_more_nodes_than_the_site_allows() -> None:
    two = LimitsConfig(nodes_per_job=2)
    policy.within_policy(OWNER, spec(high=2), two, "n1")
    policy.within_policy(OPERATOR, spec(high=3), two, "n1")
    with pytest.raises(ApiError, match=r"up to 3 nodes; limits\.nodes_per_job in the config of node n1 is 2"):
        policy.within_policy(OWNER, spec(high=3), two, "n1")


@pytest.mark.parametrize("priority", [-5, 0])
def test_everybody_may_stand_back(priority: int) -> None:
    policy.within_policy(OWNER, spec(priority=priority), LimitsConfig(), "n1")


def test_only_operators_prefer_jobs() -> None:
    policy.within_policy(OPERATOR, spec(priority=1), LimitsConfig(), "n1")
    with pytest.raises(ApiError, match="priority 1; priorities above 0 are for operators") as raised:
        policy.within_policy(OWNER, spec(priority=1), LimitsConfig(), "n1")
    assert raised.value.status == 403


def test_operators_have_no_quota() -> None:
    assert policy.quota(OPERATOR, LimitsConfig()) is None
    assert policy.quota(OWNER, LimitsConfig(jobs=3, job_bytes=1_000_000)) == Quota(jobs=3, bytes=1_000_000)
