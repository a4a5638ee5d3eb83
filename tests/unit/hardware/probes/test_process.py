"""Whose fault an error is: the probe's, which wrote what cannot be understood, or the agent's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nodeagent.hardware.probes.process import NotUnderstoodError, Probe, ProbeLimits, TakeMessage, parsing

LIMIT = 60.0
"""Seconds within which something that is to happen has happened."""


async def ended_or_reported(line: str, received: TakeMessage) -> tuple[Probe, BaseException | None]:
    """A probe that wrote this line, once it has reported something or was ended by an error."""
    reported = asyncio.Event()
    command = ("/bin/sh", "-c", 'printf "%s\\n" "$0"; exec sleep 600', line)
    probe = Probe("nvml", lambda: command, {}, ProbeLimits(LIMIT), received, reported.set)
    running, waiting = asyncio.create_task(probe.run()), asyncio.create_task(reported.wait())
    async with asyncio.timeout(LIMIT):
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    error = running.exception() if running.done() else None
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    return probe, error


def takes_gpus(message: dict[str, Any]) -> None:
    with parsing():
        message["gpus"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 2 column 1 (char 2)"),
        ("[]", "'list' object has no attribute 'get'"),
        ("[" * 5000, "maximum recursion depth exceeded"),
        ('{"gpu": []}', "'gpus'"),
    ],
    ids=lambda text: str(text)[:10],
)
async def test_a_line_that_cannot_be_understood_ends_the_probe(line: str, why: str) -> None:
    probe, error = await ended_or_reported(line, takes_gpus)
    assert error is None
    assert probe.reading.problem.startswith(f"it writes what this agent does not understand: {why}")


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, AttributeError, RecursionError, TimeoutError])
async def test_an_error_of_the_agents_own_code_is_not_the_probes(error: type[Exception]) -> None:
    def fails(_: dict[str, Any]) -> None:
        raise error("of the agent")

    probe, found = await ended_or_reported('{"gpus": []}', fails)
    assert (probe.reading.problem, probe.reading.missed) == ("", 0)
    assert (type(found), str(found)) == (error, str(error("of the agent")))


def test_what_is_not_understood_keeps_its_words() -> None:
    with pytest.raises(NotUnderstoodError, match=r"^'gpus'$"):
        takes_gpus({})
