"""The values of a job's keys that tie it to a time and to other jobs: ``begin``, ``ttl``, ``after`` and ``array``.

Each takes what was written and gives what the model holds, or raises ``CheckError``. Never knows where it stands, nor
which jobs there are; the time comes in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import cast, get_args

from pydantic import ValidationInfo

from nodeagent.model.batch import MOST_AFTER, MOST_INDEX, MOST_MEMBERS, Need
from nodeagent.spec import jobvalues, units
from nodeagent.spec.errors import CheckError

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_BEGIN = "write +2h (from now), or a time such as 2030-01-31T22:00 or 2030-01-31T22:00+01:00"
_ARRAY = "write 0-99, 0-99:10 or 1,3,5-7, and %8 behind it for at most 8 at once"


def begin(value: object, info: ValidationInfo) -> float | None:
    """``+DURATION`` after the context's ``now``, or a time in ISO 8601, of this machine's zone unless it says
    otherwise; to Unix time."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not a time", _BEGIN)
    return moment(value, lambda: float((info.context or {})["now"]))


def moment(value: str, now: Callable[[], float]) -> float:
    """The same of a text."""
    if value.startswith("+"):
        return now() + units.duration(value[1:])
    try:
        return max(0.0, datetime.fromisoformat(value).timestamp())
    except (ValueError, OverflowError):
        raise CheckError(f"{units.show(value)} is not a time", _BEGIN) from None


def ttl(value: object) -> float | None:
    return None if value is None else jobvalues.bounded(0, math.inf)(value)


def after(value: object) -> dict[str, Need]:
    """A name, a list of names, or names with what is needed of each."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        value = dict.fromkeys(map(str, value), "ok")
    if not isinstance(value, dict):
        raise CheckError(f"{units.show(value)} names no jobs", "write [prepare], or {prepare: ok, other: any}")
    if len(value) > MOST_AFTER:
        raise CheckError(f"{len(value)} jobs", f"a job comes after {MOST_AFTER} others at most")
    for name, need in value.items():
        jobvalues.job_name(name)
        if need not in get_args(Need):
            raise CheckError(f"{units.show(need)} for {name}", "write ok (it succeeds) or any (it ends)", (name,))
    return cast("dict[str, Need]", value)


def after_option(text: str) -> tuple[str, Need]:
    """``JOB`` or ``JOB:ok|any``."""
    name, _, need = text.partition(":")
    ((name, needed),) = after({name: need or "ok"}).items()
    return name, needed


def array(value: object) -> str | None:
    """The text as it was written, if ``indices`` can read it."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not an array", _ARRAY)
    indices(value)
    return value


@dataclass(frozen=True, slots=True)
class Indices:
    """Of an array."""

    numbers: tuple[int, ...]
    """In rising order."""
    at_once: int
    """0: any number."""


def indices(text: str) -> Indices:
    """``0-99%8``, ``0-99:10``, ``1,3,5-7``. Raises ``CheckError``."""
    ranges, percent, most = text.replace(" ", "").partition("%")
    if percent and not re.fullmatch(r"[1-9]\d{0,8}", most):
        raise CheckError(f"{units.show(text)} is not an array", "write how many may run at once behind the %: 0-99%8")
    found: list[int] = []
    for part in ranges.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise CheckError(f"{units.show(text)} is not an array", _ARRAY)
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or last > MOST_INDEX or step < 1:
            raise CheckError(f"the range {part} in {units.show(text)}", f"it goes up, to {MOST_INDEX} at most")
        if len(found) + (last - first) // step >= MOST_MEMBERS:
            raise CheckError(f"{units.show(text)} is too long", f"an array has at most {MOST_MEMBERS} members")
        found += range(first, last + 1, step)
    return Indices(tuple(sorted(set(found))), int(most or 0))


def member_name(name: str, index: int) -> str:
    """Of an array's member. Raises ``CheckError`` where that is no job's name."""
    return jobvalues.job_name(f"{name}-{index}")
