"""What connections know of password files whose disk may hang: a FIFO that nobody writes to is such a file; and of
names that are not resolved."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store import endpoint
from nodeagent.store.endpoint import MOST_HOSTS, AccessError, FileReading, HostAddresses, StoreEndpoint, look_up
from nodeagent.store.link import StoreLink

BOUND = 20.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text("old\n")
    return path


@pytest.fixture
def fifo(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where to put a file that hangs, as a FIFO does for who opens it as any file; in the end nobody waits for it any
    more."""
    monkeypatch.setattr(endpoint, "open_plain", partial(Path.open, mode="rb"))
    yield file
    if file.is_fifo():
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))


def hang(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def write(file: Path, text: str, mode: int = 0o600) -> None:
    """Into a FIFO: whoever waits reads this."""
    file.write_text(text)
    file.chmod(mode)


@pytest.mark.parametrize("key", ["ca_file", "cert_file", "key_file"])
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(tmp_path: Path, key: str) -> None:
    """An agent's start waited for who writes to it, for ever and without a word."""
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    names = r"pipe cannot be read: it is no regular file: replace it"
    with pytest.raises(AccessError, match=names):
        StoreEndpoint(RedisConfig(password_file=pipe))
    sentinel = {"url": "redis+sentinel://h/main", "sentinel": {"password_file": pipe}}
    with pytest.raises(AccessError, match=names):
        StoreEndpoint(RedisConfig.model_validate(sentinel))
    files = {"cert_file": Path(__file__)} if key == "key_file" else {}
    tls = RedisConfig.model_validate({"url": "rediss://h", "tls": {**files, key: pipe}})
    with pytest.raises(AccessError, match=r"pipe: no cert.*it is no regular file.*check the files in redis.tls"):
        StoreEndpoint(tls)


async def test_a_new_password_is_read_when_it_is_renewed(file: Path) -> None:
    access = StoreEndpoint(RedisConfig(password_file=file))
    write(file, "new\n")
    assert access.greeting() == (("AUTH", "old"),)
    assert await access.renew_greeting() == 0
    assert access.greeting() == (("AUTH", "new"),)


async def test_while_the_disk_hangs_the_last_password_is_used(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = StoreEndpoint(RedisConfig(password_file=fifo))
    hang(fifo)
    async with asyncio.timeout(BOUND):
        silent = [await access.renew_greeting() for _ in range(3)]
        assert 0 < silent[0] < silent[1] < silent[2]
        await access.renew()
        assert access.greeting() == (("AUTH", "old"),)
        write(fifo, "new\n")  # for the one look that is under way
        monkeypatch.setattr(endpoint, "LOOK_LIMIT", BOUND)
        assert await access.renew_greeting() == 0
        assert access.greeting() == (("AUTH", "new"),)


async def test_a_file_that_is_slow_and_will_not_do_is_an_error_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LOOK_LIMIT", 0.01)
    gate, looks = Event(), list[int]()

    def read() -> str:
        looks.append(1)
        if len(looks) > 1:
            gate.wait(BOUND)
            gate.clear()
            raise AccessError("others can read it")
        return "old"

    reading = FileReading(read)
    assert not await reading.renew()
    gate.set()
    async with asyncio.timeout(BOUND):
        while reading.age(0.0):  # noqa: ASYNC110 - a thread ends
            await asyncio.sleep(0.001)
        with pytest.raises(AccessError, match="others can read it"):
            await reading.renew()
    gate.set()
    assert reading.last == "old"


async def test_without_a_thread_the_last_password_is_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    access = StoreEndpoint(RedisConfig(password_file=file))
    write(file, "new\n")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        await access.renew()
        assert (await access.renew_greeting(), access.greeting()) == (0, (("AUTH", "old"),))
    await access.renew()
    assert access.greeting() == (("AUTH", "new"),)


async def test_a_link_opens_while_the_disk_hangs(fifo: Path, tmp_path: Path) -> None:
    got = asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.readuntil(b"INFO\r\n"))
        info = b"run_id:1\r\nrole:master\r\n"
        writer.write(b"+OK\r\n$%d\r\n%s\r\n" % (len(info), info))
        writer.close()

    link = StoreLink(StoreEndpoint(RedisConfig(url=f"unix://{tmp_path}/redis", password_file=fifo)), 1.0)
    hang(fifo)
    async with asyncio.timeout(BOUND), await asyncio.start_unix_server(serve, tmp_path / "redis"):
        await link.open()
        assert b"old" in await got.get()
        await link.drop()
    write(fifo, "")


async def test_a_file_that_will_not_do_any_more_is_an_error_in_the_same_words(file: Path) -> None:
    access = StoreEndpoint(RedisConfig(password_file=file))
    write(file, "new", 0o644)
    with pytest.raises(AccessError, match=r"has mode 0644.*chmod 0600"):
        await access.renew_greeting()
    write(file, "two\nlines")
    with pytest.raises(AccessError, match=f"{file} does not hold one line"):
        await access.renew()
    assert access.greeting() == (("AUTH", "old"),)


async def test_who_comes_while_a_look_is_under_way_waits_for_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LOOK_LIMIT", BOUND)
    gate, looks = Event(), list[int]()
    gate.set()

    def read() -> int:
        looks.append(1)
        gate.wait(BOUND)
        return len(looks)

    reading = FileReading(read)
    gate.clear()
    waiting = asyncio.gather(*(reading.renew() for _ in range(5)))
    await asyncio.sleep(0)
    gate.set()
    assert await waiting == [True] * 5
    assert (reading.last, len(looks)) == (2, 2)


async def test_without_files_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    access = StoreEndpoint(RedisConfig(url="redis://ann:pw@h/3"))
    monkeypatch.setattr(endpoint, "in_daemon", None)
    await access.renew()
    assert await access.renew_greeting() == 0
    assert access.greeting() == (("AUTH", "ann", "pw"), ("SELECT", "3"))


class Resolver:
    """Knows ``known``, or hangs until ``go`` is set."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, ...]] = {"redis.test": ("10.0.0.1", "10.0.0.2")}
        self.asked, self.go = list[str](), Event()
        self.go.set()

    def look_up(self, host: str) -> tuple[str, ...]:
        self.asked.append(host)
        self.go.wait(BOUND)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.known[host]


async def test_a_host_is_where_the_name_server_says_now() -> None:
    resolver = Resolver()
    addresses = HostAddresses(resolver.look_up)
    assert await addresses.find("redis.test") == ("10.0.0.1", "10.0.0.2")
    resolver.known["redis.test"] = ("10.0.0.3",)
    assert await addresses.find("redis.test") == ("10.0.0.3",)


async def test_while_no_name_server_answers_a_host_is_where_it_was_and_one_thread_waits() -> None:
    """Each try had a thread of the loop's pool, until nothing else had one; and the store was away."""
    resolver = Resolver()
    addresses = HostAddresses(resolver.look_up)
    before = await addresses.find("redis.test")
    resolver.go.clear()
    async with asyncio.timeout(BOUND):
        assert {await addresses.find("redis.test") for _ in range(3)} == {before}
        assert set(await asyncio.gather(*(addresses.find("redis.test") for _ in range(50)))) == {before}
    assert len(resolver.asked) == 2
    resolver.known["redis.test"] = ("10.0.0.3",)
    resolver.go.set()
    async with asyncio.timeout(BOUND):
        while await addresses.find("redis.test") == before:
            pass


async def test_a_name_that_nobody_knows_any_more_leads_where_it_led() -> None:
    resolver = Resolver()
    addresses = HostAddresses(resolver.look_up)
    before = await addresses.find("redis.test")
    resolver.known.clear()
    assert await addresses.find("redis.test") == before
    with pytest.raises(OSError, match=r"the name other\.test is not resolved: Name or service not known"):
        await addresses.find("other.test")


async def test_an_address_is_not_looked_up() -> None:
    resolver = Resolver()
    assert [await HostAddresses(resolver.look_up).find(host) for host in ("10.0.0.9", "fe80::1")] == [
        ("10.0.0.9",), ("fe80::1",),
    ]  # fmt: skip
    assert resolver.asked == []


async def test_addresses_of_ever_more_hosts_are_not_kept() -> None:
    resolver = Resolver()
    addresses = HostAddresses(resolver.look_up)
    for number in range(2 * MOST_HOSTS):
        resolver.known = {f"h{number}": ("10.0.0.1",)}
        await addresses.find(f"h{number}")
    resolver.known.clear()
    found = await asyncio.gather(*(addresses.find(f"h{n}") for n in range(2 * MOST_HOSTS)), return_exceptions=True)
    assert sum(not isinstance(one, OSError) for one in found) <= MOST_HOSTS


def test_what_the_machine_itself_knows() -> None:
    assert "127.0.0.1" in look_up("localhost")
    for name in ("x" * 64 + ".test", "no-such-host.invalid"):
        with pytest.raises(OSError):
            look_up(name)
