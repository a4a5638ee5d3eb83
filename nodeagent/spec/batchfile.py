"""A file of jobs: one, or several with lines of ``---`` between them, which may name each other. Raises every mistake
at once, each with its place. Never does I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nodeagent.model.batch import MOST_JOBS, MOST_MEMBERS, Submission
from nodeagent.model.jobspec import Submitter
from nodeagent.spec.batchvalues import indices, member_name
from nodeagent.spec.errors import CheckError, Problem, SpecError
from nodeagent.spec.jobfile import read_job
from nodeagent.spec.yamlfile import Document, load_all


def parse_jobs(text: str, filename: str, submitter: Submitter, now: float) -> list[Submission]:
    """The jobs that ``text`` describes, in its order, submitted at this Unix time. Raises ``SpecError``."""
    documents = load_all(text, filename)
    if len(documents) > MOST_JOBS:
        raise SpecError([documents[MOST_JOBS].problem((), f"more than {MOST_JOBS} jobs", "write several files")])
    problems: list[Problem] = []
    found: list[tuple[Document, Submission]] = []
    for document in documents:
        try:
            found.append((document, read_job(document, submitter, now)))
        except SpecError as error:
            problems += error.problems
    problems += _together(found)
    if problems:
        raise SpecError(problems)
    return [submission for _, submission in found]


def _together(found: Sequence[tuple[Document, Submission]]) -> Iterator[Problem]:
    """What is wrong with jobs that are right each by itself."""
    names: dict[str, Document] = {}
    for document, job in found:
        try:
            own = [job.spec.name, *(member_name(job.spec.name, i) for i in _indices(job))]
        except CheckError as error:
            yield document.problem(("array",), error.what, error.right, key=True)
            continue
        for name in own:
            if name in names:
                first = names[name].place(("name",))
                yield document.problem(
                    ("name",), f"a job named {name} is in this file already (line {first.line})", "give each its own"
                )
                break
        names.update(dict.fromkeys(own, document))
    if sum(len(_indices(job)) or 1 for _, job in found) > MOST_MEMBERS:
        yield found[0][0].problem((), f"more than {MOST_MEMBERS} jobs, with those of arrays", "write several files")
    after = {job.spec.name: list(job.after) for _, job in found}
    for document, job in found:
        if circle := _circle(after, job.spec.name):
            text = " -> ".join(circle)
            yield document.problem(("after",), f"these jobs wait for each other: {text}", "break the circle", key=True)


def _indices(job: Submission) -> tuple[int, ...]:
    return indices(job.array).numbers if job.array else ()


def _circle(after: dict[str, list[str]], name: str) -> list[str]:
    """The way from a job back to itself; empty if there is none."""
    ways, seen = [[name]], set[str]()
    while ways:
        way = ways.pop()
        for other in after.get(way[-1], ()):
            if other == name:
                return [*way, other]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []
