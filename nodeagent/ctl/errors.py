"""The tool's own failures: exit codes, which are a contract, and the text of a failure on stderr."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import IO, Any

import click

from nodeagent.ctl.terminal import echo


class Exit(IntEnum):
    """The meaning of the tool's exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    TIMED_OUT = 4
    UNREACHABLE = 5
    REFUSED = 6
    INTERRUPTED = 130


RUN_CODES = {
    Exit.REFUSED: 120,
    Exit.FAILED: 121,
    Exit.USAGE: 122,
    Exit.NOT_FOUND: 123,
    Exit.TIMED_OUT: 124,
    Exit.UNREACHABLE: 125,
}
"""``run`` leaves every other code to the job: its own failures are 120 to 125."""

BY_STATUS = {
    400: Exit.USAGE,
    401: Exit.REFUSED,
    403: Exit.REFUSED,
    404: Exit.NOT_FOUND,
    409: Exit.REFUSED,
    429: Exit.REFUSED,
    503: Exit.UNREACHABLE,
}
"""HTTP status of the agent's answer to exit code; any other is ``FAILED``."""


class CtlError(click.ClickException):
    """A failure with its exit code: what happened, and what to do next."""

    def __init__(self, message: str, code: int, next_step: str = "", problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        """The exit code of the tool."""
        self.next_step = next_step
        self.problems = tuple(problems)
        self.kind = ""
        """The agent's code for a refusal."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the failure on stderr."""
        echo(f"nodeagentctl: {self.message}", err=True)
        for problem in self.problems:
            echo(f"  {problem}", err=True)
        if self.next_step:
            echo(f"  next: {self.next_step}", err=True)


class NoAgentError(CtlError):
    """No agent answers."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message, Exit.UNREACHABLE, next_step)


class WaitTimedOutError(CtlError):
    """A wait reached its bound."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message, Exit.TIMED_OUT, next_step)
