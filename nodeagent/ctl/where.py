"""The agent that a command asks, and the credentials for it: options first, then environment. Quick to import, because
the list of commands needs it.

Must never read a token before it is needed, or repeat one in a message.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import click

from nodeagent.ctl.terminal import CtlError, Exit

F = TypeVar("F", bound=Callable[..., Any])

ENV = "NODEAGENTCTL_AGENT"
ENV_TOKEN, ENV_CACERT = "NODEAGENTCTL_TOKEN_FILE", "NODEAGENTCTL_CACERT"
ENV_FINGERPRINT = "NODEAGENTCTL_FINGERPRINT"
PORT = 9470
"""Port for a URL without one."""
LONGEST_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class Where:
    """The options about the agent; None for options that were not given."""

    agent: str | None = None
    """A socket's path, unix://PATH or https://HOST[:PORT]."""
    token_file: str | None = None
    cacert: str | None = None
    fingerprint: str | None = None
    """One or more, separated by commas or blanks."""

    def complete(self, environ: Mapping[str, str]) -> Where:
        """Fills in options that were not given from the environment."""
        return Where(
            self.agent or environ.get(ENV) or None,
            self.token_file or environ.get(ENV_TOKEN) or None,
            self.cacert or environ.get(ENV_CACERT) or None,
            self.fingerprint or environ.get(ENV_FINGERPRINT) or None,
        )

    @property
    def remote(self) -> bool:
        return self.agent is not None and self.agent.startswith("https://")

    def place(self) -> tuple[str, int]:
        """Host and port of the URL. Raises ``CtlError``."""
        try:
            parts: SplitResult = urlsplit(self.agent or "")
            host, port = parts.hostname, parts.port or PORT
        except ValueError:
            host, port = None, 0
        if not host or parts.path not in ("", "/") or parts.query or parts.username:
            raise CtlError(f"{self.agent!r} is not the URL of an agent", Exit.USAGE, "write https://HOST:PORT")
        return host, port

    def digests(self) -> tuple[bytes, ...]:
        """The fingerprints of which the agent's certificate must have one; none: a CA verifies it. Raises
        ``CtlError``."""
        found = []
        for text in re.split(r"[,\s]+", self.fingerprint.strip(", \t\n")) if self.fingerprint else ():
            digits = text.lower().removeprefix("sha256:").replace(":", "")
            if not re.fullmatch(r"[0-9a-f]{64}", digits):
                raise CtlError(
                    f"{text!r} is not a fingerprint", Exit.USAGE,
                    "give the SHA-256 of the agent's certificate, 64 hex digits: nodeagentctl describe node/NAME shows "
                    "it",
                )  # fmt: skip
            found.append(bytes.fromhex(digits))
        return tuple(found)

    def token(self) -> str:
        """The content of the token file; empty without one. Raises ``CtlError``."""
        if self.token_file is None:
            return ""
        path = Path(self.token_file)
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read(LONGEST_TOKEN + 1).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not plain text"
            raise CtlError(f"cannot read the token file {path}: {why}", Exit.USAGE, "see --token-file") from None
        if mode & stat.S_IRWXO:
            what = f"the token file {path} has mode {mode:04o}: everybody here can use or change the token"
            raise CtlError(what, Exit.USAGE, f"chmod 0600 {path}")
        if not re.fullmatch(r"[!-~]{1,4096}", text):
            raise CtlError(f"{path} does not hold one token", Exit.USAGE, "write it on one line, without spaces")
        return text


def _remember(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None and param.name is not None:
        ctx.obj = replace(ctx.obj or Where(), **{param.name: value})


def where_options(*, hidden: bool) -> Callable[[F], F]:
    """Adds the options for the agent to ask, its credentials, and ours."""
    given = (
        ("--agent", "PATH|URL", f"The agent to ask, by its socket or as https://HOST:PORT (else {ENV}, else the one "
         "found here).", False),
        ("--token-file", "FILE", f"Holds the token that lets you in over https (else {ENV_TOKEN}).", hidden),
        ("--cacert", "FILE", f"The CA of the agent's certificate (else {ENV_CACERT}, else the system's).", hidden),
        ("--fingerprint", "HEX,...", "The SHA-256 of the agent's certificate, or of several agents', not a CA (else "
         f"{ENV_FINGERPRINT}).", hidden),
    )  # fmt: skip

    def add(command: F) -> F:
        for name, metavar, text, hide in reversed(given):
            option = click.option(name, metavar=metavar, expose_value=False, callback=_remember, help=text, hidden=hide)
            command = option(command)
        return command

    return add
