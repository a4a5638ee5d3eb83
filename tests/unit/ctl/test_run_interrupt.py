"""``run`` that is interrupted while it submits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

import pytest
from click.testing import CliRunner

from nodeagent.ctl.main import cli


class Slow(BaseHTTPRequestHandler):
    """An agent that is asked for a job, and whose client is interrupted before it answers."""

    def do_POST(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "api.sock")
    with UnixStreamServer(path, Slow) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield path
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_the_first_interrupt_ends_it_and_names_the_job(agent: str, more: list[str]) -> None:
    """It may be there: nobody would look for a name that nobody knows."""
    words = ["--agent", agent, "run", *more, "--nproc-per-node", "1", "--", "sleep", "1"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 130
    assert "interrupted; it is not known whether the change was done" in result.stderr
    assert "nodeagentctl stop sleep-" in result.stderr
    assert "request id" not in result.stderr, "the same words make a job of another name"
