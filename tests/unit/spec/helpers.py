"""Shared by the tests of ``spec``: submitters, and files in which ``>>`` marks where a problem must point."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nodeagent.model.jobspec import JobSpec, Submission, Submitter
from nodeagent.spec.errors import Problem, SpecError
from nodeagent.spec.jobfile import parse_jobs

TRAIN = Submitter(user="train1", uid=1000, gid=1000, host="login1", cwd="/shared/me")
ROOT = Submitter(user="root", uid=0, gid=0, host="login1", cwd="/root")


def job(text: str, submitter: Submitter = TRAIN) -> JobSpec:
    (found,) = jobs(text, submitter)
    return found.spec


def jobs(text: str, submitter: Submitter = TRAIN) -> list[Submission]:
    return parse_jobs(text, "job.yaml", submitter)


def problems(read: Callable[[], object]) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        read()
    return caught.value.problems


def unmark(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its ``>>``, and the line and column of each."""
    places = []
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        plain = line
        while (at := plain.find(">>")) >= 0:
            places.append((number, at + 1))
            plain = plain[:at] + plain[at + 2 :]
        lines.append(plain)
    return "\n".join(lines), places


def check_marked(text: str, read: Callable[[str], object], *words: str) -> None:
    """Reading the unmarked text gives exactly one problem per mark, at it; all ``words`` occur in them."""
    plain, places = unmark(text)
    found = problems(lambda: read(plain))
    reported = "\n".join(map(str, found))
    assert [(p.line, p.col) for p in found] == places, reported
    for word in words:
        assert word in reported, reported
