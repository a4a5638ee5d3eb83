"""Whose the subordinate uids are: `/etc/subuid` lets a user have processes, and files, under thousands of uids
(`newuidmap`). Ranges that only the user database has (`subid: sss`) are not known here."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE = Path("/etc/subuid")
BYTES_MAX = 1 << 18
"""Bytes of it that are read: some ten thousand users. What comes after them is not known."""


def ranges(file: Path) -> list[tuple[int, int, str]]:
    """First and last uid, and the user, by name or number. Raises OSError."""
    with file.open("rb", buffering=0) as opened:
        text = os.read(opened.fileno(), BYTES_MAX).decode(errors="replace")
    return [found for line in text.splitlines() if (found := _range(line)) is not None]


def ranges_of(owner: int) -> list[tuple[int, int, str]]:
    """Those of this user; none where the file cannot be read. Blocks on the user database."""
    import pwd

    users = {str(owner)}
    with suppress(KeyError):
        users.add(pwd.getpwuid(owner).pw_name)
    try:
        return [found for found in ranges(FILE) if found[2] in users]
    except OSError:
        return []


def _range(line: str) -> tuple[int, int, str] | None:
    """Of ``ann:100000:65536``; nothing of what is no such line."""
    user, _, numbers = line.strip().partition(":")
    first, _, count = numbers.partition(":")
    if not user or not all(text.isascii() and text.isdecimal() and len(text) <= 10 for text in (first, count)):
        return None
    return int(first), int(first) + int(count) - 1, user
