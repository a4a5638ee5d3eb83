"""What may hold up an agent's start, and what may not: a folder of logs, and an agent before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event

import pytest
from structlog.testing import capture_logs

from nodeagent.agent import serve
from nodeagent.agent.identity import Identity, IdentityError, IdentityNotSavedError, LockHeldError
from nodeagent.agent.serve import claim_logs, take_in_turn
from nodeagent.model.node import Incarnation

BOUND = 20.0


async def test_logs_that_do_not_answer_hold_up_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOGS_LIMIT", 0.01)
    gate = Event()

    def hang(_: Path) -> None:
        gate.wait(BOUND)

    look = await claim_logs(tmp_path, hang)
    assert not look.done()
    gate.set()
    async with asyncio.timeout(BOUND):
        assert await look == ""


async def test_logs_of_another_user_are_an_error_however_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gate = tmp_path / "logs", Event()

    def refuse(_: Path) -> None:
        gate.wait(BOUND)
        raise IdentityError("belongs to uid 7")

    monkeypatch.setattr(serve, "LOGS_LIMIT", 0.01)
    look = await claim_logs(path, refuse)
    gate.set()
    with pytest.raises(IdentityError, match="uid 7"):
        await look
    monkeypatch.setattr(serve, "LOGS_LIMIT", BOUND)
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(IdentityError, match="may be written to by everybody"):
        await claim_logs(path)


@pytest.mark.parametrize(
    ("error", "words"), [(None, "the folder of logs answers"), (OSError("I/O"), "the folder of logs cannot be used")]
)
async def test_a_look_that_comes_late_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None, words: str
) -> None:
    monkeypatch.setattr(serve, "LOGS_LIMIT", 0.01)
    gate = Event()

    def hang(_: Path) -> None:
        gate.wait(BOUND)
        if error is not None:
            raise error

    with capture_logs() as logs:
        look = await claim_logs(tmp_path, hang)
        gate.set()
        async with asyncio.timeout(BOUND):
            await look
        await asyncio.sleep(0)
    assert [entry["event"].partition(":")[0] for entry in logs[1:]] == [words]


async def test_logs_that_are_broken_hold_up_no_start(tmp_path: Path) -> None:
    path = tmp_path / "logs"
    path.write_text("no folder")
    assert str(path) in (await claim_logs(path)).result()


async def test_an_agent_takes_the_place_of_one_that_ends(tmp_path: Path) -> None:
    first, second = (Identity(tmp_path / "run", "boot-1", None, "n1") for _ in range(2))
    first.take()
    asyncio.get_running_loop().call_later(0.05, first.release)
    await take_in_turn(second)
    assert second.incarnation.start == 2
    second.release()


class Full(Identity):
    """Of a run folder that has room at the third try."""

    tries = 0

    def take(self) -> Incarnation:
        self.tries += 1
        if self.tries < 3:
            raise IdentityNotSavedError("No space left")
        return super().take()


async def test_a_run_folder_that_is_full_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Full(tmp_path / "run", "boot-1", None, "n1")
    await take_in_turn(identity)
    assert identity.incarnation.start == 1
    identity.release()
    monkeypatch.setattr(serve, "HELD_LIMIT", -1.0)
    with pytest.raises(IdentityNotSavedError, match="No space left"):
        await take_in_turn(Full(tmp_path / "run", "boot-1", None, "n1"))


async def test_one_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HELD_LIMIT", 0.0)
    first, second = (Identity(tmp_path / "run", "boot-1", None, "n1") for _ in range(2))
    first.take()
    with pytest.raises(LockHeldError, match="another agent"):
        await take_in_turn(second)
    first.release()
