"""What every section of the agent's config stands on. Must never know a key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError


class Section(BaseModel):
    """A frozen mapping: unknown keys and wrong types are errors. Its keys' docstrings are for ``schema.py`` to read:
    pydantic would parse the sources for them at each start of an agent (40 ms)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


def absolute(value: object, kind: str) -> Path:
    """An absolute path. Raises ``CheckError``; ``kind`` is what it should have been: a folder, a file."""
    if not isinstance(value, str | Path):
        raise CheckError(f"{units.show(value)} is not a {kind}", "write an absolute path")
    if not Path(value).is_absolute():
        raise CheckError(f"{units.show(str(value))} is not an absolute path", "write it from / on")
    return Path(value)


Folder = Annotated[Path, BeforeValidator(lambda value: absolute(value, "folder"))]

File = Annotated[Path, BeforeValidator(lambda value: absolute(value, "file"))]

OptionalFile = Annotated[Path | None, BeforeValidator(lambda value: None if value is None else absolute(value, "file"))]
