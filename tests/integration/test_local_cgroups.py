"""The real cgroups of a local cluster's pods: nothing finds them once their node's run folder is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.local import control, registry, session
from nodeagent.local.layout import LocalFolders
from nodeagent.local.registry import LocalCluster
from nodeagent.pods.cgroup import PodCgroup, cgroup_of_pod
from tests.unit.local import standin
from tests.unit.local.helpers import local_home, until

pytestmark = pytest.mark.redis

NODES = ("n1", "n2")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_home():
        yield session.up(len(NODES), "dev", agent=[sys.executable, str(standin.__file__)])


@pytest.fixture
def cgroups(cluster: LocalCluster) -> Iterator[dict[str, PodCgroup]]:
    """Each node's, of a pod that runs."""
    made = dict[str, PodCgroup]()
    try:
        for name in NODES:
            run = cluster.layout.node(name).run
            until((run / "shim").exists, f"{name} has a shim")
            path, shim = cgroup_of_pod(run, "0123456789"), int((run / "shim").read_text().split()[1])
            if path is None or (one := PodCgroup.make(path, shim)) is None:
                pytest.skip("needs root, and a cgroup v2 that can be written")
            made[name] = one
        assert all(one.pids() for one in made.values())
        yield made
    finally:
        until(lambda: not any(one.kill() for one in made.values()), "nothing of them lives")
        for one in made.values():
            one.remove()


def left(cgroups: dict[str, PodCgroup]) -> list[Path]:
    """What is there still of them: their own folders, and those that they are in."""
    return [path for one in cgroups.values() for path in (one.path, one.path.parent) if path.exists()]


def test_a_power_cut_takes_those_of_its_node_and_the_clusters_end_all(
    cluster: LocalCluster, cgroups: dict[str, PodCgroup]
) -> None:
    control.ask(cluster.layout.control, {"do": "kill", "node": "n2"})
    assert left({"n2": cgroups["n2"]}) == []
    assert cgroups["n1"].exists
    control.ask(cluster.layout.control, {"do": "start", "node": "n2"})
    session.down(cluster, keep_logs=False)
    assert left(cgroups) == []


def test_those_of_a_cluster_whose_supervisor_was_killed_go_with_its_folders(
    cluster: LocalCluster, cgroups: dict[str, PodCgroup]
) -> None:
    supervisor = control.ask(cluster.layout.control, {"do": "status"})["pid"]
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not registry.alive(cluster), "the supervisor is dead")
    assert registry.clusters(LocalFolders.of_user()) == []
    assert left(cgroups) == []
