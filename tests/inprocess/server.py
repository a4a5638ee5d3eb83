"""The server and its clients: ``Server(clock)``, and ``HereStore(server)``, the product's own client on it."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.resources import files
from types import TracebackType
from typing import Any

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.store.calls import Calls
from nodeagent.store.client import RedisStore
from nodeagent.store.codec import decode_node
from nodeagent.store.decoder import Decoder
from nodeagent.store.keys import prefix
from nodeagent.store.scripts import PRELUDES, Script
from nodeagent.store.wire import Reached, ReplyError
from tests.inprocess.data import CommandError, Data, Value, Word
from tests.inprocess.lua import runtime
from tests.inprocess.state import State

CLUSTER = "c"


class Server:
    """``clock`` gives the server's time in seconds; it may stand still or jump, as a real one may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._starts, self._promoted = 1, 0
        self._bell = asyncio.Event()
        self.data = Data(self.now)
        self.data.wrote = self._ring
        self.read = Read()
        self.costs = Counter[tuple[str, int]]()
        """How often each step took so many commands."""
        self.state = State(self.data, prefix(CLUSTER))
        """What the keys say, decoded."""

    @property
    def run_id(self) -> str:
        """Identity of the server process, and of the history of writes that it is in."""
        return f"run{self._starts}-{self._history}"

    @property
    def _history(self) -> str:
        return f"{self._starts:x}{self._promoted:08x}"

    def now(self) -> int:
        """The server's clock in whole milliseconds."""
        return int(self._clock() * 1000)

    def restart(self, keep_data: bool = True) -> None:
        """A new server process, with the old data or (``keep_data=False``) emptied."""
        self._starts += 1
        if not keep_data:
            self._load({})

    def kept(self) -> dict[str, Value]:
        """All data as it is now."""
        return copy.deepcopy(self.data.keys)

    def put_back(self, kept: dict[str, Value]) -> None:
        """A new server process with older data."""
        self.restart()
        self._load(kept)

    def fail_back(self, kept: dict[str, Value]) -> None:
        """The very same process, which was a replica in between, with the data that it had."""
        self._promoted += 1
        self._load(kept)

    def take(self, *keys: str) -> None:
        """Somebody deletes these keys of the cluster by hand."""
        for key in keys:
            assert self.data.del_(prefix(CLUSTER) + key), f"there is no key {key}"

    def spoil(self, key: str, field: str = "", text: str = "x") -> None:
        """Somebody writes over a key by hand: this field of a hash, or all of it, which becomes another type."""
        full = prefix(CLUSTER) + key
        if field:
            self.data.hset(full, field, text)
        else:
            self.take(key)
            self.data.set(full, text)

    def value(self, key: str) -> Value | None:
        """What a key of the cluster holds now."""
        return copy.deepcopy(self.data.keys.get(prefix(CLUSTER) + key))

    def overwrite(self, key: str, value: Value) -> None:
        """Somebody writes this over what a key held."""
        self.take(key)
        self.data.keys[prefix(CLUSTER) + key] = copy.deepcopy(value)

    def stepped(self) -> None:
        """Called after each step."""

    def failed(self, script: Script, error: CommandError) -> None:
        """Called when a script did not come to its end, before its client is told."""

    def run(self, body: str, **arguments: object) -> Any:
        """A step of the test's own, behind the shipped preludes: as with a client of the store, past every agent."""
        folder = files("nodeagent.store") / "scripts"
        source = "\n".join([*((folder / f"{name}.lua").read_text() for name in PRELUDES), body])
        sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        words = (self.run_id, str(RECORD_VERSION), json.dumps(arguments))
        return runtime().run(self.data, sha, source, (prefix(CLUSTER),), words)

    async def rung(self) -> None:
        """Until the next entry of a stream is written."""
        await self._bell.wait()

    def info(self) -> dict[str, str]:
        """What INFO says."""
        return {"run_id": f"run{self._starts}", "master_replid": self._history, "role": "master"}

    def _load(self, keys: dict[str, Value]) -> None:
        self.data.keys = copy.deepcopy(keys)
        self.data.names += 1
        self.state.forget()
        self._ring()

    def _ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()


class Read:
    """What clients in this process have read: whoever has the same texts has the same object."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[dict[str, str], JobRecord]] = {}
        self._nodes: dict[str, tuple[dict[str, str], str, NodeRecord]] = {}

    def job(self, fields: Mapping[str, str], job: JobRecord) -> JobRecord:
        """That record, or the one that was made of the same fields last."""
        known = self._jobs.get(job.uid)
        if known is None or known[0] != fields:
            known = self._jobs[job.uid] = (dict(fields), job)
        return known[1]

    def node(self, flat: Sequence[str], cordon: str) -> NodeRecord:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        about = {name: text for name, text in fields.items() if name not in ("seq", "dead")}
        known = self._nodes.get(fields.get("id", ""))
        if known is None or known[:2] != (about, cordon):
            known = self._nodes[fields.get("id", "")] = (about, cordon, decode_node(flat, cordon))
        return known[2]


class OwnDecoder(Decoder):
    """One client's: what it has read of jobs is its own, as everywhere; equal records are one object."""

    def __init__(self, shared: Read) -> None:
        super().__init__()
        self._shared = shared

    def job(self, flat: Sequence[str], era: str = "", *, followed: bool = False) -> JobRecord:
        return self._one(super().job(flat, era, followed=followed))

    def news(
        self, uid: str, flat: Sequence[str | None], era: str, since: int, *, upto: int | None = None,
        followed: bool = False,
    ) -> JobRecord | None:  # fmt: skip
        job = super().news(uid, flat, era, since, upto=upto, followed=followed)
        return self._one(job) if job is not None else None

    def node(self, flat: Sequence[str], cordon: str) -> NodeRecord:
        return self._shared.node(flat, cordon)

    def _one(self, job: JobRecord) -> JobRecord:
        read = self._read.get(job.uid)
        if read is not None and read.job is job:
            read.job = job = self._shared.job(read.fields, job)
        return job


class HereLink:
    """A client's connection that needs no socket. See ``store.link.StoreLink``."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def run_id(self) -> str:
        return self._server.run_id

    @property
    def info(self) -> dict[str, str]:
        return self._server.info()

    async def ask(self, *command: Word) -> Any:
        name, *words = command
        try:
            if name == "XREAD":
                return await self._read(words)
            if name == "INFO":
                return "".join(f"{key}:{value}\r\n" for key, value in self.info.items())
            if name == "KEYS":
                return list(self._server.data.keys)
            return self._server.data.call(str(name), *words)
        except CommandError as error:
            raise ReplyError(str(error)) from None

    async def ask_beside(self, command: Sequence[Word], *others: Sequence[Word]) -> tuple[Any, list[Any]]:
        return await self.ask(*command), [await self.ask(*words) for words in others]

    async def evaluate(self, script: Script, *arguments: str) -> Any:
        key, *rest = arguments
        before = self._server.data.calls
        try:
            return runtime().run(self._server.data, script.sha, script.source, (key,), rest)
        except CommandError as error:
            self._server.failed(script, error)
            raise ReplyError(str(error)) from None
        finally:
            self._server.costs[script.name, self._server.data.calls - before] += 1
            self._server.stepped()

    async def drop(self) -> None:
        """Nothing to close."""

    async def _read(self, words: list[Word]) -> Any:
        """``COUNT 1 BLOCK ms STREAMS key ... after ...``."""
        block, places = int(words[3]), words[5:]
        wanted = list(zip(places[: len(places) // 2], places[len(places) // 2 :], strict=True))
        data = self._server.data
        try:
            async with asyncio.timeout(block / 1000):
                while True:
                    found = [[key, data.xrange(key, f"({after}", "+", "COUNT", 1)] for key, after in wanted]
                    if news := [stream for stream in found if stream[1]]:
                        return news
                    await self._server.rung()
        except TimeoutError:
            return None


class HereLinks:
    """As ``store.link.StoreLinks``: any number of links, none of which is ever busy."""

    address = "this process"
    reached: Reached | None = None

    def __init__(self, server: Server) -> None:
        self.link = HereLink(server)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        yield self.link

    async def forget(self) -> None:
        """There is no other link."""

    async def close(self) -> None:
        """Nothing to close."""


class HereCalls(Calls):
    """The product's, without its bounds, which cost as much as a short step: no link has to be waited for, and each
    request is answered at once, or after the time for which it may be held back."""

    def __init__(self, server: Server, timeout: float = 5.0) -> None:
        self._here = HereLinks(server)
        super().__init__(self._here, self._here, prefix(CLUSTER), timeout)

    def link(self) -> AbstractAsyncContextManager[Any]:
        return _AtOnce(self._here.link, super().link)

    def reading(self) -> AbstractAsyncContextManager[Any]:
        return _AtOnce(self._here.link, super().reading)

    def changing(self) -> AbstractAsyncContextManager[Any]:
        return _AtOnce(self._here.link, super().changing)

    def waiting(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        return _AtOnce(self._here.link, partial(super().waiting, seconds))


class _AtOnce(AbstractAsyncContextManager[Any]):
    """The link; what fails with it fails as it does under the product's own bound."""

    def __init__(self, link: HereLink, bounded: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._link, self._bounded = link, bounded

    async def __aenter__(self) -> HereLink:
        return self._link

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            async with self._bounded():
                raise error


class HereStore(RedisStore):
    """The product's client on this server."""

    def __init__(self, server: Server, timeout: float = 5.0) -> None:
        super().__init__(HereCalls(server, timeout))
        self._decoder = OwnDecoder(server.read)
