"""What ties jobs together: those that one comes after, and the array that one is a member of. And a job as it is
submitted, before the jobs it names are known by their uids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from nodeagent.model.base import Record

if TYPE_CHECKING:
    from nodeagent.model.jobspec import JobSpec

Need = Literal["ok", "any"]
"""How the other job has to end: ``ok``, as succeeded; ``any``, however."""
MOST_AFTER = 64
"""Jobs that one comes after at most."""
MOST_MEMBERS = 1000
"""Members of one array at most."""
MOST_JOBS = 256
"""Jobs of one file at most."""
MOST_INDEX = 9_999_999


class After(Record):
    """A job, or a whole array, that has to end before this one starts."""

    uid: str = Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")
    """The job's, or the array's id: a later job of the same name does not count."""
    name: str
    """For people."""
    need: Need = "ok"
    array: int = Field(default=0, ge=0, le=MOST_MEMBERS)
    """Of an array how many members it has."""


class Array(Record):
    """The array that a job is a member of."""

    name: str
    id: str = Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")
    index: int = Field(ge=0, le=MOST_INDEX)
    """The member's own."""
    count: int = Field(ge=1, le=MOST_MEMBERS)
    first: int = Field(ge=0, le=MOST_INDEX)
    last: int = Field(ge=0, le=MOST_INDEX)
    at_once: int = Field(default=0, ge=0)
    """So many members have nodes at a time; 0: any number."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is submitted: its spec, by name the jobs that it comes after, and its array as it was written."""

    spec: JobSpec
    after: Mapping[str, Need] = field(default_factory=dict)
    array: str = ""
