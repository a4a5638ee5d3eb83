"""Links between jobs: the jobs that must end before a job starts, and the array that a job is a member of. Also a job
as it is submitted, before the names of other jobs in it are resolved to uids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from nodeagent.model.base import Record

if TYPE_CHECKING:
    from nodeagent.model.jobspec import JobSpec

Need = Literal["ok", "any"]
"""How the other job has to end: ``ok``: it has succeeded; ``any``: it has ended in any way."""
MOST_AFTER = 64
"""The most jobs that one job can wait for."""
MOST_MEMBERS = 1000
"""The most members of one array."""
MOST_JOBS = 256
"""The most jobs in one file."""
MOST_INDEX = 9_999_999


class After(Record):
    """A job, or a whole array, that has to end before this one starts."""

    uid: str = Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")
    """Uid of the job, or id of the array: a later job of the same name does not count."""
    name: str
    """The name, for people."""
    need: Need = "ok"
    array: int = Field(default=0, ge=0, le=MOST_MEMBERS)
    """Number of members if this is an array; else 0."""


class Array(Record):
    """The array that a job is a member of."""

    name: str
    id: str = Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")
    index: int = Field(ge=0, le=MOST_INDEX)
    """Index of this job in the array."""
    count: int = Field(ge=1, le=MOST_MEMBERS)
    first: int = Field(ge=0, le=MOST_INDEX)
    last: int = Field(ge=0, le=MOST_INDEX)
    at_once: int = Field(default=0, ge=0)
    """The most members that may have nodes at a time; 0: any number."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is submitted: its spec, the jobs that it comes after (by name), and its array as the user wrote
    it."""

    spec: JobSpec
    after: Mapping[str, Need] = field(default_factory=dict)
    array: str = ""
    guess: bool = False
    """The user says nothing of what to preload, and leaves it to be found."""
