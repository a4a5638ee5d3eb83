"""Real servers for tests: on ports of loopback, with TLS, with replicas, with sentinels. All end with the test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from nodeagent.local.privateredis import find_server
from nodeagent.osutil.linux import prefer
from nodeagent.osutil.tether import tethered
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.endpoint import StoreEndpoint
from nodeagent.store.link import StoreLink
from nodeagent.store.wire import ReplyError
from tests.folders import short
from tests.ports import free_port

BOUND = 30.0
"""Seconds a test waits for anything."""


class Server:
    """One server (or sentinel) in a folder of its own; ``lines`` are its config file."""

    def __init__(
        self, folder: Path, lines: list[str], *, port: int = 0, sentinel: bool = False, address: str = "127.0.0.1"
    ) -> None:
        self.port = port or free_port()
        self.address = address
        self.folder = folder
        self.folder.mkdir()
        self.socket = folder / "s"
        self._config = folder / "server.conf"
        self._sentinel = sentinel
        self._greeting = b"".join(f"{words}\r\n".encode() for words in (*_login(lines), "PING"))
        common = [f"dir {folder}", f"bind {address}", "protected-mode no", "daemonize no"]
        if not sentinel:
            common += ['save ""', f"unixsocket {self.socket}", "unixsocketperm 700", "repl-diskless-sync-delay 0"]
        if not any(line.startswith("port ") for line in lines):
            common.append(f"port {self.port}")
        self._config.write_text("\n".join([*common, *lines, ""]))
        self._config.chmod(0o600)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{self.port}/0"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, program: Sequence[str] = ()) -> None:
        """``program``: instead of the one that is found."""
        self.stop()
        command = [*(program or [str(find_server())]), str(self._config), *(["--sentinel"] if self._sentinel else [])]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                tethered(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        prefer(self.process.pid)  # a machine of its own would not share its cores with agents that start

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(BOUND)
            self.process = None

    async def ready(self) -> None:
        """Until it answers, whatever it says but that it has its data to load first; a program without this feature
        skips the test. It is asked with its password: a stranger is told that he is one, not that it loads."""
        async with asyncio.timeout(BOUND):
            while True:
                assert self.process is not None
                if self.process.poll() is not None:
                    if "Bad directive" in self.log and "tls-" in self.log:
                        pytest.skip("this Redis server was built without TLS")
                    raise AssertionError(self.log)
                try:
                    reader, writer = await asyncio.open_connection(self.address, self.port)
                except OSError:
                    await asyncio.sleep(0.01)
                    continue
                received = b""
                with suppress(OSError):  # where it wants TLS this is no greeting, and it hangs up
                    writer.write(self._greeting)
                    for _ in range(self._greeting.count(b"\n")):
                        received = await reader.readline()
                    writer.close()
                    await writer.wait_closed()
                if not received.startswith(b"-LOADING"):
                    return
                await asyncio.sleep(0.01)


class Yard:
    """Starts servers in one folder and ends all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[Server] = []

    async def server(self, *lines: str, port: int = 0, sentinel: bool = False) -> Server:
        server = Server(self.folder / f"r{len(self.servers)}", list(lines), port=port, sentinel=sentinel)
        self.servers.append(server)
        server.start()
        await server.ready()
        return server

    async def replica(self, of: Server, *lines: str) -> Server:
        """A replica that has caught up."""
        replica = await self.server(f"replicaof 127.0.0.1 {of.port}", *lines)
        await until(lambda: _linked(of, replica, lines))
        return replica

    async def sentinels(
        self, count: int, primary: Server, replicas: int, *lines: str, down_after: float
    ) -> list[Server]:
        """Sentinels that know each other and the primary's replicas; the service is called ``gpus``. ``down_after``:
        seconds; a machine that stands still for so long makes them fail over."""
        watch = f"sentinel monitor gpus 127.0.0.1 {primary.port} {count // 2 + 1}"
        more = [f"sentinel down-after-milliseconds gpus {down_after * 1000:.0f}", "sentinel failover-timeout gpus 4000"]
        more.append("sentinel parallel-syncs gpus 2")
        found = [await self.server(watch, *more, *lines, sentinel=True) for _ in range(count)]
        for sentinel in found:
            await until(partial(_knows, sentinel, _password(lines), count, replicas))
        return found


async def _linked(primary: Server, replica: Server, lines: tuple[str, ...]) -> bool:
    """It, and all the others, acknowledge what is written. Online is not enough: a replica's first acknowledgement
    may take a second."""
    url = f"redis://:{_password(lines)}@127.0.0.1:{primary.port}/0"
    link = StoreLink(StoreEndpoint(RedisConfig(url=url)), 1.0)
    try:
        await link.open()
        await link.ask("PUBLISH", "nobody", "listens")  # goes to the replicas, and leaves no key
        acknowledged = await link.ask("WAIT", 9, 100)
    finally:
        await link.drop()
    there = any(f"port={replica.port},state=online" in value for value in link.info.values())
    return there and str(acknowledged) == link.info["connected_slaves"]


async def _knows(sentinel: Server, password: str, sentinels: int, replicas: int) -> bool:
    flat = await ask(sentinel, "SENTINEL", "MASTER", "gpus", password=password)
    assert isinstance(flat, list)
    reported = dict(zip(flat[::2], flat[1::2], strict=True))
    return (reported["num-other-sentinels"], reported["num-slaves"]) == (str(sentinels - 1), str(replicas))


def _login(lines: Sequence[str]) -> list[str]:
    """What makes a stranger one of the house, where its config names one password for all."""
    return [f"AUTH {word}"] if (word := _password(lines)) else []


def _password(lines: Sequence[str]) -> str:
    return next((line.split()[-1] for line in lines if line.startswith("requirepass ")), "")


async def ask(server: Server, *command: str, password: str = "", user: str = "") -> object:
    """One command on a connection of its own, whatever the server's role is."""
    login = f"{user}:{password}@" if password else ""
    door = StoreEndpoint(RedisConfig(url=f"redis://{login}{server.address}:{server.port}/0"))
    connection = door.server()
    try:
        await connection.open()
        for words in (*door.greeting(), command):
            await connection.send(*words)
            reply: object = await connection.receive()
    finally:
        await connection.close()
    return reply


async def until(condition: Callable[[], Awaitable[bool]], bound: float = BOUND) -> None:
    """Wait for a condition; a server that does not answer yet is one that does not meet it."""
    async with asyncio.timeout(bound):
        while True:
            try:
                if await condition():
                    return
            except (ReplyError, OSError):
                pass
            await asyncio.sleep(0.02)


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


@contextmanager
def yard() -> Iterator[Yard]:
    with tempfile.TemporaryDirectory(prefix="na-test-", dir=short()) as folder:
        here = Yard(Path(folder))
        try:
            yield here
        finally:
            for server in here.servers:
                server.stop()


@asynccontextmanager
async def slowed(place: Path, seconds: float) -> AsyncIterator[Path]:
    """Another socket for the server at ``place``, by which each reply comes so much later."""
    calls: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, pause: float) -> None:
        with suppress(ConnectionError), closing(sink):
            while data := await source.read(65536):
                await asyncio.sleep(pause)
                sink.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_server = await asyncio.open_unix_connection(place)
        calls.update(
            {asyncio.create_task(pump(reader, to_server, 0)), asyncio.create_task(pump(there, writer, seconds))}
        )

    slow = place.with_name("slow")
    listener = await asyncio.start_unix_server(accept, slow)
    try:
        yield slow
    finally:
        listener.close()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@asynccontextmanager
async def withheld(place: Path, word: bytes) -> AsyncIterator[tuple[Path, asyncio.Event, list[bool]]]:
    """Another socket for the server at ``place``, which withholds each reply to a request that has ``word`` in it until
    the event is set; and for each connection so far whether it was one with such a request."""
    calls: set[asyncio.Task[None]] = set()
    let, connections = asyncio.Event(), list[bool]()

    async def there(number: int, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError), closing(server):
            while data := await reader.read(65536):
                if word in data:
                    connections[number] = True
                    await let.wait()
                server.write(data)

    async def back(server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError), closing(writer):
            while data := await server.read(65536):
                writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, server = await asyncio.open_unix_connection(place)
        connections.append(False)
        calls.update(map(asyncio.create_task, (there(len(connections) - 1, reader, server), back(replies, writer))))

    slow = place.with_name("withheld")
    listener = await asyncio.start_unix_server(accept, slow)
    try:
        yield slow, let, connections
    finally:
        listener.close()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class Authority:
    """A throw-away CA, made with the openssl program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._openssl(
            *("req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=throw-away CA", *NEW_KEY),
            *("-keyout", str(folder / "ca.key"), "-out", str(self.ca)),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def issue(self, name: str, names: str) -> tuple[Path, Path]:
        """A certificate and its key, for subjectAltName ``names``."""
        cert, key, request = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName={names}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        self._openssl(
            *("req", "-new", "-nodes", "-subj", f"/CN={name}", *NEW_KEY, "-keyout", str(key), "-out", str(request))
        )
        self._openssl(
            *("x509", "-req", "-days", "2", "-in", str(request), "-CA", str(self.ca), "-out", str(cert)),
            *("-CAkey", str(self.folder / "ca.key"), "-CAcreateserial", "-extfile", str(extensions)),
        )
        return cert, key

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=BOUND)
        assert done.returncode == 0, done.stderr


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
