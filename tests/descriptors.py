"""A process that has no descriptors to spare."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
