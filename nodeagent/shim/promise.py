"""The newest generation that this node has promised to: nothing lower ever starts here, whatever happens to the shim.

It is written in a thread: while a checkpoint goes to the same disk an fsync takes seconds, and an agent kills a shim
that does not answer for two. Standard library only. Must never call anything promised that is not on the disk.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nodeagent.shim.loop import Loop

TokenWords = dict[str, Any]
Written = Callable[[str], None]
"""Gets what went wrong; empty if nothing did."""
ToDisk = Callable[[Path, str, bool], None]
"""As ``write_atomic``."""


class DamagedTokenError(ValueError):
    """The file of a token cannot be understood; the text says which and what to do."""


def read_token(path: Path) -> TokenWords | None:
    """None: it has never been written. Raises DamagedTokenError."""
    try:
        token = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path) from error
    if not (isinstance(token, dict) and type(token.get("number")) is int and isinstance(token.get("id"), str)):
        raise _damaged(path)
    return token


def _damaged(path: Path) -> DamagedTokenError:
    return DamagedTokenError(
        f"{path} is damaged, and with it is lost which generation of this job was promised here last; if no worker of "
        "this job runs on this node, remove the file"
    )


def read_started(path: Path, promised: TokenWords | None) -> TokenWords | None:
    """The generation that was started here last. It is written without waiting for the disk, so a power cut may leave
    an empty file: then it counts as the promised one, beyond which nothing can have started."""
    try:
        return read_token(path)
    except DamagedTokenError:
        return promised


class PromisedToken:
    """``token`` is what is on the disk; None: nothing has been promised. One that is damaged is never taken for none: a
    store that lost writes may ask for what is older. Raises DamagedTokenError then."""

    def __init__(self, loop: Loop, path: Path, to_disk: ToDisk) -> None:
        self._path, self._to_disk = path, to_disk
        self.token = read_token(path)
        self._under_way: tuple[TokenWords, Written] | None = None
        self._next: tuple[TokenWords, Written] | None = None
        self._work = SimpleQueue[TokenWords]()
        self._ended = deque[str]()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.watch(self._wake, self._written)
        threading.Thread(target=self._run, name="promise", daemon=True).start()

    @property
    def newest(self) -> TokenWords | None:
        """What will be on the disk, unless the disk refuses it."""
        for waits in (self._next, self._under_way):
            if waits is not None:
                return waits[0]
        return self.token

    def write(self, token: TokenWords, written: Written) -> None:
        """Have it written, after what is being written now and in the place of what waits for that."""
        if self._under_way is not None:
            self._next = (token, written)
            return
        self._under_way = (token, written)
        self._work.put(token)

    def _written(self) -> None:
        os.eventfd_read(self._wake)
        assert self._under_way is not None
        (token, written), self._under_way = self._under_way, None
        trouble = self._ended.popleft()
        if not trouble:
            self.token = token
        waits, self._next = self._next, None
        if waits is not None:
            self.write(*waits)
        else:
            written(trouble)

    def _run(self) -> None:
        while True:
            token = self._work.get()
            try:
                self._to_disk(self._path, json.dumps(token), True)
            except OSError as error:
                self._ended.append(str(error))
            else:
                self._ended.append("")
            os.eventfd_write(self._wake, 1)
