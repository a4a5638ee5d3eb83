"""An agent's check of a job that somebody wrote by hand: it runs in the loop, whatever the job says."""

from __future__ import annotations

import sys

import pytest

from nodeagent.model.jobspec import MOST_ROLES, JobSpec, Nodes, Role, Submitter
from nodeagent.spec.jobcheck import MOST_PROBLEMS, check_spec

ONE = Nodes(min=1, max=1, target=1)


def job(after: dict[str, tuple[str, ...]]) -> JobSpec:
    """With these roles, and the roles that each comes after."""
    return JobSpec(
        name="a",
        roles=tuple(Role(name=name, command=("x",), nodes=ONE, after=before) for name, before in after.items()),
        working_dir="/w",
        user="u",
        submitter=Submitter(user="u", uid=1, gid=1, host="h", cwd="/w"),
    )


def dense(count: int) -> JobSpec:
    """Each role comes after all before it."""
    return job({f"r{i}": tuple(f"r{j}" for j in range(i)) for i in range(count)})


def calls_for(spec: JobSpec) -> int:
    """Calls, Python's and C's, while the job is checked."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        assert check_spec(spec) == []
    finally:
        sys.setprofile(before)
    return calls


def test_roles_that_come_after_all_others_cost_no_more_than_what_was_written() -> None:
    calls_for(dense(2))  # what the first one alone does
    assert calls_for(dense(MOST_ROLES)) < 2.5 * calls_for(dense(MOST_ROLES // 2))


@pytest.mark.parametrize("roles", [MOST_ROLES + 1, 100])
def test_a_job_of_more_roles_than_a_person_writes_is_refused(roles: int) -> None:
    (problem,) = check_spec(dense(roles))
    assert problem == f"roles: {roles} roles, a job has {MOST_ROLES} at most: give one several places"
    assert check_spec(dense(MOST_ROLES)) == []


@pytest.mark.parametrize(("roles", "most"), [(2, 4096), (4, 2048), (16, 512)])
def test_places_of_many_roles_are_bounded_together(roles: int, most: int) -> None:
    def of(places: int) -> JobSpec:
        size = Nodes(min=1, max=places, target=places)
        one = Role(name="r", command=("x",), nodes=size)
        names = [f"r{i}" for i in range(roles)]
        return job({"a": ()}).model_copy(update={"roles": tuple(one.model_copy(update={"name": n}) for n in names)})

    assert check_spec(of(most // roles)) == []
    (problem,) = check_spec(of(most // roles + 1))
    assert problem.endswith(f"a job of {roles} roles has {most} places at most, all roles together")


def test_a_circle_of_roles_is_named_once_by_its_shortest_way() -> None:
    found = check_spec(job({"a": ("c",), "b": ("a",), "c": ("b", "d"), "d": ("b",)}))
    assert [one for one in found if "none of them" in one] == [
        "roles.a.after: a after c after b after a: none of them could start, remove one of these"
    ]


def test_no_more_reasons_are_looked_for_than_a_person_reads() -> None:
    assert len(check_spec(job({"a": tuple(f"b{i}" for i in range(1000)), "c": ()}))) == MOST_PROBLEMS


def test_of_a_job_that_is_too_large_nothing_else_is_looked_at() -> None:
    spec = job({"a": ()}).model_copy(update={"env": {"A B": "x" * 300_000}})
    (problem,) = check_spec(spec)
    assert "more than 262144 (256 KiB)" in problem


def test_what_is_no_text_is_named() -> None:
    """As the tool gets it from a command line and from its folder: it ended with a traceback."""
    spec = job({"a": ()})
    role = spec.roles[0].model_copy(update={"command": ("python", "\udcff.py")})
    changed = spec.model_copy(update={"roles": (role,), "working_dir": "/d\udcff", "env": {"A": "\udc80"}})
    right = "has bytes that are not UTF-8 text: use another name"
    assert sorted(check_spec(changed)) == [
        f"env.A: '\\udc80' {right}", f"roles[0].command[1]: '\\udcff.py' {right}", f"working_dir: '/d\\udcff' {right}",
    ]  # fmt: skip
