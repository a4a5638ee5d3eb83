"""Specs that somebody writes to keep the agent's loop busy: what is refused costs little, and so does its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nodeagent.api.errors import ApiError
from nodeagent.api.requests import MAX_BODY
from nodeagent.api.submit import laid_out, read, read_spec
from nodeagent.model.jobspec import MOST_JOBS
from nodeagent.spec.jobcheck import MOST_ENTRIES, MOST_PROBLEMS, MOST_VALUES, check_spec
from tests.profiled import calls_of
from tests.unit.api.fakes import spec

GOOD: dict[str, Any] = spec().model_dump(mode="json", exclude={"submitter"})
SUBMITTER: dict[str, Any] = spec().submitter.model_dump(mode="json")
ROLE: dict[str, Any] = GOOD["roles"][0]
MOST_ANSWER = 64 << 10
"""Bytes of a refusal."""
MOST_CALLS = 30_000
"""Calls of a refusal: a few hundredths of a second."""
LONG = "é" * 50_000


def refusal(value: Mapping[str, Any]) -> ApiError:
    """What the agent answers to this spec."""
    try:
        problems = check_spec(read_spec(value, SUBMITTER))
    except ApiError as error:
        return error
    assert problems
    return ApiError("spec", "the job cannot run", problems=problems)


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({"preload": [0] * 400_000}, "preload: 400000 entries"),
        ({"preload": [0] * MOST_ENTRIES}, "the job: 2048 mistakes"),
        ({"preload": ["-"] * 50_000}, "preload: 50000 entries"),
        ({"preload": ["-"] * MOST_ENTRIES}, "preload: '-' is not a module's name"),
        ({"roles": [ROLE | {"command": ["\0"] * MOST_ENTRIES}]}, "roles.worker.command: a NUL"),
        ({"roles": [{}] * 100_000}, "roles: 100000 entries"),
        ({"roles": [ROLE | {"name": "r" * 100_000, "env": {f"-{i}": "" for i in range(2000)}}]}, "roles.0.name: "),
        ({f"a{i}": 0 for i in range(60_000)}, "the job: 600"),
        ({"x" * 200_000: 0}, "xxxx"),
        ({"x" * 900_000: 0}, "the job takes 900"),
        ({"env": {f"-{LONG}{i}": "" for i in range(2)}}, "env.-é"),
        ({"limits": {"a" * 1500 + str(i): 1 for i in range(110)}}, "limits.a"),
        ({"limits": {str(i): [] for i in range(MOST_ENTRIES)}}, "the job: "),
        ({"policies": [{"on": ["Unknown"] * 2000, "do": "RestartJob"}]}, "policies[0].on: Unknown and"),
        ({"policies": [{"on": ["*"] * 2000}] * 40}, f"policies: with it the job has more than {MOST_VALUES} values"),
        ({"guessed": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}, "guessed: lists and mappings are nested"),
        ({"env": {f"é{i}é" * 20: "" for i in range(600)}}, "env.é0é"),
    ],
)
def test_what_is_refused_costs_little_and_so_does_its_answer(change: dict[str, Any], begins: str) -> None:
    value = GOOD | change
    assert len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()) <= MAX_BODY
    assert calls_of(lambda: refusal(value)) < MOST_CALLS
    error = refusal(value)
    assert error.problems[0].startswith(begins), error.problems[0][:200]
    assert len(error.problems) <= MOST_PROBLEMS
    assert len(json.dumps(error.body())) < MOST_ANSWER


def test_a_few_mistakes_are_all_named() -> None:
    error = refusal(GOOD | {"preload": [0, 1], "bogus": 1})
    assert sorted(one.partition(":")[0] for one in error.problems) == ["bogus", "preload.0", "preload.1"]
    assert error.body()["error"] == {
        "code": "spec", "message": error.message, "next": error.next_step, "problems": list(error.problems)
    }  # fmt: skip


def test_a_large_job_that_a_person_may_have_is_read() -> None:
    terms = [{"label": f"l{i}", "values": [f"value-{j}" for j in range(256)]} for i in range(16)]
    large = {"env": {f"NAME_{i}": "x" * 50 for i in range(500)}, "preload": [f"a.b{i}" for i in range(500)]}
    value = GOOD | large | {"roles": [ROLE | {"command": ["x"] * 1500, "placement": {"require": terms}}]}
    assert check_spec(read_spec(value, SUBMITTER)) == []


def test_jobs_of_a_batch_that_come_after_each_other_cost_no_more_than_their_names() -> None:
    names = [f"j{i}" for i in range(MOST_JOBS)]
    rest = {key: value for key, value in GOOD.items() if key != "name"}
    body = {
        "submitter": SUBMITTER,
        "jobs": [
            {"spec": rest | {"name": name}, "after": dict.fromkeys(names[max(0, i - 63) : i], "ok")}
            for i, name in enumerate(names)
        ],
    }
    found = read(body)
    assert calls_of(lambda: laid_out(found, "base")) < 4 * 63 * MOST_JOBS


def test_jobs_of_a_batch_that_wait_for_each_other_are_named() -> None:
    rest = {key: value for key, value in GOOD.items() if key != "name"}
    after = {"a": "b", "b": "c", "c": "b", "d": "elsewhere"}
    jobs = [{"spec": rest | {"name": name}, "after": {other: "ok"}} for name, other in after.items()]
    with pytest.raises(ApiError, match=r"jobs wait for each other: (b, c, b|c, b, c)$"):
        laid_out(read({"submitter": SUBMITTER, "jobs": jobs}), "base")
