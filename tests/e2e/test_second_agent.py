"""An agent that may not join, under a live node's id or with another key: refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.trust.key import make
from tests.e2e.support import CALL_LIMIT, Cluster, bounded
from tests.integration.redis_support import Server, ask

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2

HOPELESS = 78
"""The exit code that keeps systemd from trying again."""
HELD = 75
"""The one after which it tries again."""


def config_of(shared: Cluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(next(shared.home.glob(f"local/data/*/{node}/agent.yaml")).read_text())
    return found


def agent(shared: Cluster, config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run an agent until it gives up."""
    file = shared.work / "second.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "nodeagent.agent.main", "run", "--config", str(file)]
    return subprocess.run(
        command, env=shared.environ, cwd=shared.work, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=CALL_LIMIT,
    )  # fmt: skip


@pytest.fixture
def running(calm: Cluster) -> dict[str, Any]:
    """A job on both nodes: what must not be disturbed."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    spec = {"name": "calm", "command": command, "nodes": 2, "workers_per_node": 1, "fork_server": "off", "grace": "1s"}
    calm.submit(json.dumps(spec))
    return calm.until_running("calm", 2)


def check_undisturbed(calm: Cluster, before: dict[str, Any]) -> None:
    now = calm.job("calm")
    assert (now["phase"], now["generation"], now["restarts"]) == ("running", before["generation"], 0)
    assert now["pods"] == before["pods"]
    nodes = calm.ask("/v1/nodes")["items"]
    assert [(n["name"], n["state"], n["address"], n["incarnation"]["start"]) for n in nodes] == [
        ("n1", "ready", "127.0.0.1", 1),
        ("n2", "ready", "127.0.0.1", 1),
    ]
    assert [n["starts"] for n in calm.json("local", "status")["nodes"]] == [1, 1]


def test_the_same_id_from_another_address(calm: Cluster, running: dict[str, Any]) -> None:
    config = config_of(calm, "n1")
    config["node"]["address"] = "127.0.0.2"
    config["dirs"] = {name: str(calm.home / "second" / name) for name in config["dirs"]}
    done = agent(calm, config)
    assert done.returncode == HELD, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"n1\b.*127\.0\.0\.1\b.*127\.0\.0\.2\b|n1\b.*127\.0\.0\.2\b.*127\.0\.0\.1\b", last), last
    assert "node.id" in last, "and what to do about it"
    check_undisturbed(calm, running)
    assert not [p for p in (calm.home / "second").rglob("*") if p.is_socket()]


def test_another_cluster_key(calm: Cluster, running: dict[str, Any]) -> None:
    """It was ready like the others, and advised everybody to delete the job."""
    config, key = config_of(calm, "n1"), calm.home / "other" / "cluster.key"
    make(key)
    config["node"] |= {"id": "n9"}
    config["ports"] |= {"api": 0}
    config["cluster_key"] = str(key)
    config["dirs"] = {name: str(calm.home / "other" / name) for name in config["dirs"]}
    done = agent(calm, config)
    assert done.returncode == HOPELESS, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert f"node n9 has another cluster key than the cluster: copy {key} from another node" in last, last
    check_undisturbed(calm, running)


@pytest.mark.slow
def test_the_same_folders(calm: Cluster, running: dict[str, Any]) -> None:
    config = config_of(calm, "n1")
    done = agent(calm, config)
    pid = calm.node("n1")["agent_pid"]
    assert done.returncode == HELD, done.stderr
    assert f"another agent (pid {pid}) runs with {config['dirs']['run']}" in done.stderr
    assert Path(config["dirs"]["run"], "api.sock").is_socket()
    os.kill(pid, 0)
    check_undisturbed(calm, running)


def test_another_redis(calm: Cluster, running: dict[str, Any]) -> None:
    """A node that knows the cluster from its disk gave an empty Redis all jobs, and ran them a second time there."""
    config, other = config_of(calm, "n1"), Server(calm.home / "redis", [])
    saved = Path(config["dirs"]["state"]) / "view.saved"
    calm.until(lambda: b"calm" in saved.read_bytes(), CALL_LIMIT, "n1 has the job on its disk")
    config["node"] |= {"id": "n9"}
    config["ports"] |= {"api": 0}
    config["redis"] = {"url": other.url}
    config["dirs"] = {name: str(calm.home / "moved" / name) for name in config["dirs"]}
    Path(config["dirs"]["state"]).mkdir(parents=True)
    shutil.copy(saved, config["dirs"]["state"])
    file = calm.work / "moved.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "nodeagent.agent.main", "run", "--config", str(file)]
    other.start()
    asyncio.run(other.ready())
    try:
        with bounded(
            subprocess.Popen(command, env=calm.environ, cwd=calm.work, stderr=subprocess.PIPE, text=True)
        ) as process:
            assert process.stderr is not None
            ends = ("all agents must use one Redis", '"event": "joined"')
            line = next(line for line in process.stderr if any(end in line for end in ends))
            assert re.search(r"the lease of node n[12] runs in the store at \S+/redis\.sock, and", line), line
            assert f"at 127.0.0.1:{other.port}" in line
            assert asyncio.run(ask(other, "DBSIZE")) == 0
            process.terminate()
            process.wait(CALL_LIMIT)
    finally:
        other.stop()
    check_undisturbed(calm, running)
