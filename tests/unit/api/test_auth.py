"""Who may change what."""

from __future__ import annotations

import grp
import os

import pytest

from nodeagent.api import auth
from nodeagent.api.errors import ApiError
from nodeagent.spec.agentconfig import JobsConfig
from tests.unit.api.test_intents import job

OWNER = auth.Caller(uid=1000, gid=1000, name="alice", operator=False, trusted=False)
OTHER = auth.Caller(uid=1001, gid=1001, name="bob", operator=False, trusted=False)
OPERATOR = auth.Caller(uid=1002, gid=1002, name="olga", operator=True, trusted=False)
ROOT = auth.Caller(uid=0, gid=0, name="root", operator=True, trusted=True)
STRICT, LAX = JobsConfig(), JobsConfig(allow_root=True)


@pytest.mark.parametrize(("who", "may"), [(OWNER, True), (OTHER, False), (OPERATOR, True), (ROOT, True)])
def test_jobs(who: auth.Caller, may: bool) -> None:
    if may:
        auth.may_change_job(who, job())
    else:
        with pytest.raises(ApiError, match="belongs to") as raised:
            auth.may_change_job(who, job())
        assert raised.value.status == 403


@pytest.mark.parametrize(("who", "may"), [(OWNER, False), (OPERATOR, True), (ROOT, True)])
def test_nodes(who: auth.Caller, may: bool) -> None:
    if may:
        auth.may_change_nodes(who, "n1")
    else:
        with pytest.raises(ApiError, match="may not change node n1") as raised:
            auth.may_change_nodes(who, "n1")
        assert raised.value.status == 403


SUBMIT = [
    (OWNER, "alice", STRICT, None),
    (OWNER, "1000", STRICT, None),
    (OWNER, "bob", STRICT, "may not run a job as 'bob'"),
    (OWNER, "root", LAX, "may not run a job as 'root'"),
    (OPERATOR, "alice", STRICT, "may not run a job as 'alice'"),
    (ROOT, "alice", STRICT, None),
    (ROOT, "root", STRICT, "allow_root"),
    (ROOT, "0", STRICT, "allow_root"),
    (ROOT, "root", LAX, None),
]


@pytest.mark.parametrize(("who", "user", "config", "refused"), SUBMIT)
def test_submitting_for(who: auth.Caller, user: str, config: JobsConfig, refused: str | None) -> None:
    if refused is None:
        auth.may_submit(who, user, config)
    else:
        with pytest.raises(ApiError, match=refused):
            auth.may_submit(who, user, config)


def test_a_uid_without_a_name_submits_nothing() -> None:
    """No node could run its job: a pod's user is looked up by name."""
    unnamed = auth.Caller(uid=100_001, gid=100_001, name="100001", operator=False, trusted=False)
    with pytest.raises(ApiError, match="uid 100001 has no name in the user database of this node") as refused:
        auth.may_submit(unnamed, "100001", STRICT)
    assert refused.value.status == 403 and "id -un" in refused.value.next_step
    auth.may_submit(ROOT, "100001", STRICT)


def test_identify() -> None:
    me, group = os.geteuid(), grp.getgrgid(os.getgid()).gr_name
    assert auth.identify(me, os.getgid(), STRICT, me).trusted
    assert auth.identify(0, 0, STRICT, 4242).operator
    stranger = auth.identify(54321, 54321, STRICT, 4242)
    assert (stranger.name, stranger.operator, stranger.trusted) == ("54321", False, False)
    named = JobsConfig(operators=group)
    assert auth.identify(54321, os.getgid(), named, 4242).operator
    assert not auth.identify(54321, 54321, JobsConfig(operators="no-such-group"), 4242).operator
