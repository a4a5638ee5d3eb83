"""The alerts of config/prometheus: each has its page and its tests, asks for metrics that there are, and promtool says
that it fires when it should and not otherwise."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "config/prometheus"
RULES = FOLDER / "rules/nodeagent.yml"
TESTS = sorted((FOLDER / "tests").glob("*.yml"))
PAGES = sorted((ROOT / "docs/runbooks").glob("*.md"))
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)


def test_each_alert_has_its_page_and_each_page_its_alert() -> None:
    assert {name: rule["annotations"]["runbook"] for name, rule in alerts().items()} == {
        page.stem: str(page.relative_to(ROOT)) for page in PAGES
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_whole(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith("#")] == [f"# {page.stem}", "## Meaning", "## Check", "## Fix"]
    assert len(lines) <= 50


def test_the_document_names_every_alert() -> None:
    reported = re.findall(r"^\| \[(\w+)\]\(runbooks/\1\.md\) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert sorted(reported) == sorted(alerts())


def test_alerts_and_pages_ask_for_metrics_that_there_are() -> None:
    known = set()
    for family in MetricsPage(Metrics()).families():
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        known |= {family.name + end for end in ends}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        asked = set(re.findall(r"[a-z:]*nodeagent_\w+(?::\w+)?", rule["expr"]))
        assert asked <= known | recorded, rule
        assert asked or "up{" in rule["expr"]
    families = {family.name for family in MetricsPage(Metrics()).families()}
    for page in PAGES:
        assert set(re.findall(r"nodeagent_\w+", page.read_text())) <= known | families, page.name


def test_each_alert_is_made_to_fire_by_a_test() -> None:
    fired = set()
    for file in TESTS:
        for case in yaml.safe_load(file.read_text())["tests"]:
            checks = case["promql_expr_test"]
            assert all("ALERTS" in check["expr"] for check in checks)
            fired |= {
                n for c in checks for s in c["exp_samples"] for n in re.findall(r'alertname="(\w+)"', s["labels"])
            }
    assert fired == set(alerts())


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_alerts_fire_when_they_should_and_not_otherwise(file: Path) -> None:
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_scrape_config(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = str(tmp_path / "prometheus.yml")
    done = promtool("check", "config", config)
    assert done.returncode != 0 and "nodeagent.token" in done.stderr, "the token is not there yet"
    (tmp_path / "nodeagent.token").write_text("secret")
    (tmp_path / "nodeagent-ca.pem").write_text("")
    done = promtool("check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout
