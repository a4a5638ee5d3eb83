"""A node's health over HTTP: the rules, an operator's word, drills."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import aiohttp

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.health import NodeHealth
from nodeagent.agent.metrics import Metrics
from nodeagent.hardware.monitor import OwnWork
from nodeagent.hardware.readings import DeviceEvent
from nodeagent.model.node import Gpu
from nodeagent.osutil.clock import SystemClock
from nodeagent.spec.healthconfig import CheckConfig, HealthConfig
from tests.unit.api.fakes import FakeView
from tests.unit.api.test_metrics import values
from tests.unit.api.test_server_away import answered, served

GPUS = (Gpu(uuid="GPU-a", index=0), Gpu(uuid="GPU-b", index=1))


class LaterClock(SystemClock):
    """The machine's, moved on."""

    later = 0.0

    def wall(self) -> float:
        return super().wall() + self.later


async def cared_for(folder: Path, health: HealthConfig | None = None, clock: SystemClock | None = None) -> FakeView:
    """n1 has two GPUs and somebody who looks after them, n2 has neither."""
    view = FakeView(folder)
    view.unlike["n1"] = {"gpus": GPUS}
    await view.join()
    facts = view.facts("n1")
    nothing = HealthConfig() if health is None else health
    view.node_health = NodeHealth(
        view.config.model_copy(update={"health": nothing}), "n1", facts, {}, clock or SystemClock(), OwnWork(),
        changed=lambda: None, counted=lambda _kind, _outcome: None,
    )  # fmt: skip
    return view


async def post(session: aiohttp.ClientSession, path: str, **asked: object) -> tuple[int, dict[str, Any]]:
    async with session.post(path, json={"request_id": "r", **asked}) as answer:
        return answer.status, await answer.json()


async def test_the_rules_in_force(tmp_path: Path) -> None:
    checks = {"lustre": CheckConfig(command=("true",))}
    health = HealthConfig(dry_run=frozenset({"nvlink.down"}), ignore=frozenset({"disk"}), checks=checks)
    view = await cared_for(tmp_path, health)
    async with served(view) as session:
        _, found = await answered(session, "/v1/health/rules")
        view.node_health = None
        _, off = await answered(session, "/v1/health/rules")
    modes = {row["name"]: row["mode"] for row in found["items"]}
    assert (modes["nvlink.down"], modes["disk"], modes["xid.79"], modes["check.lustre"]) == (
        "dry run",
        "off",
        "on",
        "on",
    )
    assert {row["mode"] for row in off["items"]} == {"off"}


async def test_a_drill_and_an_operators_word(tmp_path: Path) -> None:
    view = await cared_for(tmp_path)
    assert view.node_health is not None
    monitor = view.node_health.monitor
    async with served(view) as session:
        assert await post(session, "/v1/nodes/n1/health/inject", xid=79, gpu="GPU-b") == (
            200,
            {"name": "n1", "gpu": "GPU-b", "xid": 79},
        )
        monitor.judge()
        first, second = view.node_health.facts()["gpus"]
        assert (first.healthy, second.healthy) == (True, False)
        none, _ = await post(session, "/v1/nodes/n1/health/ack", gpu="GPU-a")
        status, answer = await post(session, "/v1/nodes/n1/health/ack")
    assert none == 409
    assert status == 200
    (verdict,) = answer["verdicts"]
    assert (verdict["rule"], verdict["stage"], verdict["gpu"]) == ("xid.79", "probation", 1)
    assert "drill by" in verdict["raw"]


async def test_a_gpu_that_is_missing_is_taken_as_gone_by_an_operators_word(tmp_path: Path) -> None:
    """It is no GPU of the node any more, so its name is known by its verdict alone."""
    clock = LaterClock()
    view = await cared_for(tmp_path, clock=clock)
    assert view.node_health is not None
    monitor = view.node_health.monitor
    both = [{"uuid": "GPU-b", "index": 1}, {"uuid": "GPU-c", "index": 2}]
    monitor.take_gpus({"gpus": both})
    monitor.judge()
    monitor.take_gpus({"gpus": both[:1]})
    monitor.judge()
    clock.later += 10.0
    monitor.judge()
    assert [(v.rule, v.device) for v in monitor.verdicts] == [("nvml.missing", "GPU-c")]
    async with served(view) as session:
        status, answer = await post(session, "/v1/nodes/n1/health/ack", gpu="GPU-c")
    assert (status, answer["verdicts"]) == (200, [])
    monitor.judge()
    assert monitor.verdicts == ()


async def test_what_is_refused(tmp_path: Path) -> None:
    view = await cared_for(tmp_path)
    view.near = {"n1": view.near["n1"]}  # n2 is another machine, which serves nobody
    await view.join()
    asked: tuple[tuple[str, dict[str, object], int, str], ...] = (
        ("/v1/nodes/n2/health/ack", {}, 409, "nothing was changed"),
        ("/v1/nodes/n9/health/ack", {}, 404, "there are: n1"),
        ("/v1/nodes/n1/health/inject", {"xid": "79"}, 400, "catalog"),
        ("/v1/nodes/n1/health/inject", {"xid": 0}, 400, "catalog"),
        ("/v1/nodes/n1/health/inject", {"xid": 79, "gpu": "GPU-z"}, 404, "did you mean"),
    )
    async with served(view) as session:
        for path, more, status, message in asked:
            found, answer = await post(session, path, **more)
            assert found == status, (path, answer)
            assert message in answer["error"]["next"], (path, answer)
        view.node_health = None
        found, answer = await post(session, "/v1/nodes/n1/health/ack")
    assert (found, answer["error"]["next"]) == (409, "take `health: off` out of its agent's config")


async def test_the_metrics(tmp_path: Path) -> None:
    view, metrics = await cared_for(tmp_path), MetricsPage(Metrics())
    assert view.node_health is not None
    monitor = view.node_health.monitor
    for source in ("kernel", "nvml"):  # both tell of the same two
        for _ in range(2):
            monitor.take_event(DeviceEvent("xid", time.time(), "GPU-a", 79, "Xid 79"), source)
    monitor.judge()
    verdict = (("gpu", "GPU-a"), ("rule", "xid.79"), ("severity", "fatal"))
    for _ in range(2):
        page = values(metrics.text(view))
        assert page["nodeagent_gpu_verdicts", verdict] == 1
        assert page["nodeagent_xids_total", (("gpu", "GPU-a"), ("xid", "79"))] == 2
