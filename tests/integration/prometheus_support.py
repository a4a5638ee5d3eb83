"""A real Prometheus for a test: a process of its own on a free port, with a folder for its data, asked over its API."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.support import ROOT, bounded, listening_ports

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
WHY_NOT = "no prometheus here: apt-get install prometheus"
START_LIMIT = 30.0


@dataclass
class Prometheus:
    """One server."""

    url: str

    def get(self, path: str, **arguments: str) -> Any:
        """The answer's data; HTTPError if it is not answered."""
        query = "?" + urllib.parse.urlencode(arguments) if arguments else ""
        with urllib.request.urlopen(self.url + path + query, timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expr: str) -> float | None:
        """Of an expression with one result; None if it has none yet."""
        result = self.get("/api/v1/query", query=expr)["result"]
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def firing(self) -> set[str]:
        found = self.get("/api/v1/query", query='ALERTS{alertstate="firing"}')["result"]
        return {series["metric"]["alertname"] for series in found}


def sample(targets: list[str]) -> dict[str, Any]:
    """config/prometheus/prometheus.yml with these targets, scraped each second."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())
    config["scrape_configs"][0]["static_configs"][0]["targets"] = targets
    config["rule_files"] = [str(ROOT / "config/prometheus/rules/*.yml")]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return config


@contextmanager
def prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Running while the block does. What the config names by relative paths lies in the folder."""
    assert PROMETHEUS is not None, WHY_NOT
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        "--web.listen-address=127.0.0.1:0", "--log.level=warn",
    ]  # fmt: skip
    log = folder / "log"
    with (
        log.open("w") as out,
        bounded(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True)) as process,
    ):
        ports: set[int] = set()

        def listens() -> bool:
            ports.update(listening_ports([process.pid]))
            return bool(ports)

        until(listens, lambda: f"Prometheus does not listen: {log.read_text()}")
        url = f"http://127.0.0.1:{ports.pop()}"
        until(lambda: _ready(url), lambda: f"Prometheus does not become ready: {log.read_text()}")
        yield Prometheus(url)


def _ready(url: str) -> bool:
    """It listens some time before it answers queries: until then they get a 503."""
    try:
        with urllib.request.urlopen(url + "/-/ready", timeout=10) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError:
        return False


def until(condition: Callable[[], bool], problem: Callable[[], str]) -> None:
    """Poll until it holds; AssertionError with the problem after START_LIMIT seconds."""
    end = time.monotonic() + START_LIMIT
    while not condition():
        assert time.monotonic() < end, problem()
        time.sleep(0.1)
