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


WORKER = """
import os, sys, types
from nodeagent.shim.forkserver import server

def only():
    pass

for name in ("lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"):
    each = types.FunctionType(only.__code__, {{}})
    each.rank = 0
    sys.modules[name] = types.SimpleNamespace(rank_zero_only=each)
if {unset}:
    del sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank
server.become_worker({{"env": {env}, "cwd": "/", "limits": []}}, [os.dup(1), os.dup(2)])
for name in ("lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"):
    print(getattr(sys.modules[name].rank_zero_only, "rank", None))
"""


@pytest.mark.parametrize(
    ("env", "unset", "ranks"),
    [
        ({"RANK": "9", "LOCAL_RANK": "1"}, False, "9\n1\n"),
        ({"RANK": "9", "LOCAL_RANK": "1"}, True, "None\n1\n"),
        ({}, False, "0\n0\n"),
    ],
    ids=["a rank", "not set yet", "no rank"],
)
def test_what_reads_its_rank_as_it_is_imported_gets_the_workers(env: dict[str, str], unset: bool, ranks: str) -> None:
    code = WORKER.format(env=env, unset=unset)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (ranks, 0), done.stderr
