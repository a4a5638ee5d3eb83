"""A descriptor that takes an hour to close holds no reader up for long, where the kernel cannot refuse it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nodeagent.osutil.lingering import _lingers

BOUND = 60.0
READER = """
import array, os, socket, struct, sys, threading
from nodeagent.osutil.lingering import end_lingering

def stranger(end):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(3):
            full = socket.create_connection(server.getsockname())
            kept.append(server.accept()[0])
            full.setblocking(False)
            try:
                while True:
                    full.send(bytes(65536))
            except BlockingIOError:
                pass
            full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            end.sendmsg([b"abc"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [full.fileno()]))])
            full.close()

kept, noticed = [], threading.Event()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stranger(theirs)
if sys.argv[1] == "watched":
    end_lingering(noticed.set)
print([ours.recv(100) for _ in range(3)], noticed.wait(20), flush=True)
"""


def read(how: str, seconds: float) -> str:
    return subprocess.run(
        [sys.executable, "-c", READER, how], stdout=subprocess.PIPE, text=True, timeout=seconds, check=True
    ).stdout


def test_a_reader_goes_on_and_says_so() -> None:
    assert read("watched", BOUND) == f"{[b'abc'] * 3} True\n"


def test_the_rig_holds_up_one_that_is_not_watched() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        read("alone", 3.0)


def test_who_waits_for_events_or_for_nothing_is_left_alone() -> None:
    assert [_lingers(place) for place in (b"0", b"ep_poll", b"do_epoll_wait", b"futex_wait_queue")] == [False] * 4
