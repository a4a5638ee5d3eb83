"""The metrics page: what it says, that its labels are bounded, and that docs/metrics.md says all of it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import METRICS
from nodeagent.agent.gauges import GPU_STATES, MAX_JOBS, MAX_ROLES, NODE_STATES, MetricsPage
from nodeagent.agent.health import NodeHealth
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.undecided import Guarded
from nodeagent.api.server import ApiServer
from nodeagent.hardware.monitor import OwnWork
from nodeagent.hardware.readings import DeviceEvent
from nodeagent.model.job import BudgetEntry, Phase
from nodeagent.model.node import Gpu
from nodeagent.model.pod import PodPhase, Stall, WorkerState
from nodeagent.model.queue import Queue, Queues
from nodeagent.model.world import AloneRestart, Cause, PodReport
from nodeagent.osutil.clock import SystemClock
from nodeagent.plan.cluster import Refusal, RefusalKind
from nodeagent.pods.base import PodStatus
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec, spec_of_roles

ROOT = Path(__file__).parents[3]
PROMTOOL = shutil.which("promtool")


def values(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(page.decode())
        for s in family.samples
    }


async def running(folder: Path, counted: Metrics | None = None) -> tuple[FakeView, MetricsPage]:
    """A cluster with one job that was re-formed, whose pod is here, and everything has been counted."""
    view, metrics = FakeView(folder), counted or Metrics()
    gpus = (Gpu(uuid="cpu0", index=0), Gpu(uuid="GPU-b", index=1), Gpu(uuid="GPU-c", index=2, healthy=False))
    view.unlike["n1"] = {"gpus": gpus}  # the job's first slot has the name of a GPU: so that GPU is used
    await view.join()
    await submit_one(view.store, "u1", spec(), 1000, 1.0, "alice", "r1")
    await submit_one(view.store, "u2", spec_of_roles(), 1000, 1.0, "alice", "r2")
    await view.refresh()
    await view.form(view.job("digits"), 2)
    await view.refresh()
    served = view.cluster().served
    fault = BudgetEntry(at=served, wall=1.0, kind="worker_failed", counts=True, node="n1", rank=0)
    await view.form(view.job("digits"), 2, Cause(kind="worker_failed", text="exit code 1", node="n1"), fault)
    await view.refresh()
    token = view.job("digits").active
    assert token is not None
    await view.store.commit("u1", token, "n1", view.lives["n1"], "step-40", 40, 1)
    await view.refresh()
    stall = Stall(limit=60.0, suspects=True, ranks=())
    view.own_pods["u1"] = PodStatus(
        uid="u1", phase="running", preforked={11: 1000, 12: 500}, snapshot_bytes=4096, stall=stall,
        workers=tuple(WorkerState(rank=i, local_rank=i, pid=7 + i, state="running", step=40 + i) for i in range(2)),
    )  # fmt: skip
    sick = view.facts("n1").model_copy(update={"gpus": (Gpu(uuid="GPU-a", index=0),)})
    clock = SystemClock()
    view.node_health = NodeHealth(
        view.config, "n1", sick, {}, clock, OwnWork(), changed=lambda: None, counted=metrics.repaired
    )
    metrics.repaired("reboot", "done")
    view.node_health.monitor.take_gpus({"gpus": [{"uuid": "GPU-a", "index": 0, "temperature": 61}]})
    view.node_health.monitor.take_event(DeviceEvent("xid", time.time(), "GPU-a", 79, "Xid 79"), "nvml")
    view.node_health.monitor.judge()
    metrics.restarts.labels(job="digits", node="n1", cause="worker_failed").inc(3)
    metrics.devices.count(replace(view.cluster(), served=0), "n1")
    metrics.store_errors.inc()
    metrics.store_roundtrip.observe(0.002)
    metrics.recovered("digits", "worker_failed", {"formed": 0.02, "whole": 0.04})
    return view, MetricsPage(metrics)


async def test_the_page(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    page = values(metrics.text(view))
    whole = ("cause", "worker_failed"), ("phase", "whole")
    assert page["nodeagent_recovery_seconds_sum", whole] == 0.04
    assert page["nodeagent_recovery_seconds_bucket", (whole[0], ("le", "0.05"), whole[1])] == 1
    assert page["nodeagent_jobs", (("phase", "running"),)] == 1
    assert page["nodeagent_jobs", (("phase", "failed"),)] == 0
    assert page["nodeagent_nodes", (("state", "ready"),)] == 3
    assert page["nodeagent_lease_margin_seconds", ()] == 2.0
    assert page["nodeagent_joined", ()] == 1
    assert page["nodeagent_repairs_total", (("kind", "reboot"), ("outcome", "done"))] == 1
    assert page["nodeagent_nodes_repairing", (("stage", "probation"),)] == 0
    assert page["nodeagent_store_errors_total", ()] == 1
    restarts = (("cause", "worker_failed"), ("job", "digits"), ("node", "n1"))
    assert page["nodeagent_restarts_total", restarts] == 3
    assert ("nodeagent_build_info", (("node", "n1"), ("version", "0.1.0"))) in page
    assert page["nodeagent_store_roundtrip_seconds_count", ()] == 1


async def test_what_is_reported_of_a_live_job(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    page = values(metrics.text(view))
    digits = ("job", "digits")
    assert page["nodeagent_generation", (digits,)] == 2
    assert 0 <= page["nodeagent_phase_seconds", (digits, ("phase", "running"))] < 60
    assert page["nodeagent_generation_cause", (("cause", "worker_failed"), digits)] == 2
    assert page["nodeagent_job_restarts", (digits,)] == 1
    assert page["nodeagent_standstill_seconds_total", (("cause", "worker_failed"), digits)] == 0.04
    assert page["nodeagent_standstill_seconds_total", (("cause", "join"), digits)] == 0, "an increase can be seen"
    assert page["nodeagent_generation_ends", (("cause", "worker_failed"), digits)] == 1
    assert page["nodeagent_budget_spent", (digits,)] == 1
    assert page["nodeagent_budget_limit", (digits,)] == 10
    assert page["nodeagent_checkpoint_step", (digits,)] == 40
    assert 0 <= page["nodeagent_job_goodput", (digits,)] <= 1


async def test_how_many_jobs_of_each_queue_wait_in_line_and_for_how_long(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), MetricsPage(Metrics())
    await view.join()
    queues = (Queue(name="team"), Queue(name="vision", parent="team"), Queue(name="idle"))
    await view.store.queues(0, Queues(rev=1, queues=queues), "q", "made")
    for i, queue in enumerate(("vision", "vision", "")):
        named = spec(f"j{i}").model_copy(update={"queue": queue})
        await submit_one(view.store, f"u{i}", named, 1000, 1.0, "alice", f"r{i}")
    await view.refresh()
    first = min(view.job(name).since for name in ("j0", "j1"))
    page = values(metrics.text(view))
    waiting = {key[1][0][1]: value for key, value in page.items() if key[0] == "nodeagent_waiting_jobs"}
    assert waiting == {"default": 1, "idle": 0, "vision": 2}
    waits = {key[1][0][1]: value for key, value in page.items() if key[0] == "nodeagent_longest_wait_seconds"}
    assert waits.keys() == waiting.keys() and waits["idle"] == 0
    assert waits["vision"] == (view.cluster().served - first) / 1000


async def test_what_is_reported_of_the_pods_here(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    page = values(metrics.text(view))
    assert page["nodeagent_pods", (("phase", "running"),)] == 1
    assert page["nodeagent_pods", (("phase", "stuck"),)] == 0
    assert page["nodeagent_stalled_pods", ()] == 1
    assert page["nodeagent_preforked_workers", (("job", "digits"),)] == 2
    assert page["nodeagent_preforked_bytes", (("job", "digits"),)] == 1500
    assert page["nodeagent_snapshot_bytes", (("job", "digits"),)] == 4096
    assert page["nodeagent_step", (("job", "digits"),)] == 41
    whose = (("class", "regular"), ("device", "slot"), ("queue", "default"), ("user", "alice"))
    assert page["nodeagent_device_seconds_total", whose] == pytest.approx(2 * view.cluster().served / 1000)
    assert page["nodeagent_lost_device_seconds_total", whose] == 0


async def test_peers_that_cannot_be_reached_are_counted_for_each_job_with_a_pod_here(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    digits = (("job", "digits"),)
    assert values(metrics.text(view))["nodeagent_unreachable_peers", digits] == 0
    view.unreachable["u1"] = {"n2": time.time()}
    assert values(metrics.text(view))["nodeagent_unreachable_peers", digits] == 1


async def test_what_is_reported_of_the_gpus_here(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    page = values(metrics.text(view))
    assert {state: page["nodeagent_gpus", (("state", state),)] for state in GPU_STATES} == dict.fromkeys(GPU_STATES, 1)


async def test_what_is_refused_now(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    view.distrusted["u1"] = Refusal("changed", "changed in the store", controlled=True)
    await view.refresh()
    page = values(metrics.text(view))
    assert page["nodeagent_jobs_refused", (("reason", "changed"),)] == 1
    view.distrusted.clear()
    await view.refresh()
    assert values(metrics.text(view))["nodeagent_jobs_refused", (("reason", "changed"),)] == 0


async def test_series_that_alerts_count_from_are_there_from_the_start(tmp_path: Path) -> None:
    page = values(MetricsPage(Metrics()).text(FakeView(tmp_path)))
    for name, label, words in [
        ("nodeagent_jobs", "phase", get_args(Phase)),
        ("nodeagent_nodes", "state", NODE_STATES),
        ("nodeagent_pods", "phase", get_args(PodPhase)),
        ("nodeagent_gpus", "state", GPU_STATES),
        ("nodeagent_jobs_refused", "reason", get_args(RefusalKind)),
        ("nodeagent_refused_signatures_total", "reason", get_args(RefusalKind)),
        ("nodeagent_undecided_total", "decision", get_args(Guarded)),
    ]:
        assert {key for key in page if key[0] == name} == {(name, ((label, word),)) for word in words}
        assert not any(page[name, ((label, word),)] for word in words)


async def test_series_of_removed_jobs_go(tmp_path: Path) -> None:
    counted = Metrics()
    counted.recovered("gone", "join", {"whole": 1.0})
    view, metrics = await running(tmp_path, counted)
    page = metrics.text(view).decode()
    assert 'nodeagent_restarts_total{cause="worker_failed",job="digits"' in page
    assert 'job="gone"' not in page


async def test_series_of_a_live_job_go_when_it_ends(tmp_path: Path) -> None:
    view, metrics = await running(tmp_path)
    metrics.text(view)
    await view.succeed(view.job("digits"))
    await view.refresh()
    left = {line.partition("{")[0] for line in metrics.text(view).decode().splitlines() if 'job="digits"' in line}
    assert left == {"nodeagent_restarts_total", "nodeagent_standstill_seconds_total"}, "its record is still there"


async def test_what_is_reported_of_roles(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), MetricsPage(Metrics())
    await view.join()
    await submit_one(view.store, "u1", spec_of_roles(), 1000, 1.0, "alice", "r1")
    await submit_one(view.store, "u2", spec(), 1000, 1.0, "alice", "r2")
    await view.refresh()

    def shown(name: str) -> dict[str, float]:
        page = values(metrics.text(view))
        return {dict(k)["role"] + dict(k).get("state", ""): v for (n, k), v in page.items() if n == f"nodeagent_{name}"}

    wanted = {"serverwanted": 2, "trainerwanted": 2}
    assert shown("role_places") == wanted | {"serverrunning": 0, "trainerrunning": 0}
    await view.form(view.job("ctr"), 2)
    await view.refresh()
    assert shown("role_places") == wanted | {"serverrunning": 2, "trainerrunning": 2}
    assert shown("role_workers") == {"server": 2, "trainer": 2}
    token = view.job("ctr").active
    assert token is not None
    alone = tuple(AloneRestart(rank=2, order=i, at=1000 + i, exit=137, text="server.1 failed") for i in range(2))
    whole = tuple(one.model_copy(update={"order": one.order + 2, "round": 1}) for one in alone)
    report = PodReport(state="running", alone=(*alone, *whole))
    await view.store.report("u1", token, "n2", view.lives["n2"], report)
    await view.refresh()
    assert shown("role_restarts_alone") == {"server": 3, "trainer": 0}, "all of it once, whatever failed for it"


async def test_roles_that_have_series_are_bounded(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), MetricsPage(Metrics())
    await view.join()
    many = spec_of_roles()
    roles = tuple(many.role.model_copy(update={"name": f"r{i}"}) for i in range(MAX_ROLES + 2))
    await submit_one(view.store, "u1", many.model_copy(update={"roles": roles}), 1000, 1.0, "alice", "r1")
    await view.refresh()
    page = values(metrics.text(view))
    assert len([key for key in page if key[0] == "nodeagent_role_workers"]) == MAX_ROLES


async def test_jobs_that_have_series_are_bounded(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), MetricsPage(Metrics())
    await view.join()
    for i in range(MAX_JOBS + 3):
        await submit_one(view.store, f"u{i}", spec(f"job{i:03}"), 1000, 1.0, "alice", f"r{i}")
    await view.refresh()
    page = values(metrics.text(view))
    assert len([key for key in page if key[0] == "nodeagent_phase_seconds"]) == MAX_JOBS
    assert page["nodeagent_jobs", (("phase", "queued"),)] == MAX_JOBS + 3


# --- the document, and what promtool says


async def served(folder: Path) -> str:
    """The page of an agent with something to say of everything, as Prometheus gets it."""
    view, metrics = await running(folder)
    async with (
        ApiServer(view, metrics) as server,
        aiohttp.ClientSession() as session,
        session.get(server.http_url + "/metrics") as reply,
    ):
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await reply.text()


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Name to type and labels, as docs/metrics.md has them."""
    rows = re.findall(r"^\| `(nodeagent_\w+)` \| (\w+) \| ([^|]*) \|", METRICS.read_text(), re.MULTILINE)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def reported(page: str) -> dict[str, tuple[str, frozenset[str] | None]]:
    """Name to type and labels, as the page has them; None: no series, so nothing is known of its labels."""
    found: dict[str, tuple[str, frozenset[str] | None]] = {}
    for family in text_string_to_metric_families(page):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) <= 1, f"{name} has series with different labels"
        found[name] = (family.type, labels.pop() if labels else None)
    return found


async def test_the_document_says_what_a_live_page_says(tmp_path: Path) -> None:
    page, known = reported(await served(tmp_path)), documented()
    assert set(page) == set(known)
    for name, (kind, labels) in page.items():
        assert kind == known[name][0]
        assert labels == known[name][1], name


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus")
async def test_promtool_finds_no_fault_with_a_live_page(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    page = await served(tmp_path)
    done = await asyncio.to_thread(
        subprocess.run, [PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
