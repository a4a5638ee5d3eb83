"""A slow cable: frames between two TAP devices, late, at a rate, and some of them never.

For kernels without netem. Owns the devices and the thread that carries frames; where they are plugged in is
``net.py``'s work.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME = 65536
LONGEST_WAIT = 0.1
"""Seconds until the thread looks whether it is to end."""


def tap(name: str) -> int:
    """A new device of the network namespace that this thread is in; it goes with its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Wire:
    """Carries frames both ways between two devices while it is entered; closes them."""

    def __init__(self, ends: tuple[int, int], delay: float, loss: float, rate: float) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._delay, self._loss, self._rate = delay, loss, rate
        self._free = dict.fromkeys(ends, 0.0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        for device in self._other:
            os.close(device)

    def _carry(self) -> None:
        late: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._ended.is_set():
            wait = min(LONGEST_WAIT, max(0.0, late[0][0] - time.monotonic())) if late else LONGEST_WAIT
            for device in select.select(list(self._other), [], [], wait)[0]:
                with suppress(BlockingIOError):
                    while True:
                        frame = os.read(device, FRAME)
                        number += 1
                        if random.random() >= self._loss:
                            sent = max(time.monotonic(), self._free[device]) + len(frame) / self._rate
                            self._free[device] = sent
                            heapq.heappush(late, (sent + self._delay, number, self._other[device], frame))
            while late and late[0][0] <= time.monotonic():
                _, _, device, frame = heapq.heappop(late)
                with suppress(OSError):  # the device is down, or full: as a cable loses it
                    os.write(device, frame)
