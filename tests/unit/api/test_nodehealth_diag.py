"""Checks by work over HTTP: one run at a time, by operators, and not on what a job uses."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.diagnosis import Diagnosis
from nodeagent.model.health import Figure
from nodeagent.osutil.clock import SystemClock
from nodeagent.spec.healthconfig import HealthConfig
from tests.integration.shim_support import wait_for
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec
from tests.unit.api.test_nodehealth import post
from tests.unit.api.test_server_away import answered, served

HAND = Path(__file__).parents[1] / "diag" / "hand.py"
PATH = "/v1/nodes/n1/diag"
BOUND = 30.0


def hands(folder: Path, **plan: Any) -> dict[str, str]:
    """The environment in which every CPU process does as planned."""
    file = folder / "hand"
    file.write_text(json.dumps({"": plan}))
    return {"HAND": str(file), "PATH": "/usr/bin:/bin"}


async def made(
    folder: Path, environ: dict[str, str], changes: list[None] | None = None, *, bound: float = BOUND
) -> tuple[FakeView, Diagnosis]:
    """n1 has no driver, so its CPU is checked; n2's figures are known."""
    view = FakeView(folder)
    view.unlike["n2"] = {"figures": (Figure(kind="NVIDIA H200", check="matmul", value=100.0, unit="TFLOP/s"),)}
    await view.join()
    health = HealthConfig.model_validate({"diag": {"python": HAND, "bound": bound}})
    seen = changes if changes is not None else []
    config = view.config.model_copy(update={"health": health})
    diagnosis = view.diagnosis = Diagnosis(config, environ, SystemClock(), lambda: seen.append(None))
    return view, diagnosis


async def until_done(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with asyncio.timeout(BOUND):
        while True:
            _, found = await answered(session, PATH)
            if found["state"] != "running":
                return found
            await asyncio.sleep(0.02)


async def test_a_run_and_what_came_of_it(tmp_path: Path) -> None:
    changes: list[None] = []
    view, diagnosis = await made(tmp_path, hands(tmp_path, matmul=12.0), changes)
    async with served(view) as session:
        _, before = await answered(session, PATH)
        status, begun = await post(session, PATH)
        again, _ = await post(session, PATH)
        other, refused = await post(session, PATH, request_id="another")
        done = await until_done(session)
        repeated, same = await post(session, PATH)
        another, used = await post(session, PATH, busy=True)
        await wait_for(lambda: diagnosis.figures)  # a run is over before its results are on the disk
    assert before["state"] == "none"
    assert (status, begun["state"], again) == (200, "running", 200)
    assert (other, "already" in refused["error"]["message"]) == (409, True)
    assert done["report"]["passed"] is True
    assert done["report"]["checks"][0] == {
        "name": "matmul", "gpu": "", "passed": True, "value": 12.0, "unit": "TFLOP/s", "why": "",
    }  # fmt: skip
    assert (repeated, same["state"]) == (200, "done"), "a request that is repeated does nothing new"
    assert (another, "was used for another change before" in used["error"]["message"]) == (409, True)
    assert [f.value for f in diagnosis.figures if f.check == "matmul"] == [12.0]
    assert len(changes) >= 2


async def test_a_hand_that_hangs_is_a_failure_and_the_run_ends(tmp_path: Path) -> None:
    view, _ = await made(tmp_path, hands(tmp_path, matmul=None), bound=3.0)
    async with served(view) as session:
        await post(session, PATH)
        done = await until_done(session)
    assert done["report"]["passed"] is False
    assert done["report"]["checks"][0]["why"] == "hung: no result within 3 s"


async def test_gpus_are_not_given_away_while_they_are_checked(tmp_path: Path) -> None:
    _, diagnosis = await made(tmp_path, hands(tmp_path))
    run = diagnosis.start(("GPU-a", "GPU-b"), ("GPU-b",), "check", (), whole=True)
    assert diagnosis.held == {"GPU-a"}, "those that a job has it keeps"
    async with asyncio.timeout(BOUND):
        await run
    assert diagnosis.held == frozenset()


@pytest.mark.parametrize(("path", "status", "message"), [
    ("/v1/nodes/n2/diag", 409, "nothing was changed"),
    ("/v1/nodes/n2/diag?local_only=1", 409, "ask on n2 itself"),
    ("/v1/nodes/n9/diag", 404, "there are: n1"),
])  # fmt: skip
async def test_what_is_refused(tmp_path: Path, path: str, status: int, message: str) -> None:
    view, _ = await made(tmp_path, hands(tmp_path))
    view.near = {"n1": view.near["n1"]}  # n2 is another machine, which serves nobody
    await view.join()
    async with served(view) as session:
        found, answer = await post(session, path)
    assert (found, message in answer["error"]["next"]) == (status, True), answer


async def test_what_a_job_uses_is_left_alone_unless_asked_for(tmp_path: Path) -> None:
    view, diagnosis = await made(tmp_path, hands(tmp_path))
    await submit_one(view.store, "u1", spec("digits"), 1000, time.time(), "alice", "r1")
    await view.refresh()
    await view.form(view.job("digits"), 2)
    await view.refresh()
    async with served(view) as session:
        status, answer = await post(session, PATH)
        assert (status, "in use by a job" in answer["error"]["message"]) == (409, True)
        status, _ = await post(session, PATH, busy=True)
        assert status == 200
        await until_done(session)
    assert diagnosis.report is not None
