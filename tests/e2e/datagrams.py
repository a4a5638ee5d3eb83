"""Lease processes that do not hear each other: a filter in the kernel, put on their own sockets from outside, drops
datagrams.

Owns the filter. It needs the right to take a copy of another process's file descriptor, which root has.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PIDFD_GETFD = 438
"""The number of the system call, the same on x86-64 and ARM."""
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LOAD_HALF, JUMP_IF_EQUAL, RETURN = 0x28, 0x15, 0x06
"""Of classic BPF, which sees a datagram from its UDP header on: source port, then destination port."""


def why_not() -> str:
    """Why it cannot be done here; empty if it can."""
    if not hasattr(os, "pidfd_open") or os.geteuid() != 0:
        return "only root can reach into another process's sockets"
    here, there = socket.socketpair()
    with here, there:
        try:
            os.close(_copied(os.getpid(), here.fileno()))
        except OSError as error:
            return f"no pidfd_getfd here: {error.strerror}"
    return ""


@contextmanager
def cut_off(one: int, others: Iterable[int]) -> Iterator[None]:
    """Between one process and these others no datagram passes; the one must have a single UDP socket."""
    with ExitStack() as stack:
        (mine,) = (stack.enter_context(ear) for ear in _datagram_sockets(one))
        ears = [mine, *(stack.enter_context(ear) for other in others for ear in _datagram_sockets(other))]
        with _filtered(ears, mine.getsockname()[1]):
            yield


@contextmanager
def _filtered(ears: Sequence[socket.socket], port: int) -> Iterator[None]:
    """These sockets get nothing that comes from this port or goes to it."""
    code = b"".join(
        struct.pack("HBBI", *step)
        for step in (
            (LOAD_HALF, 0, 0, 0),
            (JUMP_IF_EQUAL, 3, 0, port),
            (LOAD_HALF, 0, 0, 2),
            (JUMP_IF_EQUAL, 1, 0, port),
            (RETURN, 0, 0, 0xFFFF),
            (RETURN, 0, 0, 0),
        )
    )
    program = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HP", len(code) // 8, ctypes.addressof(program))
    for ear in ears:
        ear.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)
    try:
        yield
    finally:
        for ear in ears:
            ear.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def _datagram_sockets(pid: int) -> list[socket.socket]:
    """Copies of the UDP sockets of a process. Raises AssertionError if it has none."""
    found = []
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed while we looked
            if not str(handle.readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=_copied(pid, int(handle.name)))
            if copy.family == socket.AF_INET and copy.type == socket.SOCK_DGRAM:
                found.append(copy)
            else:
                copy.close()
    assert found, f"process {pid} has no UDP socket"
    return found


def _copied(pid: int, descriptor: int) -> int:
    """A copy of another process's file descriptor."""
    process = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(copy)
