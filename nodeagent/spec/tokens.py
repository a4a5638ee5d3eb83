"""The tokens file: who is let in over https, known by the SHA-256 of a token, and as whom.

Owns the file's form. Must never hold a token itself, nor know whether a user exists.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from nodeagent.spec import units
from nodeagent.spec.check import validate
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.sections import Section
from nodeagent.spec.yamlfile import load

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
MOST = 1000
"""Tokens in one file."""


def _digest(value: object) -> object:
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise CheckError(
            f"{units.show(value)} is not a SHA-256 in hex",
            "write what this prints: printf %s TOKEN | sha256sum (64 of 0-9 a-f; in quotes if in doubt)",
        )
    return value


class TokenEntry(Section):
    """One token."""

    sha256: Annotated[str, BeforeValidator(_digest)]
    """Of the token, in hex."""
    user: str | None = Field(default=None, min_length=1)
    """It acts as this user: with what that user may do on the node that is asked."""
    may: Literal["read", "operate"] | None = None
    """It acts as no user: `read` changes nothing, `operate` may do what operators may, but not submit."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.user is None) == (self.may is None):
            raise_all([CheckError("what the token may do is not clear", "give either user, or may: read or operate")])
        return self


class TokenFile(Section):
    """The whole file."""

    tokens: dict[str, TokenEntry] = Field(examples=["{prometheus: {sha256: ..., may: read}}"])
    """Name of the token, for messages and the audit log, to the token."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        bad, seen = [], dict[str, str]()
        if len(self.tokens) > MOST:
            bad.append(CheckError(f"{len(self.tokens)} tokens", f"keep at most {MOST}", at=("tokens",)))
        for name, token in self.tokens.items():
            if not _NAME.fullmatch(name):
                right = "use 1 to 40 of A-Z a-z 0-9 . _ -"
                bad.append(CheckError(f"{units.show(name)} cannot name a token", right, at=("tokens", name)))
            if token.sha256 in seen:
                what = f"the same token as {seen[token.sha256]}"
                bad.append(CheckError(what, "give each its own", at=("tokens", name, "sha256")))
            seen.setdefault(token.sha256, name)
        raise_all(bad)
        return self


def parse_tokens(text: str, filename: str) -> dict[str, tuple[str, TokenEntry]]:
    """SHA-256 to (name, entry). Raises ``SpecError`` with every problem."""
    found = validate(load(text, filename), TokenFile, {})
    return {token.sha256: (name, token) for name, token in found.tokens.items()}
