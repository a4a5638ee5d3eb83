"""Files that a command is given: their text, and every mistake in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import click

from nodeagent.ctl.terminal import CtlError, Exit

T = TypeVar("T")


def read_file(file: str, kind: str, left: str, parse: Callable[[str, str], T]) -> T:
    """What ``parse`` makes of the text and the name of a file (``-``: stdin). ``kind``: ``job file``; ``left``: what
    the mistakes have prevented. Raises ``CtlError`` with every mistake."""
    from nodeagent.spec.errors import SpecError
    from nodeagent.spec.yamlfile import MAX_BYTES

    name = "<stdin>" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise CtlError("cannot read <stdin>: it is closed", Exit.USAGE, f"give the path of a {kind}")
    try:
        with click.open_file(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise CtlError(f"cannot read {file}: {error.strerror}", Exit.USAGE, f"give the path of a {kind}") from None
    if len(data) > MAX_BYTES:  # first: the cut may be in the middle of a character
        raise CtlError(f"{name} is larger than {MAX_BYTES // 1024} KiB", Exit.USAGE, f"is it a {kind}?")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CtlError(
            f"{name}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 text", Exit.USAGE, f"is it a {kind} in UTF-8?"
        ) from None
    try:
        return parse(text, name)
    except SpecError as error:
        count = len(error.problems)
        raise CtlError(
            f"{name}: {count} mistake{'s' if count > 1 else ''}",
            Exit.USAGE,
            f"correct the file; {left}",
            str(error).splitlines(),
        ) from None
