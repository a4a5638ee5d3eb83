"""Which GPUs an agent starts with, by a driver that answers, hangs, or is not there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from nodeagent.hardware.discovery import DRIVER_LIMIT, find_gpus
from nodeagent.model.node import Gpu
from nodeagent.spec.agentconfig import AgentConfig
from tests.fakenvml.build import build, write_state

UUIDS = [f"GPU-fa4e0000-0000-0000-0000-{n:012d}" for n in range(2)]
FOUND = tuple(Gpu(uuid=uuid, index=i, name="NVIDIA H100 80GB HBM3") for i, uuid in enumerate(UUIDS))


class Start:
    """An agent's start, again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        library = build(folder / "nvml")
        self._environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(folder / "driver")}

    def driver(self, *lines: str) -> None:
        write_state(self._folder / "driver", "gpus 2", *lines)

    async def __call__(self, boot: str = "b1", first: bool = False, **node: Any) -> tuple[tuple[Gpu, ...], str]:
        dirs = {name: self._folder / name for name in ("run", "state", "logs")}
        config = AgentConfig.model_validate({"dirs": dirs, "node": {"gpus": UUIDS} | node})
        return await find_gpus(config, boot, self._environ, first=first)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path)


async def until_answered(start: Start, **node: Any) -> tuple[tuple[Gpu, ...], str]:
    """A busy machine may take longer than a start waits."""
    for _ in range(20):
        found, problem = await start(**node)
        if "did not answer" not in problem:
            return found, problem
    raise AssertionError(problem)


async def test_those_of_the_config(start: Start) -> None:
    start.driver()
    assert await until_answered(start) == (FOUND, "")
    more, problem = await until_answered(start, gpus=[UUIDS[1], "GPU-none"])
    assert [(g.uuid, g.healthy) for g in more] == [(UUIDS[1], True), ("GPU-none", False)]
    assert problem == "GPUs of the config not found: GPU-none"
    assert await start(gpus="none") == ((), "")


async def test_a_hung_driver_does_not_hold_up_the_start_and_what_this_boot_knows_is_offered(start: Start) -> None:
    start.driver("hang nvmlDeviceGetName")
    began = time.monotonic()
    found, problem = await start()
    assert time.monotonic() - began < DRIVER_LIMIT + 3.0, "a busy machine's second is longer"
    assert [g.healthy for g in found] == [False, False]
    assert {g.why for g in found} == {"the driver has not listed it yet"}
    assert problem.startswith(f"GPUs unknown: the driver did not answer within {DRIVER_LIMIT:g} s; none is offered")
    start.driver()
    await until_answered(start)
    start.driver("hang nvmlDeviceGetName")
    assert await start() == (
        FOUND,
        f"GPUs unknown: the driver did not answer within {DRIVER_LIMIT:g} s; 2 are known from before",
    )
    assert [g.healthy for g in (await start(boot="b2"))[0]] == [False, False], "after a reboot nothing is known"


async def test_the_first_start_of_a_boot_waits_for_gpus_that_are_slow_to_come_up(start: Start) -> None:
    """A node that was never seen before had joined by then, without GPUs: a job that takes all of a node's GPUs got one
    worker there, without any."""
    start.driver(f"cold {1000 * DRIVER_LIMIT:g}")
    assert [gpu.healthy for gpu in (await start())[0]] == [False, False], "a later start does not"
    assert await start(first=True) == (FOUND, "")


async def test_a_driver_that_fails_is_reported(start: Start) -> None:
    start.driver("error nvmlInitWithFlags 999")
    found, problem = await until_answered(start)
    assert [g.why for g in found] == ["the driver has not listed it yet"] * 2
    assert problem.startswith("the GPU query failed: ")


async def test_a_lost_gpu_hides_no_other_that_this_boot_knows(start: Start) -> None:
    """The whole list fails for it. What becomes of the lost one is the monitor's business, once it has read it."""
    start.driver()
    await until_answered(start)
    start.driver("0.lost 1")
    found, problem = await until_answered(start)
    assert found == FOUND
    assert problem == "the GPU query failed: NVML: GPU is lost; 2 are known from before"
