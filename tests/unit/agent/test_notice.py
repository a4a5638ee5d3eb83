"""The notice that a machine is taken away: from a file, from a command, and what its words mean."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
from pydantic import ValidationError

from nodeagent.agent import notice
from nodeagent.agent.notice import UNDATED, NoticeWatch, read_notice
from nodeagent.model.node import Notice
from nodeagent.osutil import untrusted
from nodeagent.spec.agentconfig import NoticeConfig

NOW = 1_900_000_000.0
TIME = "2030-03-17T17:48:20Z"
"""100 s later."""
LIMIT = 20.0
"""Seconds within which something that is to happen has happened."""
LOOKS = 0.3
"""Seconds in which the first look is over where nothing is to come of it."""


@pytest.mark.parametrize(
    ("words", "until", "text"),
    [
        ("at 2030-03-17T12:48:20.000000001-0500", 100,
         "to be taken away at 2030-03-17 17:48:20 UTC (notice: at 2030-03-17T12:48:20.000000001-0500)"),
        (f'{{"time": "{TIME}"}}', 100, f'to be taken away at 2030-03-17 17:48:20 UTC (notice: {{"time": "{TIME}"}})'),
        (
            "at 2030-03-17T18:48:20+01:00\nbye", 100,
            "to be taken away at 2030-03-17 17:48:20 UTC (notice: at 2030-03-17T18:48:20+01:00 bye)",
        ),
        ("", UNDATED, "to be taken away at 2030-03-17 17:48:40 UTC or so"),
        ("TRUE", UNDATED, "to be taken away at 2030-03-17 17:48:40 UTC or so (notice: TRUE)"),
        (
            "2030-99-99T99:99:99Z", UNDATED,
            "to be taken away at 2030-03-17 17:48:40 UTC or so (notice: 2030-99-99T99:99:99Z)",
        ),
    ],
)  # fmt: skip
def test_what_its_words_mean(words: str, until: float, text: str) -> None:
    assert read_notice(words, NOW) == Notice(until=NOW + until, text=text)


def test_long_words_are_cut() -> None:
    assert len(read_notice("x" * 5000, NOW).text) < 200


class Published(list[Notice | None]):
    """What is known by and by."""

    async def until(self, count: int) -> None:
        async with asyncio.timeout(LIMIT):
            while len(self) < count:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(config: NoticeConfig) -> AsyncIterator[Published]:
    found = Published()
    watch = asyncio.create_task(NoticeWatch(config, os.environ, lambda: NOW, found.append).run())
    yield found
    assert not watch.done(), watch.exception()  # it crashed, or it stopped watching
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_a_file_is_a_notice_while_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    async with watched(NoticeConfig(file=file, every=0.5)) as found:
        file.write_text(TIME)
        await found.until(1)
        file.unlink()
        await found.until(2)
    assert [one and one.until for one in found] == [NOW + 100, None]


@pytest.mark.parametrize("name", ["huge", "link", "folder"])
async def test_what_is_no_plain_small_file_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "huge").write_bytes(b"x" * 5000)
    (tmp_path / "real").write_text(TIME)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    async with watched(NoticeConfig(file=tmp_path / name, every=0.5)) as found:
        await asyncio.sleep(LOOKS)
    assert found == []


async def test_a_command_is_one_while_it_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "state"
    code = f"import pathlib, sys; f = pathlib.Path({str(file)!r}); print(f.read_text()) if f.exists() else sys.exit(22)"
    async with watched(NoticeConfig(command=(sys.executable, "-c", code), every=0.5)) as found:
        file.write_text(TIME)
        await found.until(1)
        file.unlink()
        await found.until(2)
    assert [one and one.until for one in found] == [NOW + 100, None]


async def test_either_of_both_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    async with watched(NoticeConfig(file=file, command=("echo", TIME), every=0.5)) as found:
        await found.until(1)
    assert [one and one.until for one in found] == [NOW + 100]


async def test_a_command_that_cannot_be_started_is_none() -> None:
    async with watched(NoticeConfig(command=("/nowhere/at/all",), every=0.5)) as found:
        await asyncio.sleep(LOOKS)
    assert found == []


@pytest.mark.parametrize("values", [{}, {"command": []}, {"file": "notice"}])
def test_it_comes_from_somewhere(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        NoticeConfig.model_validate(values)


async def test_a_file_that_nobody_can_look_at_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "notice"
    file.write_text(TIME)
    async with watched(NoticeConfig(file=file, every=0.5)) as found:
        await found.until(1)
        with monkeypatch.context() as hung:
            hung.setattr(untrusted, "ASIDE_MAX", 0)
            await asyncio.sleep(0.5 + LOOKS)
        file.write_bytes(b"x" * 5000)
        await asyncio.sleep(0.5 + LOOKS)
        assert len(found) == 1
        file.unlink()
        await found.until(2)
    assert [one and one.until for one in found] == [NOW + 100, None]


async def test_on_a_mount_that_hangs_one_look_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun, rounds = threading.Event(), SimpleQueue[Path](), asyncio.Queue[str]()

    def words_in(path: Path) -> None:
        begun.put(path)
        gate.wait(30)

    monkeypatch.setattr(notice, "_words_in", words_in)
    monkeypatch.setattr(notice, "BOUND", 0.01)
    monkeypatch.setattr(NoticeWatch, "_unknown", lambda _self, _source, why: rounds.put_nowait(why))
    config = NoticeConfig(file=tmp_path / "notice").model_copy(update={"every": 0.01})
    async with watched(config):
        for _ in range(10):
            await rounds.get()
    assert begun.get(timeout=30) == tmp_path / "notice"
    assert begun.empty()
    gate.set()
