"""``nodeagentctl local`` with real agents, real Redis and real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.ctl.client import find
from nodeagent.ctl.terminal import NoAgentError
from nodeagent.local import control, power, registry, session
from nodeagent.local.layout import LocalFolders
from tests.e2e.support import listening_ports, open_ports
from tests.unit.local.helpers import is_empty, local_home, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]

Json = dict[str, Any]

JOB: Json = {
    "name": "sleepers",
    "command": [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
    "nodes": {"min": 1, "max": 3, "target": 2},
    "workers_per_node": 2,
    "gpus_per_worker": 0,
}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("NODEAGENTCTL_AGENT", raising=False)
    with local_home() as path:
        yield path


def ctl(*words: str, code: int = 0, given: str = "") -> str:
    command = [sys.executable, "-c", "from nodeagent.ctl.main import main; main()", *words]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def ask(*words: str) -> Json:
    found: Json = json.loads(ctl(*words, "-o", "json"))
    return found


def shown() -> list[str]:
    """What the nodes are, by `local status`: "starting", too, if an agent does not answer at once."""
    return [n["state"] for n in ask("local", "status")["nodes"]]


def ready() -> set[str]:
    return {n["name"] for n in ask("nodes")["items"] if n["state"] == "ready"}


def workers(job: Json) -> dict[str, list[int]]:
    """Node to the pids of its shim and living workers."""
    return {
        pod["node"]: [pod["shim_pid"], *(w["pid"] for w in pod["workers"] if w["state"] == "running")]
        for pod in job["pods"]
    }


def job() -> Json:
    """The job, asked for in this process: polling with the tool would keep a core busy, and slow what is waited for."""
    return find().get("/v1/jobs/sleepers")


def switches() -> list[Json]:
    """The nodes as the supervisor sees them, likewise."""
    cluster = registry.cluster(LocalFolders.of_user())
    nodes: list[Json] = control.ask(cluster.layout.control, {"do": "status"})["nodes"]
    return nodes


def trains_on(nodes: int) -> bool:
    try:
        now = job()
    except NoAgentError:  # the agent that was asked is just being started again
        return False
    pids = workers(now)
    return now["phase"] == "running" and len(pids) == nodes and all(len(p) == 3 for p in pids.values())


def test_a_cluster_and_its_job_from_up_to_down(home: Path) -> None:
    assert "node/n1\nnode/n2\n" in ctl("local", "up", "--nodes", "2")
    cluster = registry.cluster(LocalFolders.of_user())
    assert ready() == {"n1", "n2"}, "other commands find the cluster by themselves"
    assert "running already" in ctl("local", "up", "--nodes", "2", code=6)
    until(lambda: shown() == ["ready", "ready"], "both are shown as ready")
    ctl("submit", "-", given=json.dumps(JOB))
    until(lambda: trains_on(2), "the job runs on both nodes", 60)

    # An agent alone: it is started again (what that costs is test_faults' matter).
    os.kill(switches()[0]["agent_pid"], signal.SIGKILL)
    until(lambda: switches()[0]["starts"] == 2, "n1's agent is started again")
    session.wait_joined(cluster, 60, ["n1", "n2"])
    until(lambda: trains_on(2), "n1 takes part", 60)
    after = job()

    # A power cut: everything of n2, and nothing of n1; it stays off, and comes back when switched on.
    victims = power.processes(cluster.uid, "n2")
    assert set(workers(after)["n2"]) <= victims
    assert "node/n2 killed" in ctl("local", "kill", "n2")
    assert not any(map(running, victims))
    assert running(workers(after)["n1"][0])
    assert "was down already" in ctl("local", "kill", "n2")
    until(lambda: shown() == ["ready", "down"], "n2 is shown as down")
    until(lambda: trains_on(1), "the job goes on with one node", 60)
    assert "n9" in ctl("local", "kill", "n9", code=3)
    assert ctl("local", "add") == "node/n3\n"
    assert ctl("local", "start", "n2") == "node/n2 started\n"
    assert ready() == {"n1", "n2", "n3"}

    # Down, with the job running.
    until(lambda: trains_on(2), "the job is whole again", 60)
    left = power.processes(cluster.uid)
    status = ask("local", "status")
    left |= {status["pid"], status["redis"]["pid"]}
    ports = listening_ports(left)
    assert ports, "agents serve health and metrics"
    assert ctl("local", "down") == "cluster default is down\n"
    assert not any(map(running, left))
    assert is_empty(home)
    assert not ports & open_ports()
    assert "local up" in ctl("local", "status", code=3)
    assert "local up" in ctl("local", "down", code=3)


SESSION = """
import json, subprocess, sys, time
from nodeagent.local.session import local_session
with local_session(2) as socket:
    ctl = [sys.executable, "-c", "from nodeagent.ctl.main import main; main()"]
    subprocess.run([*ctl, "--agent", str(socket), "submit", "-"], input=sys.argv[1], text=True, check=True)
    print(socket, flush=True)
    time.sleep(600)
"""


def test_kill_9_of_the_command_that_owns_a_cluster_leaves_nothing(home: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", SESSION, json.dumps(JOB)], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        assert "submitted" in owner.stdout.readline()
        assert owner.stdout.readline().strip().endswith("n1/api.sock")
        cluster = registry.clusters(LocalFolders.of_user())[0]
        until(lambda: trains_on(2), "the job runs", 60)
        left = power.processes(cluster.uid)
        assert len(left) >= 2 + 2 + 4, "agents, shims, workers"
        owner.kill()
    until(lambda: not any(map(running, left)), "every process is gone")
    until(lambda: is_empty(home), "the folders are gone")
