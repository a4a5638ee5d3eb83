"""sd_notify: what is sent, when it is not, and that a manager that went away hurts nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.agent.systemd import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def received(manager: socket.socket) -> list[str]:
    out = []
    while True:
        try:
            out.append(manager.recv(4096).decode())
        except BlockingIOError:
            return out


def test_what_is_sent(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000000"})
    assert notifier.watchdog == 20.0
    notifier.ready()
    notifier.alive()
    notifier.status("node n1 has joined")
    notifier.status("node n1 has joined")
    notifier.stopping()
    assert received(manager) == [
        f"READY=1\nMAINPID={os.getpid()}",
        "WATCHDOG=1",
        "STATUS=node n1 has joined",
        "STOPPING=1",
    ]


@pytest.mark.parametrize("usec", ["", "x"])
def test_without_a_watchdog_nothing_feeds_it(manager: socket.socket, usec: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": usec})
    notifier.alive()
    assert notifier.watchdog is None
    assert received(manager) == []


def test_an_abstract_socket() -> None:
    name = f"nodeagent-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        listener.setblocking(False)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert received(listener) == ["STOPPING=1"]


def test_an_end_that_may_take_its_time_asks_for_it(manager: socket.socket) -> None:
    Notifier({"NOTIFY_SOCKET": manager.getsockname()}).stopping(80.2)
    assert received(manager) == ["STOPPING=1\nEXTEND_TIMEOUT_USEC=80200000"]


def test_without_systemd_or_with_one_that_went_away_it_is_silent(tmp_path: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
        notifier = Notifier(environ)
        notifier.ready()
        notifier.status("x")


def test_a_manager_that_does_not_read_holds_nothing_up(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000000"})
    for _ in range(5000):
        notifier.alive()
    assert 0 < len(received(manager)) < 5000
