"""The base of every record: frozen, strictly decoded, JSON on the wire. Must never hold logic of a single record."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict

RECORD_VERSION = 1
"""Version of all stored records. The store refuses the steps of an agent that has another one."""


class Record(BaseModel):  # noqa: PLW1641 - pydantic gives frozen models their hash
    """A frozen value. Unknown fields and wrong types are errors; nothing is guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

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
