"""A real Prometheus over real agents: it counts exactly the faults that there were, its rules evaluate, the alert for a
job that fails again and again fires, and the dashboards' queries answer with what happened."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from config.grafana.dashboards import DASHBOARDS
from docs.generate import METRICS
from tests.dashboards_support import filled, queries
from tests.e2e.driver import Driver
from tests.e2e.support import ROOT, Cluster, home
from tests.integration.browser_support import CHROMIUM, browser
from tests.integration.browser_support import WHY_NOT as NO_BROWSER
from tests.integration.prometheus_support import PROMETHEUS, PROMTOOL, WHY_NOT, Prometheus, prometheus, sample

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.redis,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason=WHY_NOT),
]

NODES = 2
EACH = 2
"""GPUs of a node, of a driver that is not real; the job uses half of them."""
KILLS = 3
WORKER = """
import time
from nodeagent.train import progress
step = 0
while True:
    step += 1
    progress(step)
    time.sleep(0.1)
"""
JOB = {
    "name": "sleepers",
    "command": [sys.executable, "-c", WORKER],
    "env": {"PYTHONPATH": str(ROOT)},
    "nodes": 2,
    "workers_per_node": 1,
    "gpus_per_worker": 1,
    "restarts": {"max": 5},
    "hang": {"progress": "10m"},
}
UNSEEN = {
    ("cluster.json", "CPU slots in use, by queue", "{{queue}}"),  # the job has GPUs
    ("cluster.json", "Goodput, by queue", "{{queue}}: CPU slots"),
    ("job.json", "Step", "{{job}}: checkpoint"),  # it makes none
    ("job.json", "Places, by role", "{{job}} {{role}}: {{state}}"),  # it has one role
    ("job.json", "Workers, by role", "{{job}} {{role}}: workers"),
    ("job.json", "Workers, by role", "{{job}} {{role}}: started again alone"),
    ("node.json", "Repairs", "times"),  # nothing is to be mended
    ("node.json", "Records refused", "{{node}}: {{reason}}"),  # there are none
}
"""Queries that have nothing to tell here: (dashboard, panel, legend)."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("driver") / "state", NODES * EACH)


@pytest.fixture(scope="module")
def shared(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """As for other modules, but that the nodes have GPUs."""
    with home() as (folder, environ):
        one = Cluster(folder, folder / "work", environ | driver.environ(tmp_path_factory.mktemp("nvml")))
        try:
            one.up(NODES)
            yield one
        finally:
            one.ctl("local", "down", check=None)


def pages(cluster: Cluster) -> list[str]:
    """Where each agent's metrics are; empty of one that has not told yet."""
    return [node["http"] for node in cluster.ask("/v1/nodes")["items"]]


@contextmanager
def scraping(cluster: Cluster) -> Iterator[Prometheus]:
    """A Prometheus that scrapes all agents, with the repository's rules."""
    cluster.until(lambda: all(pages(cluster)), 30, "every agent tells where its page is")
    config = sample([page.partition("//")[2] for page in pages(cluster)])
    for remote in ("scheme", "authorization", "tls_config"):  # these agents serve loopback only
        del config["scrape_configs"][0][remote]
    folder = cluster.work / "prometheus"
    folder.mkdir()
    with prometheus(folder, config) as server:
        yield server


def test_prometheus_counts_each_kill_once_and_its_alerts_evaluate(calm: Cluster, driver: Driver) -> None:
    with scraping(calm) as server:
        calm.until(lambda: server.value('sum(up{job="nodeagent"})') == NODES, 30, "every agent is scraped")
        calm.submit(yaml.safe_dump(JOB))
        calm.until_running("sleepers", 2)
        stood = 'nodeagent_standstill_seconds_total{job="sleepers", cause="worker_failed"}'
        seen = f"count({stood} == 0)"  # an increase is counted from what was scraped before it
        calm.until(lambda: server.value(seen) == NODES, 30, "what the job has cost so far is scraped: nothing")
        driver.xid(13, EACH - 1)  # the application's, on a GPU that has none
        for kills in range(1, KILLS + 1):
            os.kill(calm.workers("sleepers")[kills % 2], signal.SIGKILL)
            calm.until_running("sleepers", 2, above=kills)
        counted = 'sum(nodeagent_restarts_total{job="sleepers", cause="worker_failed"})'
        calm.until(lambda: server.value(counted) == KILLS, 30, f"{KILLS} restarts are counted")
        assert server.value('sum(nodeagent_restarts_total{job="sleepers"})') == KILLS, "and no others"
        assert server.value('max(nodeagent_generation{job="sleepers"})') == KILLS + 1
        calm.until(lambda: "NodeagentCrashLoop" in server.firing(), 30, "the alert fires: 3 of 5 restarts are spent")
        quiet = {"NodeagentNodeLost", "NodeagentAgentDown", "NodeagentRecordRefused", "NodeagentStoreAway"}
        assert not server.firing() & quiet
        every_rule_evaluates(calm, server)
        every_name_is_documented(server)
        every_panel_tells(calm, server)
        panels_tell_the_truth(server)
        every_page_tells_the_same(calm)


def every_panel_tells(cluster: Cluster, server: Prometheus) -> None:
    """Each query of each dashboard has an answer, but those that cannot have one here."""
    for name, board in DASHBOARDS.items():
        for panel, expr, legend in queries(board):
            if (name, panel, legend) in UNSEEN:
                assert server.get("/api/v1/query", query=filled(expr))["result"] == [], panel
            else:
                problem = f"{name}: {panel} shows something: {filled(expr)}"
                cluster.until(functools.partial(answers, server, filled(expr)), 30, problem)


def answers(server: Prometheus, expr: str) -> bool:
    return bool(server.get("/api/v1/query", query=expr)["result"])


def panels_tell_the_truth(server: Prometheus) -> None:
    """What they show is what was done: so many kills, nothing else, on so many GPUs."""
    assert shown(server, "job.json", "Restarts") == [KILLS]
    assert shown(server, "job.json", "Restarts, in the shown range") == [KILLS]
    assert sum(shown(server, "job.json", "Restarts, by cause and node at fault")) == KILLS
    assert shown(server, "cluster.json", "Restarts") == [KILLS]
    assert shown(server, "cluster.json", "Generations that ended") == [KILLS]
    assert max(shown(server, "job.json", "Generations")) == KILLS + 1
    (whole,) = shown(server, "job.json", "What a fault cost")
    assert server.value('sum(nodeagent_standstill_seconds_total{job="sleepers"})') == pytest.approx(KILLS * whole)
    (cost,) = shown(server, "job.json", "What the faults cost")
    assert cost == pytest.approx(KILLS * whole, rel=0.2), "Prometheus extrapolates"
    (goodput,) = shown(server, "job.json", "Goodput")
    assert 0 < goodput < 1
    assert sorted(shown(server, "cluster.json", "GPUs")) == [0, NODES, NODES], "unfit, used, free"
    assert set(shown(server, "node.json", "Joined")) == {1}
    assert sum(shown(server, "node.json", "Xids")) == 1
    assert shown(server, "cluster.json", "Agents without the store") == [0]


def every_page_tells_the_same(cluster: Cluster) -> None:
    """The status page's answer, of each agent: so many restarts, and what each cost."""
    for url in pages(cluster):
        with urllib.request.urlopen(url + "/v1/status", timeout=10) as reply:
            reported = json.load(reply)
        (job,) = reported["jobs"]
        assert (job["restarts"], job["generation"], job["all_known"]) == (KILLS, KILLS + 1, True)
        assert [g["ended_by"] and g["ended_by"]["kind"] for g in job["generations"]] == ["worker_failed"] * KILLS + [
            None
        ]
        assert 0 < sum(g["downtime"] for g in job["generations"][1:]) == pytest.approx(job["downtime"], abs=0.01)
        assert [len(node["gpus"]) for node in reported["nodes"]] == [EACH] * NODES


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_the_status_page_of_a_real_agent_shows_it_live(calm: Cluster) -> None:
    """In a real browser: the job as it runs, and a kill, while somebody looks."""
    calm.submit(yaml.safe_dump(JOB | {"name": "looked-at"}))
    calm.until_running("looked-at", 2)

    async def look() -> None:
        async with browser(calm.work / "chromium") as page:
            await page.open(pages(calm)[0])
            story = "[...document.querySelectorAll('#stories article')].find((a) => a.innerText.includes('looked-at'))"
            await page.until(f"{story}?.innerText.includes('0 restarts')", "the job is shown")
            os.kill(calm.workers("looked-at")[1], signal.SIGKILL)
            await page.until(f"{story}.innerText.includes('1 restart · 1 fault · downtime')", "so is the fault")
            assert "rank 1 on n2 failed first: SIGKILL (9)" in await page.value(f"{story}.innerText")
            assert page.problems == []

    asyncio.run(look())


def shown(server: Prometheus, name: str, title: str) -> list[float]:
    """What the panel's queries answer now."""
    asked = [filled(expr) for panel, expr, _ in queries(DASHBOARDS[name]) if panel == title]
    assert asked, title
    return [float(s["value"][1]) for expr in asked for s in server.get("/api/v1/query", query=expr)["result"]]


def every_rule_evaluates(cluster: Cluster, server: Prometheus) -> None:
    def all_done() -> bool:
        found = [rule for group in server.get("/api/v1/rules")["groups"] for rule in group["rules"]]
        assert len(found) > 15
        assert not [rule for rule in found if rule.get("lastError") or rule["health"] == "err"]
        return all(rule["health"] == "ok" for rule in found)

    cluster.until(all_done, 30, "every rule was evaluated")


def every_name_is_documented(server: Prometheus) -> None:
    reported = dict(re.findall(r"^\| `(nodeagent_\w+)` \| (\w+) \|", METRICS.read_text(), re.MULTILINE))
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    known = {name + end for name, kind in reported.items() for end in ends.get(kind, ("",))}
    seen = {name for name in server.get("/api/v1/label/__name__/values") if name.startswith("nodeagent_")}
    assert "nodeagent_restarts_total" in seen
    assert seen <= known


def test_promtool_finds_no_fault_with_the_page_of_a_real_agent(calm: Cluster) -> None:
    assert PROMTOOL is not None
    calm.until(lambda: all(pages(calm)), 30, "every agent tells where its page is")
    for url in pages(calm):
        with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
            page = reply.read().decode()
        for beats in ("nodeagent_lease_age_seconds_count", "nodeagent_heartbeat_late_seconds_count"):
            assert float(re.findall(rf"^{beats} (\S+)$", page, re.MULTILINE)[0]) > 0
        done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
