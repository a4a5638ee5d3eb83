"""When the lease process ends by itself; all else of it, in tests/integration/test_lease_process.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodeagent.lease.grants import NOTHING, Grant, grants_folder, make_grant, read_grant_of, write_grant
from nodeagent.lease.order import LeasePort, write_order
from nodeagent.lease.statefiles import address_reader, find_holder, lease_folder
from nodeagent.osutil.linux import boot_id
from tests.unit.lease.build import ORDER, SOURCES

BOUND = 20.0
CODE = "from nodeagent.lease import main; main.IDLE_EXIT = {idle}; main.main()"


def begun(run: Path, idle: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CODE.format(idle=idle), str(run)])


def test_without_an_order_and_without_a_word_it_ends_and_nobody_has_time(tmp_path: Path) -> None:
    grants = grants_folder(tmp_path)
    make_grant(grants, "p1", os.getuid(), os.getgid())
    write_grant(grants, "p1", Grant(1e9, 0.0))
    with begun(tmp_path, 0.2) as process:
        assert process.wait(BOUND) == 0
    assert read_grant_of(grants, "p1") == NOTHING


def test_it_ends_when_its_folder_is_removed(tmp_path: Path) -> None:
    with begun(tmp_path, 1e6) as process:
        try:
            while find_holder(lease_folder(tmp_path)) is None:
                assert process.poll() is None
            (lease_folder(tmp_path) / "lock").unlink()
            assert process.wait(BOUND) == 0
        finally:
            process.kill()


STARVED = """
import os, resource, sys
from pathlib import Path
from nodeagent.lease.main import Process
from nodeagent.lease.statefiles import lease_folder, take_lock
from nodeagent.osutil.suspend import Suspension
lease_folder(Path(sys.argv[1])).mkdir()
process = Process(Path(sys.argv[1]), take_lock(lease_folder(Path(sys.argv[1])), ""), None, Suspension(lambda: 0.0))
free = os.open(os.devnull, os.O_RDONLY)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
print(process._obeyed())
"""


def test_pods_that_cannot_be_looked_at_may_still_run(tmp_path: Path) -> None:
    """Without a descriptor there seemed to be none: a life that went gave the lease back under its workers."""
    make_grant(grants_folder(tmp_path), "p1", os.getuid(), os.getgid())
    command = [sys.executable, "-c", STARVED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND)
    assert done.stdout == "{'p1': 0.0}\n", done.stderr
    assert "the grants cannot be looked at: [Errno 24] Too many open files" in done.stderr


FAILS_TWICE = """
import errno, os
from nodeagent.lease import main, peers
real, left = {module}.{name}, [1, 2]
def fails(*given):
    if left:
        left.pop()
        raise OSError(errno.{error}, os.strerror(errno.{error}))
    return real(*given)
{module}.{name} = fails
main.main()
"""


@pytest.mark.parametrize(
    ("module", "name", "error", "words"),
    [
        ("peers", "open_port", "EMFILE", "no port can be opened on which others ask this node: [Errno 24]"),
        (
            "main", "write_address", "ENOSPC",
            "where others ask it cannot be written down, and is tried again each turn: [Errno 28]",
        ),
    ],
)  # fmt: skip
def test_where_others_ask_is_had_later_if_it_cannot_be_had_now(
    tmp_path: Path, module: str, name: str, error: str, words: str
) -> None:
    folder = lease_folder(tmp_path)
    folder.mkdir()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    door = LeasePort("127.0.0.1", (port, port), "73656372657421")
    write_order(folder, ORDER._replace(boot=boot_id(), door=door), SOURCES)
    code = FAILS_TWICE.format(module=module, name=name, error=error)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + BOUND
            while (address := address_reader(folder).once()) == "" and process.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            process.kill()
        assert process.stderr is not None
        noted = process.stderr.read()
    assert address == f"127.0.0.1:{port}", noted
    assert noted.count(words) == 1


PORT = """
import socket, sys
from pathlib import Path
from nodeagent.lease import main
from nodeagent.lease.statefiles import lease_folder, take_lock
from nodeagent.osutil.suspend import Suspension
main.TURN = 0.01
lease_folder(Path(sys.argv[1])).mkdir()
process = main.Process(Path(sys.argv[1]), take_lock(lease_folder(Path(sys.argv[1])), ""), None, Suspension(lambda: 0.0))
ours, theirs = socket.socketpair()
ours.setblocking(False)

class Port:
    looks, fileno = 0, ours.fileno

    def receive(self):
        self.looks += 1
        ours.recv(1)
        return ()

process._peers = port = Port()
for data in (b"", b"", b"x", b"", b""):
    theirs.send(data)
    process._bridge()
    process._pause()
    print(port.looks)
"""


def test_datagrams_are_looked_for_only_where_some_have_arrived(tmp_path: Path) -> None:
    """A look that finds none is an error to be made and dropped, twice each heartbeat."""
    done = subprocess.run([sys.executable, "-c", PORT, str(tmp_path)], capture_output=True, text=True, timeout=BOUND)
    assert done.stdout.split() == ["0", "0", "0", "1", "1"], done.stderr


SUSPENDED = """
import sys
from pathlib import Path
from nodeagent.lease import main
from nodeagent.lease.statefiles import lease_folder, take_lock
from nodeagent.osutil.suspend import Suspension
main.IDLE_EXIT, main.TURN, looks = 0.2, 0.02, iter([5.0, 5.0])
lease_folder(Path(sys.argv[1])).mkdir()
suspension = Suspension(lambda: next(looks, 3605.0))
process = main.Process(Path(sys.argv[1]), take_lock(lease_folder(Path(sys.argv[1])), ""), None, suspension)
process._core.woke = lambda now, slept: print("slept", slept)
process.run()
"""


def test_a_suspension_is_noted_once_and_counts_as_nobodys_silence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUSPENDED, str(tmp_path)], capture_output=True, text=True, timeout=BOUND
    )
    assert done.stdout == "slept 3600.0\n", done.stderr
    assert done.stderr.count("the machine was suspended for 3600 s") == 1
