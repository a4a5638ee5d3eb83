"""The base of every record: frozen, strictly decoded, JSON on the wire. Must never hold logic of a single record."""

from __future__ import annotations

from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

RECORD_VERSION = 1
"""Version of all stored records. The store refuses the steps of an agent that has another one."""

Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""A whole number that others can count with: the store, which knows no larger ones, and the metrics' page. Numbers that
come from a job's user (``pods.base.PodStatus``) are of this kind."""

T = TypeVar("T")
Listed = Annotated[tuple[T, ...], FailFast()]
"""A list that others wrote: behind its first entry that does not fit no other is looked at."""
ERRORS_MAX = 100
"""Mistakes in one record of which the first is still reported."""
_NAME_CHARS, _ERROR_CHARS = 60, 300

PORT_MAX = 65535
Port = Annotated[int, Field(ge=1, le=PORT_MAX)]


NAME = r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$"
"""Names of jobs, queues and nodes."""


class Record(BaseModel):  # noqa: PLW1641 - pydantic gives frozen models their hash
    """A frozen value. Unknown fields, wrong types and numbers that are not finite (JSON has none: nobody could read the
    record again) are errors; nothing is guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, allow_inf_nan=False)

    def __eq__(self, other: object) -> bool:
        """Compares identity first: views of many nodes often compare an object with itself."""
        return self is other or super().__eq__(other)

    def to_json(self) -> str:
        """Compact JSON; ``from_json`` gives an equal value back."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode strictly. Raises ``pydantic.ValidationError`` for anything that does not fit."""
        return cls.model_validate_json(text, strict=True)


def first_error(error: ValidationError) -> str:
    """The first mistake in what others wrote, as a short phrase that repeats no value. pydantic makes its texts of all
    mistakes at once, for seconds if they are a million: of more than ``ERRORS_MAX`` only their number is reported."""
    count = error.error_count()
    if count > ERRORS_MAX:
        return f"{count} mistakes"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:_NAME_CHARS] for part in first["loc"][:8])
    text = f"{where}: {first['msg']}" if where else first["msg"]
    more = f" (and {count - 1} more)" if count > 1 else ""
    return ascii(text[:_ERROR_CHARS])[1:-1] + more
