"""The only way for text to a person's terminal. Names, reasons and output come from other users: control characters in
them could move the cursor, forge lines, set the title or reverse the text. So these characters are shown, never sent.

Owns the set of characters that may reach a terminal unchanged: printable text, line ends, tabs and colours.
"""

from __future__ import annotations

import re
import shutil
from typing import IO, Any

import click

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""C0 and C1 controls except tab and line end, marks that change the direction of text, and lone surrogates."""
_COLOUR = re.compile("(\x1b\\[(?:[01]|[39][0-7])?(?:;(?:[01]|[39][0-7]))?m)")
"""The escape sequences of our own colours: they hide nothing."""
_LOOK = re.compile("(\x1b\\[[0-9;]{0,24}m)")
"""The sequences that only change the look of text, as progress bars use them."""


def printable(text: str) -> str:
    """The text with each control character as an escape, as in ``\\u001b``. JSON text stays the same JSON."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The text in one printable line, with our own colours."""
    return _kept(text, _COLOUR).replace("\n", "\\n")


def worker_text(text: str, begin: str = "") -> str:
    """A worker's output for a terminal, with its line ends and colours. It can return to the start of its own line,
    where ``begin`` is written again."""
    shown = f"\r{begin}".join(_kept(part, _LOOK) for part in text.split("\r"))
    return shown + ("\x1b[0m" if "\x1b" in text else "")


def _kept(text: str, sequences: re.Pattern[str]) -> str:
    """The text with control characters as escapes, except these sequences."""
    if "\x1b" not in text:
        return printable(text)
    return "".join(part if at % 2 else printable(part) for at, part in enumerate(sequences.split(text)))


def echo(text: str = "", *, err: bool = False, nl: bool = True, file: IO[Any] | None = None) -> None:
    """Print text that may contain other users' text."""
    click.echo(_kept(text, _COLOUR), err=err, nl=nl, file=file)


def status_line(text: str) -> None:
    """Replace the present line on stderr; an empty text clears it. The text is cut to the terminal's width."""
    width = shutil.get_terminal_size().columns - 1
    shown = printable(text).replace("\n", " ")
    shown = shown if len(shown) <= width else shown[: width - 1] + "…"
    click.echo(f"\r\x1b[K{shown}", nl=False, err=True)
