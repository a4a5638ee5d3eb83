"""The role `monitoring` on a node without a way out: apt's Prometheus, with our scrape config, alerts and dashboards,
watches a cluster that the other roles have made."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from config.grafana.dashboards import DASHBOARDS, drawn
from release import bundle, wheels
from tests.nodes.image import ROOT, packages, python_version
from tests.nodes.lab import Lab, lab
from tests.nodes.lab import why_not as no_lab
from tests.nodes.net import HUB
from tests.nodes.node import wait_for
from tests.nodes.rollout import Rollout, why_not

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]

AGENTS = ("n1", "n2")
WATCHER = "watcher"
RULES = ROOT / "config/prometheus/rules/nodeagent.yml"
MIRROR = "/mnt/debs"
BOARDS = "/var/lib/grafana/dashboards/nodeagent"
PROVISIONING = "/etc/grafana/provisioning"
STARTS = "/root/grafana-starts"
GRAFANA = f"""[Service]
ExecStart=/bin/sh -c 'echo started >>{STARTS}; exec sleep infinity'
[Install]
WantedBy=multi-user.target
"""
"""No distribution has Grafana: what the role asks of one, a unit and folders, stands in for it."""
SCRAPED_WITHIN = 60.0
"""Seconds: the role's scrape config asks each 15 s."""


@pytest.fixture(scope="module")
def bare() -> Iterator[Lab]:
    """Three machines; the third has apt's Prometheus within reach, not installed."""
    if problem := no_lab() or why_not():
        pytest.skip(problem)
    with lab() as one:
        for name in (*AGENTS, WATCHER):
            one.add(name, [])
        watcher = one.nodes[WATCHER]
        watcher.binds[packages(one.base, "prometheus")] = Path(MIRROR)
        watcher.write("/etc/apt/sources.list", f"deb [trusted=yes] file:{MIRROR} ./\n")
        watcher.write("/etc/systemd/system/grafana-server.service", GRAFANA)
        one.boot()
        watcher.run("apt-get", "update")
        watcher.run("mkdir", "-p", f"{PROVISIONING}/dashboards", f"{PROVISIONING}/datasources")
        yield one


@pytest.fixture(scope="module")
def rollout(bare: Lab, tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    """The operator's folder: one Redis, two agents, and a token for Prometheus."""
    out = tmp_path_factory.mktemp("release")
    bundle.lay_out(wheels.build(out), [python_version(bare.base)], "x86_64", out / "bundle")
    bundle.pack(out / "bundle", out / "bundle.tar.gz")
    one = Rollout(bare, tmp_path_factory.mktemp("operator"), out / "bundle.tar.gz")
    token = secrets.token_hex(32)
    (one.folder / "prometheus.token").write_text(token + "\n")
    digest = hashlib.sha256(token.encode()).hexdigest()
    one.variables["nodeagent_tokens"] = {"prometheus": {"sha256": digest, "may": "read"}}
    one.variables["nodeagent_redis_url"] = f"redis://nodeagent@{bare.nodes['n1'].address}:6379/0"
    one.variables["monitoring_grafana"] = True
    one.inventory({"redis": ["n1"], "nodeagent": AGENTS, "monitoring": [WATCHER]})
    return one


def asked(one: Lab, path: str) -> Any:
    """Of the Prometheus, over the nodes' network."""
    with one.net.inside(HUB), urlopen(f"http://{one.nodes[WATCHER].address}:9090/api/v1/{path}", timeout=10) as reply:
        return json.load(reply)["data"]


def targets(one: Lab) -> dict[str, str]:
    return {target["scrapeUrl"]: target["health"] for target in asked(one, "targets")["activeTargets"]}


def rules(one: Lab) -> dict[str, str]:
    """Alert or record: whether it could be computed."""
    return {rule["name"]: rule["health"] for group in asked(one, "rules")["groups"] for rule in group["rules"]}


def text_of(one: Lab, path: str) -> str:
    return one.nodes[WATCHER].run("cat", path).stdout


def test_a_dry_run_without_prometheus_changes_nothing(bare: Lab, rollout: Rollout) -> None:
    play = rollout.play("site", "--check", "--limit", WATCHER)
    assert play.code == 0, play.text
    assert play.changed > 0, play.text
    bare.nodes[WATCHER].run("sh", "-c", f"! command -v prometheus && ! ls -d /etc/prometheus {BOARDS} {STARTS}")


def test_it_watches_every_agent(bare: Lab, rollout: Rollout) -> None:
    play = rollout.play("site")
    assert play.code == 0, play.text
    everyone = {f"https://{bare.nodes[name].address}:9470/metrics": "up" for name in AGENTS}
    wait_for(lambda: targets(bare) == everyone, SCRAPED_WITHIN, "every agent is scraped", lambda: str(targets(bare)))
    written = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    healthy = {rule.get("alert") or rule["record"]: "ok" for rule in written}
    wait_for(lambda: rules(bare) == healthy, SCRAPED_WITHIN, "every rule is computed", lambda: str(rules(bare)))
    query = "query?" + urlencode({"query": 'cluster:nodeagent_nodes:max{cluster="default", state="ready"}'})
    wait_for(lambda: asked(bare, query)["result"], SCRAPED_WITHIN, f"{query} has a value", lambda: str(rules(bare)))
    assert [float(series["value"][1]) for series in asked(bare, query)["result"]] == [len(AGENTS)]
    assert rollout.variables["redis_password"] not in play.text


def test_grafana_knows_where_all_of_it_is(bare: Lab) -> None:
    for name in DASHBOARDS:
        assert text_of(bare, f"{BOARDS}/{name}") == drawn(name)
    (provider,) = yaml.safe_load(text_of(bare, f"{PROVISIONING}/dashboards/nodeagent.yml"))["providers"]
    assert provider["options"]["path"] == BOARDS
    (source,) = yaml.safe_load(text_of(bare, f"{PROVISIONING}/datasources/nodeagent.yml"))["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://localhost:9090")
    assert text_of(bare, STARTS).splitlines() == ["started"]


def test_a_second_run_changes_nothing_and_a_dry_one_only_tells(bare: Lab, rollout: Rollout) -> None:
    again = rollout.play("site", "--limit", WATCHER)
    assert (again.code, again.changed) == (0, 0), again.text
    file, board = "/etc/prometheus/rules/nodeagent.yml", f"{BOARDS}/job.json"
    bare.nodes[WATCHER].run("sh", "-c", f"echo 'groups: []' >{file}; echo >{board}; systemctl reload prometheus")
    wait_for(lambda: rules(bare) == {}, SCRAPED_WITHIN, "the rules are gone", lambda: str(rules(bare)))
    dry = rollout.play("site", "--limit", WATCHER, "--check")
    assert dry.code == 0, dry.text
    assert dry.changed >= 2, dry.text
    assert (text_of(bare, file), text_of(bare, board)) == ("groups: []\n", "\n")
    repaired = rollout.play("site", "--limit", WATCHER)
    assert repaired.code == 0, repaired.text
    assert (text_of(bare, file), text_of(bare, board)) == (RULES.read_text(), drawn("job.json"))
    wait_for(lambda: len(rules(bare)) > 0, SCRAPED_WITHIN, "the rules are read again", lambda: str(rules(bare)))


def test_a_node_that_is_lost_is_seen(bare: Lab) -> None:
    """From the fault to the alert, by the config that the role has written."""

    def alerts() -> set[str]:
        return {alert["labels"]["alertname"] for alert in asked(bare, "alerts")["alerts"]}

    assert "NodeagentNodeLost" not in alerts()
    bare.nodes["n2"].cut_power()
    wait_for(lambda: "NodeagentNodeLost" in alerts(), 120, "the alert is pending", lambda: str(asked(bare, "alerts")))
    assert targets(bare)[f"https://{bare.nodes['n1'].address}:9470/metrics"] == "up"


def test_a_node_that_cannot_be_reached_leaves_monitoring_its_turn(bare: Lab, rollout: Rollout) -> None:
    bare.nodes[WATCHER].run("rm", "/etc/prometheus/rules/nodeagent.yml")
    play = rollout.play("site")
    assert play.code != 0
    assert "n2 could not be reached, and is as it was" in " ".join(play.text.split())
    assert text_of(bare, "/etc/prometheus/rules/nodeagent.yml") == RULES.read_text()
