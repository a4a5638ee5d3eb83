"""The metrics page: what it says, and that its labels are bounded."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from nodeagent.agent.metrics import Metrics
from tests.unit.api.fakes import FakeView, spec

ROOT = Path(__file__).parents[3]


def values(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(page.decode())
        for s in family.samples
    }


async def test_the_page(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), Metrics()
    await view.join()
    await view.store.submit("u1", spec(), 1000, 1.0, "alice", "r1")
    await view.refresh()
    await view.form(view.job("digits"), 2)
    await view.refresh()
    metrics.restarts.labels(job="digits", node="n1", cause="worker_failed").inc(3)
    metrics.store_errors.inc()
    metrics.recovered("worker_failed", {"formed": 0.02, "whole": 0.04})
    page = values(metrics.page(view))
    whole = ("cause", "worker_failed"), ("phase", "whole")
    assert page["nodeagent_recovery_seconds_sum", whole] == 0.04
    assert page["nodeagent_recovery_seconds_bucket", (whole[0], ("le", "0.05"), whole[1])] == 1
    assert page["nodeagent_jobs", (("phase", "running"),)] == 1
    assert page["nodeagent_jobs", (("phase", "failed"),)] == 0
    assert page["nodeagent_nodes", (("state", "ready"),)] == 3
    assert page["nodeagent_generation", (("job", "digits"),)] == 1
    assert page["nodeagent_lease_margin_seconds", ()] == 2.0
    assert page["nodeagent_store_errors_total", ()] == 1
    restarts = (("cause", "worker_failed"), ("job", "digits"), ("node", "n1"))
    assert page["nodeagent_restarts_total", restarts] == 3
    assert ("nodeagent_build_info", (("version", "0.1.0"),)) in page
    assert ("nodeagent_store_roundtrip_seconds_count", ()) in page


def test_every_metric_is_in_the_reference() -> None:
    told = re.findall(r"^\| `(nodeagent_[a-z_]+)[{`]", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    counters = {"counter": "_total"}
    known = [family.name + counters.get(family.type, "") for family in Metrics().registry.collect()]
    assert sorted(told) == sorted(known)


async def test_series_of_removed_jobs_go(tmp_path: Path) -> None:
    view, metrics = FakeView(tmp_path), Metrics()
    await view.join()
    await view.store.submit("u1", spec(), 1000, 1.0, "alice", "r1")
    await view.refresh()
    metrics.restarts.labels(job="digits", node="n1", cause="join").inc()
    metrics.restarts.labels(job="gone", node="n1", cause="join").inc()
    page = metrics.page(view).decode()
    assert 'job="digits"' in page
    assert 'job="gone"' not in page
