"""The only way for text to a person's terminal, and the tool's own failures: exit codes, which are a contract, and the
text of a failure on stderr.

Names, reasons and output come from other users: control characters in them could move the cursor, forge lines, set the
title or reverse the text. So these characters are shown, never sent. Owns the set of characters that may reach a
terminal unchanged: printable text, line ends, tabs and colours.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import IO, Any, TextIO

import click

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""C0 and C1 controls except tab and line end, marks that change the direction of text, and lone surrogates."""
_END = "\x1b[0m"
_CODE = "(?:[01]|3[1-69]|9[0-6])"
_COLOUR = re.compile(f"(\x1b\\[{_CODE}?(?:;{_CODE})?m)")
"""The escape sequences of our own colours, and of others: without black and white, in which text may not be seen."""
_PART = "(?:[345]8;5;[0-9]{1,3}|[345]8;2(?:;[0-9]{1,3}){3}|0?[0-79]|(?![345]8)[1-9][0-9]|10[0-7])?"
_LOOK = re.compile(f"(\x1b\\[(?=[0-9;]{{0,24}}m){_PART}(?:;{_PART})*m)")
"""The sequences that only change the look of text, as progress bars use them, but 8, which conceals it."""


def printable(text: str) -> str:
    """The text with each control character as an escape, as in ``\\u001b``. JSON text stays the same JSON."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The text in one printable line, with our own colours."""
    return _kept(text, _COLOUR).replace("\n", "\\n")


def worker_text(text: str, begin: str = "") -> str:
    """A worker's output for a terminal, with its line ends, and with its colours, which end with it. It can return to
    the start of its own line, where ``begin`` is written again, as it was."""
    *before, last = (_kept(part, _LOOK) for part in text.split("\r"))
    if begin:
        before = [part + _END if "\x1b" in part else part for part in before]
    return f"\r{begin}".join([*before, last]) + (_END if "\x1b" in text else "")


def _kept(text: str, sequences: re.Pattern[str]) -> str:
    """The text with control characters as escapes, except these sequences."""
    if "\x1b" not in text:
        return printable(text)
    return "".join(part if at % 2 else printable(part) for at, part in enumerate(sequences.split(text)))


def _closed(line: str) -> str:
    """The line with an end of the colours that it begins."""
    found = _COLOUR.findall(line) if "\x1b" in line else []
    return line + _END if found and found[-1] not in (_END, "\x1b[m") else line


class OutputError(OSError):
    """What the tool prints cannot be written: the disk is full, or the reader of a pipe has gone."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"its output cannot be written: {cause.strerror or cause}")
        self.reader_gone = isinstance(cause, BrokenPipeError)
        self.next_step = ""


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error) from error


def write(text: str, to: TextIO) -> None:
    """Write a worker's text at once, and as it is. Raises ``OutputError``."""
    with _printing():
        to.write(text)
        to.flush()


def echo(text: str = "", *, err: bool = False, nl: bool = True, file: IO[Any] | None = None) -> None:
    """Print text that may contain other users' text. A colour does not outlast its line. Raises ``OutputError``."""
    lines = _kept(text, _COLOUR).split("\n")
    with _printing():
        click.echo("\n".join(map(_closed, lines)), err=err, nl=nl, file=file)


def status_line(text: str) -> None:
    """Replace the present line on stderr; an empty text clears it. The text is cut to the terminal's width. Raises
    ``OutputError``."""
    width = shutil.get_terminal_size().columns - 1
    shown = printable(text).replace("\n", " ")
    shown = shown if len(shown) <= width else shown[: width - 1] + "…"
    with _printing():
        click.echo(f"\r\x1b[K{shown}", nl=False, err=True)


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


RUN_CODES: dict[int, int] = {
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
    405: Exit.USAGE,
    409: Exit.REFUSED,
    415: Exit.USAGE,
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
        self.retried = False
        """Of a refusal: the change was sent before, and nobody knows whether that did it."""

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


class BrokeOffError(NoAgentError):
    """The connection broke after the answer had begun."""


class WaitTimedOutError(CtlError):
    """A wait reached its bound."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message, Exit.TIMED_OUT, next_step)


@contextmanager
def local_failures() -> Iterator[None]:
    """Turns errors of a local cluster into failures of the tool."""
    from nodeagent.local.layout import LocalError

    try:
        yield
    except LocalError as error:
        raise CtlError(str(error), error.code, error.next_step, error.words) from error
