"""The tokens that are let in, read anew when their file changes. A file that cannot be used lets nobody in: an edit
that was meant to shut somebody out must not fail to. Must never repeat a token."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from nodeagent.spec.errors import Problem, SpecError
from nodeagent.spec.tokens import TokenEntry, parse_tokens

LARGEST = 1024 * 1024
"""Bytes of a tokens file."""

Known = Mapping[str, tuple[str, TokenEntry]]
"""SHA-256 to (name, entry)."""


def read_tokens(path: Path) -> Known:
    """What the file says. Raises ``SpecError`` with every problem, also for a file that others than its owner can read
    or change."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise _refused(
            path, f"the tokens file cannot be read: {error.strerror}", "see api.tokens in the config"
        ) from None
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid not in (0, os.geteuid()):
        what = f"the tokens file has mode {mode:04o} and belongs to uid {found.st_uid}"
        raise _refused(path, what, "only root, or the agent's user, may read and change it: chown it, and chmod 0600")
    if len(data) > LARGEST:
        raise _refused(path, f"the tokens file has more than {LARGEST} bytes", "is it the right file?")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _refused(path, "the tokens file is not UTF-8 text", "save it as UTF-8") from None
    return parse_tokens(text, str(path))


def _refused(path: Path, what: str, right: str) -> SpecError:
    return SpecError([Problem(str(path), 0, 0, what, right)])


class TokenBook:
    """One tokens file, as it is now. Blocks for a look at the file."""

    def __init__(self, path: Path | None, complain: Callable[[str], None]) -> None:
        self._path, self._complain = path, complain
        self._known: Known = {}
        self._version: tuple[int, ...] = ()

    def find(self, token: str) -> tuple[str, TokenEntry] | None:
        """The name and the rights of this token."""
        if self._path is None:
            return None
        version: tuple[int, ...] = (0,)
        with contextlib.suppress(OSError):  # reading it will say what is wrong
            now = self._path.stat()
            version = (now.st_mtime_ns, now.st_size, now.st_ino, now.st_mode, now.st_uid)
        if version != self._version:
            self._version, self._known = version, {}
            try:
                self._known = read_tokens(self._path)
            except SpecError as wrong:
                self._complain(str(wrong))
        return self._known.get(hashlib.sha256(token.encode()).hexdigest())
