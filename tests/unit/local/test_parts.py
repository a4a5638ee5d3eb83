"""Layout, configs, ports, GPU shares, the tether."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nodeagent.hardware import discovery
from nodeagent.hardware.discovery import installed_gpus
from nodeagent.local.layout import HOME_VARIABLE, LONGEST_BASE, LocalError, LocalFolders
from nodeagent.local.privateredis import LONGEST_SOCKET_PATH
from nodeagent.local.registry import FIRST_PORT, PORTS_EACH, LocalCluster, choose_ports, node_names, write_config
from nodeagent.local.session import shares, visible
from nodeagent.osutil.tether import tethered
from nodeagent.spec.agentconfig import AgentConfig, ephemeral_clash


def a_cluster(folder: Path) -> LocalCluster:
    return LocalCluster("dev", "0123456789ab", folder / "run/dev", folder / "data/dev", 0.0, False, (20200, 20399))


@pytest.mark.parametrize("uuids", [(), ("GPU-1", "GPU-2")])
def test_a_written_config_is_what_the_agent_reads(tmp_path: Path, uuids: tuple[str, ...]) -> None:
    cluster = a_cluster(tmp_path)
    path = write_config(cluster, "n2", gpus=uuids, slots=64)
    config = AgentConfig.model_validate(yaml.safe_load(path.read_text()) | {"dirs": {}})
    assert (config.cluster, config.node.id, config.node.address) == ("dev", "n2", "127.0.0.1")
    assert config.cluster_key == cluster.run / "cluster.key"
    assert config.node.gpus == (uuids or "none")
    assert config.node.cpu_slots == 64
    assert config.ports.api == 0
    assert config.ports.rendezvous == (20200, 20399)
    assert config.timing.cooldown == 5.0
    assert config.timing.lease == AgentConfig().timing.lease
    assert config.jobs.allow_root == (os.geteuid() == 0)
    dirs = yaml.safe_load(path.read_text())["dirs"]
    assert {Path(d).name for d in dirs.values()} == {"n2", "state", "logs"}
    assert Path(dirs["run"]) == cluster.layout.node("n2").run


def test_node_names_go_on() -> None:
    assert node_names(3) == ["n1", "n2", "n3"]
    assert node_names(1, first=4) == ["n4"]


def test_ports_are_apart_from_the_kernels_and_from_other_clusters() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    taken: list[tuple[int, int]] = []
    for _ in range(20):
        ports = choose_ports(taken)
        assert ports[1] - ports[0] == PORTS_EACH - 1
        assert ports[0] >= FIRST_PORT
        assert ephemeral_clash(ports, (low, high)) is None
        assert not any(a <= ports[1] and ports[0] <= b for a, b in taken)
        taken.append(ports)


@pytest.mark.parametrize(
    ("count", "nodes", "workers", "expected"),
    [
        (0, 2, None, [0, 0]),
        (8, 2, None, [4, 4]),
        (8, 3, None, [3, 3, 2]),
        (1, 2, None, [1, 0]),
        (8, 2, 2, [4, 4]),
        (1, 2, 2, [0, 0]),
        (3, 2, 2, [0, 0]),
    ],
)
def test_gpus_are_shared_out_whole(count: int, nodes: int, workers: int | None, expected: list[int]) -> None:
    uuids = [f"GPU-{i}" for i in range(count)]
    found = shares(uuids, nodes, workers)
    assert [len(share) for share in found] == expected
    given = [uuid for share in found for uuid in share]
    assert given == uuids[: len(given)], "neighbours together, none twice"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, "abc"), ("", ""), ("2,0", "ca"), ("GPU-b", "b"), (" 1 , GPU-a ", "ba"), ("1,7,0", "b"), ("1,-1,0", "b"),
        ("GPU-", ""), ("1,1", "b"), ("9" * 5000, ""), ("MIG-b", ""),
    ],
)  # fmt: skip
def test_gpus_that_the_shell_hides_are_not_taken(named: str | None, expected: str) -> None:
    assert visible(["GPU-a1", "GPU-b1", "GPU-c1"], named) == [f"GPU-{letter}1" for letter in expected]


def test_no_driver_is_no_gpu_and_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_START_LIMIT", 60.0)
    line = '{"problem": "there is no NVIDIA driver", "absent": true}'
    assert installed_gpus((sys.executable, "-c", f"print({line!r})")) == ([], "")


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_START_LIMIT", 0.2)
    found, problem = installed_gpus((sys.executable, "-c", "import time; time.sleep(600)"))
    assert found == []
    assert "did not answer" in problem


@pytest.mark.parametrize(("line", "expected"), [
    ('{"problem": "NVML: Driver/library version mismatch", "absent": false}', "version mismatch"),
    ("Segmentation fault", "without an answer"),
])  # fmt: skip
def test_a_driver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, line: str, expected: str) -> None:
    monkeypatch.setattr(discovery, "FIRST_START_LIMIT", 60.0)
    found, problem = installed_gpus((sys.executable, "-c", f"print({line!r})"))
    assert found == []
    assert expected in problem


def test_sockets_have_room(home: Path) -> None:
    """The deepest socket of an agent: pods/<job uid>/shim.sock and the like."""
    longest = "x" * LONGEST_BASE + "/" + "c" * 16 + "/n999/"
    assert LONGEST_SOCKET_PATH - len(longest) >= 40
    folders = LocalFolders.of_user()
    assert folders.run.parent == home
    assert len(os.fsencode(folders.run)) <= LONGEST_BASE


def test_a_home_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / ("x" * 80)))
    with pytest.raises(LocalError, match="too long"):
        LocalFolders.of_user()


def test_a_runtime_folder_that_others_can_write_is_refused(home: Path) -> None:
    (home / "run").mkdir()
    (home / "run").chmod(0o777)
    with pytest.raises(LocalError, match="only you can write"):
        LocalFolders.of_user()


def test_a_tethered_command_keeps_its_pid_arguments_and_exit_code() -> None:
    with subprocess.Popen(
        tethered(["sh", "-c", 'echo $$ "$1"; exit 7', "sh", "a b"]), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate(timeout=20)[0] == f"{process.pid} a b\n"
        assert process.returncode == 7


def test_a_tethered_command_that_does_not_exist_says_so() -> None:
    done = subprocess.run(tethered(["/nowhere/redis"]), capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "cannot run /nowhere/redis: No such file or directory" in done.stderr


def test_a_tether_to_a_parent_that_is_gone_does_not_start_the_command(tmp_path: Path) -> None:
    command = tethered(["touch", str(tmp_path / "started")])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, timeout=20).returncode == 1
    assert not (tmp_path / "started").exists()
    assert sys.executable == command[0]
