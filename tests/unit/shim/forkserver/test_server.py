"""The process that hosts a gang's rendezvous store: it says once what came of it, and ends where it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

HOST = """
import sys, types
from nodeagent.shim.forkserver import server

def store(*_args, **_more):
    {body}

sys.modules["torch.distributed"] = types.SimpleNamespace(TCPStore=store)
server.host_store({{"host": "n1", "port": 1}}, [0, int(sys.argv[1])])
print("it went on")
"""


@pytest.mark.parametrize(("body", "says"), [("return 1", b"ok"), ("raise ValueError('no')", b"ValueError: no")])
def test_it_says_what_came_of_it_and_ends_without_another_word(body: str, says: bytes) -> None:
    answer, theirs = os.pipe()
    command = [sys.executable, "-c", HOST.format(body=body), str(theirs)]
    with subprocess.Popen(
        command, pass_fds=(theirs,), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as host:
        os.close(theirs)
        with open(answer, "rb") as file:  # noqa: PTH123 (a descriptor)
            assert file.read() == says
        if says == b"ok":
            host.send_signal(signal.SIGINT)
        assert (host.communicate(timeout=60)[0], host.returncode) == ("", 1)
