"""``node.notice`` in the agent's config: where it is told that this machine is about to be taken away."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.sections import OptionalFile, Section

_WORDS: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}


def _command(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
        raise CheckError(f"{units.show(value)} is not a command", "write its words as a list: [/usr/local/sbin/notice]")
    return tuple(value)


class NoticeConfig(Section):
    """How this machine's owner says that it takes the machine away: a file, a command, or either of them."""

    file: OptionalFile = None
    """The notice is there as soon as this file is."""
    command: Annotated[tuple[str, ...] | None, BeforeValidator(_command), WithJsonSchema(_WORDS)] = None
    """Its words. It is run again and again, for 5 seconds at most; the notice is there when its exit code is 0."""
    every: Annotated[
        float,
        BeforeValidator(units.duration),
        WithJsonSchema({"type": ["string", "number"], "examples": ["5s"]}),
        Field(ge=0.5, le=60),
    ] = 5.0
    """From one look to the next."""

    @model_validator(mode="after")
    def _from_somewhere(self) -> Self:
        if self.file is None and self.command is None:
            raise_all([CheckError("nothing says where a notice comes from", "write file or command")])
        return self
