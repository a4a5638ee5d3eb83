"""A primary with two replicas, and three sentinels that watch them: on loopback, or each pair on a machine of its own.

Owns the servers and what is asked of them; what fails over when is the test's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nodeagent.store.wire import ReplyError
from tests.integration.redis_support import Server, ask

SERVICE, PASSWORD = "gpus", "server-pw"
DOWN_AFTER, MAX_LAG = 3.0, 2
"""Seconds: max lag + 1 + fence < down-after + lease, as docs/config.md asks for."""
PATIENT = 10.0
"""Seconds, of the same kind: Sentinel promotes no replica whose link was down for more than ten times that before the
primary was (sentinel.c: sentinelSelectSlave). A slow machine takes more than ten ``DOWN_AFTER`` for a few jobs."""
LINES = (
    f"requirepass {PASSWORD}", f"masterauth {PASSWORD}", "appendonly yes", "min-replicas-to-write 1",
    f"min-replicas-max-lag {MAX_LAG}",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a server and a sentinel run: an address, and how a thread gets there."""

    address: str
    enter: Callable[[], AbstractContextManager[None]]


class Watched:
    """The servers; the first is the primary to begin with. Each is paired with the sentinel of the same number."""

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self.places = places
        self.servers: list[Server] = []
        self.sentinels: list[Server] = []
        for number, place in enumerate(places):
            lines = [*LINES, *([f"replicaof {places[0].address} {self.servers[0].port}"] if number else [])]
            self.servers.append(Server(folder / f"r{number}", lines, address=place.address))
        watch = [
            f"sentinel monitor {SERVICE} {places[0].address} {self.servers[0].port} {len(places) // 2 + 1}",
            f"sentinel auth-pass {SERVICE} {PASSWORD}",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER * 1000:.0f}",
            f"sentinel failover-timeout {SERVICE} 6000",
        ]
        for number, place in enumerate(places):
            self.sentinels.append(Server(folder / f"s{number}", watch, sentinel=True, address=place.address))

    @property
    def url(self) -> str:
        hosts = ",".join(f"{s.address}:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}/0"

    def start(self) -> None:
        for servers in (self.servers, self.sentinels):
            for server, place in zip(servers, self.places, strict=True):
                with place.enter():
                    server.start()
                    asyncio.run(server.ready())

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.stop()

    def ask(self, server: Server, *words: str) -> object:
        is_server = server in self.servers
        number = (self.servers if is_server else self.sentinels).index(server)
        with self.places[number].enter():
            return asyncio.run(ask(server, *words, password=PASSWORD if is_server else ""))

    def named(self, by: Sequence[Server]) -> set[Server]:
        """The primaries that these sentinels name."""
        found = set()
        for sentinel in by:
            answer = self.ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            assert isinstance(answer, list)
            found |= {s for s in self.servers if [s.address, str(s.port)] == answer}
        return found

    def primary(self) -> Server:
        """The one that all sentinels name. Raises ValueError while they do not agree."""
        (one,) = self.named(self.sentinels)
        return one

    def is_whole(self) -> bool:
        """All sentinels name one primary and know its two replicas, and both acknowledge what it writes."""
        with suppress(ReplyError, OSError, ValueError):
            primary = self.primary()
            for sentinel in self.sentinels:
                flat = self.ask(sentinel, "SENTINEL", "MASTER", SERVICE)
                assert isinstance(flat, list)
                reported = dict(zip(flat[::2], flat[1::2], strict=True))
                if (reported["flags"], reported["num-other-sentinels"], reported["num-slaves"]) != ("master", "2", "2"):
                    return False
            role = self.ask(primary, "ROLE")
            assert isinstance(role, list)
            return role[0] == "master" and len(role[2]) == len(self.servers) - 1 and "down" not in self._links(primary)
        return False

    def _links(self, primary: Server) -> set[str]:
        """How the replicas stand."""
        infos = [self.ask(s, "INFO", "replication") for s in self.servers if s is not primary]
        return {
            line.partition(":")[2] for i in infos for line in str(i).split() if line.startswith("master_link_status")
        }

    def rejoin(self, primary: Server) -> None:
        """Who was killed is started; who takes itself for a primary is told, as the sentinels do after a while."""
        for server, place in zip(self.servers, self.places, strict=True):
            if server.process is None:
                with place.enter():
                    server.start()
                    asyncio.run(server.ready())
            if server is not primary:
                self.ask(server, "REPLICAOF", primary.address, str(primary.port))

    @contextmanager
    def out_of_date(self, primary: Server) -> Iterator[None]:
        """The replicas get nothing of what is written, and the primary goes on writing. The sentinels are patient from
        then on."""
        replicas = [s for s in self.servers if s is not primary]
        for sentinel in self.sentinels:
            self.ask(sentinel, "SENTINEL", "SET", SERVICE, "down-after-milliseconds", f"{PATIENT * 1000:.0f}")
        for server in self.servers:
            self.ask(server, "CONFIG", "SET", "min-replicas-to-write", "0")
        for replica in replicas:
            self.ask(replica, "CONFIG", "SET", "masterauth", "wrong")
        self.ask(primary, "CLIENT", "KILL", "TYPE", "replica")
        try:
            yield
        finally:
            for replica in replicas:
                self.ask(replica, "CONFIG", "SET", "masterauth", PASSWORD)


@contextmanager
def watched(folder: Path, places: Sequence[Place]) -> Iterator[Watched]:
    one = Watched(folder, places)
    try:
        one.start()
        yield one
    finally:
        one.stop()
