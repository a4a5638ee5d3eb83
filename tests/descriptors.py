"""Processes that have no descriptors to spare."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count as count_up
from pathlib import Path


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """So many more can be opened."""
    files, full = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, files[1]))
    try:
        with suppress(OSError):
            while True:
                full.append(os.open(os.devnull, os.O_RDONLY))
        for fd in full[len(full) - count :]:
            os.close(fd)
        del full[len(full) - count :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        for fd in full:
            os.close(fd)


def seen_with(look: Callable[[], None], most: int) -> list[bool]:
    """Whether the look came to its end, with each number of files that can be opened below ``most``; an OSError is the
    only other outcome."""
    seen = []
    for left in range(most):
        with few_files(left):
            try:
                look()
                seen.append(True)
            except OSError:
                seen.append(False)
    return seen


@contextmanager
def few_files_of(pid: int, left: int) -> Iterator[None]:
    """The same of another process: sockets and pipes count, too."""
    looks = [{int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()} for _ in range(20)]
    kept = set.intersection(*looks)
    most = next(most for most in count_up() if most + 1 - len([fd for fd in kept if fd <= most]) > left)
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, usual[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
