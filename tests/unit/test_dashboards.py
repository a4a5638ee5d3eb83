"""The dashboards of config/grafana: the files are what is drawn, ids are unique, and they ask for metrics that there
are in PromQL that promtool takes. What they answer is asked of a real Prometheus in tests/e2e/test_prometheus.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.grafana.dashboards import DASHBOARDS, FOLDER, drawn
from config.grafana.panels import WIDTH
from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from tests.dashboards_support import VARIABLES, filled, queries

PROMTOOL = shutil.which("promtool")
METRICS_PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def series() -> dict[str, set[str]]:
    """Every name on a metrics page, with its labels."""
    found: dict[str, set[str]] = {}
    for family in MetricsPage(Metrics()).families():
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {family.name + end: set(family.labels) | ({"le"} if end == "_bucket" else set()) for end in ends}
    return found


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_file_is_what_is_drawn(name: str) -> None:
    assert (FOLDER / name).read_text() == drawn(name), "draw it anew: python -m config.grafana.dashboards"


def test_there_are_no_other_files() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(DASHBOARDS)


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    boards = [json.loads(drawn(name)) for name in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == len(boards)
    for board in boards:
        panels = board["panels"]
        assert len({p["id"] for p in panels}) == len({p["title"] for p in panels}) == len(panels)
        cells: set[tuple[int, int]] = set()
        for place in (p["gridPos"] for p in panels):
            mine = {(place["x"] + i, place["y"] + k) for i in range(place["w"]) for k in range(place["h"])}
            assert not cells & mine
            assert max(x for x, _ in mine) < WIDTH
            cells |= mine


@pytest.mark.parametrize("name", DASHBOARDS)
def test_each_panel_says_what_it_shows_and_takes_the_chosen_source(name: str) -> None:
    for panel in DASHBOARDS[name]["panels"]:
        assert panel["description"].endswith((".", ")"))
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_ask_for_what_there_is(name: str) -> None:
    known = series()
    chosen = {v["name"] for v in DASHBOARDS[name]["templating"]["list"]}
    for panel, expr, legend in queries(DASHBOARDS[name]):
        asked = set(re.findall(r"nodeagent_\w+", expr))
        assert asked <= set(known), panel
        labels: set[str] = {"cluster", "instance"}.union(*(known[metric] for metric in asked))
        if asked:
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels, panel
            for words in re.findall(r"by \(([^)]*)\)", expr):
                assert set(filter(None, re.split(r"[ ,]+", words))) <= labels, panel
        used = set(re.findall(r"\$(\w+)", expr))
        assert used <= chosen | set(VARIABLES), panel


def test_every_metric_is_on_a_dashboard() -> None:
    asked: set[str] = set()
    for board in DASHBOARDS.values():
        for _, expr, _ in queries(board):
            asked |= set(re.findall(r"nodeagent_\w+?(?=_bucket|_sum|_count|\b)", expr))
    assert {family.name for family in MetricsPage(Metrics()).families()} <= asked


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus")
def test_promtool_takes_every_query(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    asked = [filled(expr) for board in DASHBOARDS.values() for _, expr, _ in queries(board)]
    rules: list[dict[str, Any]] = [{"record": f"q{number}", "expr": expr} for number, expr in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_document_names_every_dashboard() -> None:
    reported = re.findall(r"^\| \[(\w+\.json)\]\(\.\./config/grafana/\1\) \|", METRICS_PAGE.read_text(), re.MULTILINE)
    assert sorted(reported) == sorted(DASHBOARDS)
