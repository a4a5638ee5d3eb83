"""Jobs that are tied to a time and to each other, and several in one file."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from nodeagent.model.jobspec import MOST_JOBS
from nodeagent.spec import jobvalues
from nodeagent.spec.errors import CheckError
from tests.unit.spec.helpers import check_marked, job, jobs, problems

LEAST = "name: a\ncommand: [python, t.py]\nnodes: 1\n"


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("begin: +2h", "begin", None),
        ("begin: 2030-01-31T22:00Z", "begin", datetime(2030, 1, 31, 22, tzinfo=UTC).timestamp()),
        ("begin: 2030-01-31 22:00+01:00", "begin", datetime(2030, 1, 31, 21, tzinfo=UTC).timestamp()),
        ("ttl: 1h", "ttl", 3600.0),
        ("ttl: 0", "ttl", 0.0),
    ],
)
def test_times(line: str, key: str, value: object) -> None:
    assert getattr(job(LEAST + line), key) == value


def test_a_time_from_now_is_left_to_who_takes_the_job() -> None:
    """The clock here may be wrong."""
    assert jobs(LEAST + "begin: +2h")[0].begin_in == 7200.0
    assert jobs(LEAST + "begin: 2030-01-31T22:00Z")[0].begin_in is None
    assert jobs(LEAST)[0].begin_in is None


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("after: prepare", {"prepare": "ok"}),
        ("after: [prepare, other]", {"prepare": "ok", "other": "ok"}),
        ("after: {prepare: ok, other: any}", {"prepare": "ok", "other": "any"}),
    ],
)
def test_after(line: str, after: object) -> None:
    assert jobs(LEAST + line)[0].after == after


def test_after_stands_beside_roles_and_within_them() -> None:
    text = "name: a\nafter: b\nroles:\n  x: {command: [a], nodes: 1}\n  y: {command: [a], nodes: 1, after: x}\n"
    (found,) = jobs(text)
    assert found.after == {"b": "ok"}
    assert found.spec.roles[1].after == ("x",)


@pytest.mark.parametrize(
    ("text", "numbers", "at_once"),
    [("0-3", (0, 1, 2, 3), 0), ("0-9:4%2", (0, 4, 8), 2), ("7,1,3-4", (1, 3, 4, 7), 0), ("5", (5,), 0)],
)
def test_indices(text: str, numbers: tuple[int, ...], at_once: int) -> None:
    found = jobvalues.indices(text)
    assert (found.numbers, found.at_once) == (numbers, at_once)
    assert jobs(LEAST + f"array: {text}")[0].array == text


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-1000", "0-9:0", "1,,2", "0-3%", "0-3%0", "-1", "0-99999999", "1-2-3"]
)
def test_what_is_no_array(text: str) -> None:
    with pytest.raises(CheckError):
        jobvalues.indices(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("begin: >>tomorrow", "'tomorrow' is not a time, write +2h"),
        ("begin: >>7", "7 is not a time"),
        ("begin: >>+99999999d", "it must be at most 3650d"),
        ("begin: >>9999-12-31T23:59:59-12:00", "is after the year 9999"),
        ("after: >>7", "7 names no jobs"),
        ("after: {b: >>yes}", "'yes' for b, write ok (it succeeds) or any (it ends)"),
        ("array: >>0-9%", "write how many may run at once"),
        ("array: >>0-1000", "'0-1000' is too long, an array has at most 1000 members"),
        ("array: >>0-599,600-1000", "an array has at most 1000 members"),
    ],
)
def test_mistakes(line: str, words: str) -> None:
    check_marked(LEAST + line, jobs, words)


def test_several_jobs_in_one_file() -> None:
    text = f"---\n{LEAST}---\nname: b\ncommand: [x]\nnodes: 2\nafter: a\n---\n"
    assert [(found.spec.name, dict(found.after)) for found in jobs(text)] == [("a", {}), ("b", {"a": "ok"})]


def test_mistakes_of_all_jobs_are_reported_at_once_each_at_its_place() -> None:
    text = "name: a\nnodes: >>x\ncommand: [x]\n---\nname: >>B B\nnodes: 1\ncommand: [x]\n"
    check_marked(text, jobs, "is not a name")


def test_a_name_is_given_once_members_of_arrays_included() -> None:
    check_marked(
        f"{LEAST}---\nname: >>a\nnodes: 1\ncommand: [x]\n", jobs, "a job named a is in this file already (line 1)"
    )
    check_marked(f"{LEAST}array: 0-3\n---\nname: >>a-2\nnodes: 1\ncommand: [x]\n", jobs, "a job named a-2")


def test_jobs_that_wait_for_each_other() -> None:
    def one(name: str, after: str) -> str:
        return f"name: {name}\nnodes: 1\ncommand: [x]\n>>after: {after}\n"

    check_marked("---\n".join([one("a", "b"), one("b", "c"), one("c", "a")]), jobs, "a -> b -> c -> a")
    check_marked(one("a", "a"), jobs, "a -> a")


def test_there_are_bounds() -> None:
    many = "---\n".join(f"name: j{i}\nnodes: 1\ncommand: [x]\n" for i in range(MOST_JOBS + 1))
    (found,) = problems(lambda: jobs(many))
    assert found.what == f"more than {MOST_JOBS} jobs"
    two = f"{LEAST}array: 0-599\n---\nname: b\ncommand: [x]\nnodes: 1\narray: 0-599\n"
    (found,) = problems(lambda: jobs(two))
    assert found.what == "more than 1000 jobs, with those of arrays"
    check_marked(f"name: {'a' * 62}\ncommand: [x]\nnodes: 1\n>>array: 0-3\n", jobs, "is not a name")
