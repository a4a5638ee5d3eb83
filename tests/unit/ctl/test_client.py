"""Finding an agent: in which order, and what is said when there is none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nodeagent.ctl import client
from nodeagent.ctl.errors import CtlError, UnreachableError


@pytest.fixture
def listeners() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listen(stack: ExitStack, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    server.listen()
    return str(path)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No agent of this machine is found."""
    monkeypatch.setattr(client, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    monkeypatch.setattr(client, "local_sockets", lambda: [])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    monkeypatch.delenv(client.ENV, raising=False)
    return tmp_path


def test_the_order(nowhere: Path, listeners: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    local = listen(listeners, nowhere / "local.sock")
    monkeypatch.setattr(client, "local_sockets", lambda: [local])
    assert client.find().sockets == [local]
    own = listen(listeners, nowhere / "xdg" / "nodeagent" / "api.sock")
    assert client.find().sockets == [own]
    system = listen(listeners, nowhere / "system.sock")
    assert client.find().sockets == [system]
    by_env = listen(listeners, nowhere / "env.sock")
    monkeypatch.setenv(client.ENV, by_env)
    assert client.find().sockets == [by_env]
    said = listen(listeners, nowhere / "said.sock")
    assert client.find(said).sockets == [said]
    assert client.find("unix://" + said).sockets == [said]


def test_nobody(nowhere: Path) -> None:
    with pytest.raises(UnreachableError) as raised:
        client.find()
    assert raised.value.code == 5
    assert str(nowhere / "system.sock") in raised.value.message
    assert "local up" in raised.value.next_step


def test_a_dead_socket_is_passed_over(nowhere: Path, listeners: ExitStack) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(nowhere / "system.sock"))
    own = listen(listeners, nowhere / "xdg" / "nodeagent" / "api.sock")
    assert client.find().sockets == [own]


def test_other_machines_are_refused(nowhere: Path) -> None:
    with pytest.raises(CtlError, match="not supported yet") as raised:
        client.find("https://n7:9470")
    assert raised.value.code == 2
