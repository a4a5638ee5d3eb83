"""Requests to a local cluster's supervisor: one JSON line to its socket, one line back. Owns the form of request and
reply, and the client's side; the supervisor decides what a request does.

Requests: ``{"do": "status"}``, ``add``, ``kill`` and ``start`` (with ``"node"``), ``restart`` (with ``"node"``
and ``"away"``, seconds), ``down`` (with ``"keep_logs"``).
Replies: ``{"ok": true, ...}`` or ``{"ok": false, "error": TEXT, "code": EXIT CODE}``.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nodeagent.local.layout import LocalError, LocalTimedOutError

Reply = dict[str, Any]
AGENT_TIMEOUT = 2.0
"""Seconds for an agent to answer."""
AWAY = ("silent", "lost", "left")
"""States of a node without a running agent."""


class NoSupervisorError(LocalError):
    """The supervisor does not answer."""

    code = 5


class AnsweredError(LocalError):
    """The supervisor refused; ``code`` comes from the reply."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def ask(control: Path, request: dict[str, object], timeout: float = 15.0) -> Reply:
    """Send a request and return the reply. Raises the LocalError that the reply describes, UnreachableError,
    TimedOutError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(os.fspath(control))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answer:
                line = answer.readline()
        except TimeoutError:
            raise LocalTimedOutError(
                f"the local cluster's supervisor ({control}) did not answer in {timeout:g} s"
            ) from None
        except OSError as error:
            raise NoSupervisorError(
                f"the local cluster's supervisor ({control}) cannot be reached: {error.strerror}"
            ) from error
    if not line:
        raise NoSupervisorError(f"the local cluster's supervisor ({control}) ended")
    try:
        reply: Reply = json.loads(line)
        if not reply["ok"]:
            raise AnsweredError(str(reply["error"]), int(reply["code"]))
    except (ValueError, KeyError, TypeError):
        what = f"what answers at {control} is not the supervisor of a local cluster of this version"
        raise NoSupervisorError(f"{what}: {line[:60]!r}") from None
    return reply


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


def agent_ready(api_socket: Path) -> tuple[bool, str]:
    """Returns whether the agent behind this socket reports that it has joined and can serve; else its answer."""
    status, text = _get(api_socket, "/readyz")
    return status == 200, text


def live_nodes(api_socket: Path) -> set[str] | None:
    """The live nodes in the view of the agent behind this socket, cordoned ones included; None if it does not
    answer."""
    live, after, more = set[str](), "", True
    while more:
        status, text = _get(api_socket, f"/v1/nodes?after={quote(after)}")
        if status != 200:
            return None
        page = json.loads(text)
        live |= {node["name"] for node in page["items"] if node["state"] not in AWAY}
        after, more = page["next"], page["next"] != ""
    return live


def _get(api_socket: Path, path: str) -> tuple[int, str]:
    connection = _UnixConnection(api_socket, AGENT_TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return 0, "it does not answer yet"
    finally:
        connection.close()
