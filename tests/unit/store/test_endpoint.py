"""What connections know of password files whose disk may hang: a FIFO that nobody writes to is such a file."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store import endpoint
from nodeagent.store.endpoint import AccessError, FileReading, StoreEndpoint
from nodeagent.store.link import StoreLink

BOUND = 20.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text("old\n")
    return path


@pytest.fixture
def fifo(file: Path) -> Iterator[Path]:
    """Where to put a file that hangs; in the end nobody waits for it any more."""
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
