"""Two nodes, one of which is strict: it runs no job of root's, and a group of operators may change anybody's there."""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.support import Cluster
from tests.e2e.users import STRANGER, SYSTEM_PYTHON, ctl_as, open_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300), pytest.mark.usefixtures("another_user")]


@pytest.fixture(scope="module")
def world() -> Iterator[Cluster]:
    """n2 is the strict one; ``STRANGER`` is an operator there, and nobody in particular on n1."""
    with open_cluster(2) as one:
        file = next(one.home.glob("local/data/*/n2/agent.yaml"))
        config = yaml.safe_load(file.read_text())
        group = grp.getgrgid(pwd.getpwnam(STRANGER).pw_gid).gr_name
        config["jobs"] = {"allow_root": False, "operators": group}
        file.write_text(yaml.safe_dump(config))
        os.kill(next(n["agent_pid"] for n in local(one) if n["name"] == "n2"), signal.SIGKILL)
        one.until(lambda: next(n["starts"] for n in local(one) if n["name"] == "n2") == 2, 20, "n2 is started anew")
        one.until(lambda: one.nodes() == {"n1": "ready", "n2": "ready"}, 20, "both are ready")
        one.until(lambda: one.ctl("--agent", socket(one, "n2"), "nodes", check=None).returncode == 0, 20, "n2 answers")
        yield one


def local(world: Cluster) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = world.json("local", "status")["nodes"]
    return nodes


def socket(world: Cluster, node: str) -> str:
    return str(next(world.home.glob(f"local/run/*/{node}/api.sock")))


def submit(world: Cluster, name: str, at: str, check: int = 0, **more: object) -> str:
    """As root, through one node's agent; what the tool said."""
    spec = {"name": name, "command": [SYSTEM_PYTHON, "-c", "import time; time.sleep(600)"], "workers_per_node": 1,
            "fork_server": "off", "grace": "1s", "working_dir": "/"}  # fmt: skip
    file = world.work / f"{name}.yaml"
    file.write_text(json.dumps(spec | more))
    return world.ctl("--agent", socket(world, at), "submit", str(file), check=check).stderr


def test_a_job_of_root_runs_only_where_the_nodes_config_allows_it(world: Cluster) -> None:
    refusal = submit(world, "roots", "n2", check=6, nodes=1)
    assert "allow_root" in refusal
    submit(world, "roots", "n1", nodes="1:2")
    world.until_running("roots", 1)
    world.until(lambda: "n2 runs no jobs of root" in world.ctl("describe", "roots").stdout, 30, "n2 says why not")
    assert [p["node"] for p in world.job("roots")["pods"] if p["workers"]] == ["n1"]
    submit(world, "theirs", "n1", nodes=2, user=STRANGER)
    world.until_running("theirs", 2)
    world.ctl("delete", "roots", "--timeout", "60s")
    world.ctl("delete", "theirs", "--timeout", "60s")


def test_operators_may_change_what_is_not_theirs_where_they_are_operators(world: Cluster) -> None:
    submit(world, "mine", "n1", nodes="1:2")
    world.until_running("mine", 1)
    changes = (("scale", "mine", "1"), ("pause", "mine"), ("restart", "mine"), ("stop", "mine"), ("delete", "mine"),
               ("cordon", "n1", "--reason", "x"), ("drain", "n1", "--reason", "x"), ("uncordon", "n1"))  # fmt: skip
    for words in changes:
        refused = ctl_as(world, *words)
        assert refused.returncode == 6, (words, refused.stderr)
    assert world.nodes() == {"n1": "ready", "n2": "ready"}
    at_n2 = ("--agent", socket(world, "n2"))
    for words in (("cordon", "n1", "--reason", "fan"), ("uncordon", "n1"), ("restart", "mine"), ("stop", "mine")):
        done = ctl_as(world, *at_n2, *words)
        assert done.returncode == 0, (words, done.stderr)
    assert STRANGER in world.until_phase("mine", "stopped")["reason"]
    roots = {"name": "not-mine", "command": ["true"], "nodes": 1, "user": "root", "working_dir": "/"}
    refused = ctl_as(world, *at_n2, "submit", "-", given=json.dumps(roots))
    assert refused.returncode in (2, 6) and "root" in refused.stderr, "they submit for themselves only"
    assert ctl_as(world, *at_n2, "delete", "mine").returncode == 0


def test_the_key_and_what_an_agent_remembers_are_its_own(world: Cluster) -> None:
    """Whoever can read the key can run anything."""
    for file in (*world.home.glob("local/run/*/cluster.key"), *world.home.glob("local/data/*/*/state/trust.json")):
        assert readable_by_others(file) is False, file
    assert len(list(world.home.glob("local/run/*/cluster.key"))) == 1


def readable_by_others(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o077)
