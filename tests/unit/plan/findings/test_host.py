"""Judgement of one machine: each thing that can be wrong, and that all else is not told."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.model.facts import FolderFacts, HostFacts
from nodeagent.plan.findings.host import judge_host

GIB = 2**30
SOUND: dict[str, Any] = {
    "node": "n1", "root": True, "shm_free": 4 * GIB, "shm_total": 8 * GIB, "memlock": -1, "pins_memory": True,
    "address": "10.0.0.1", "interface": "eth0", "interface_state": "up", "ports": (29400, 29899), "ports_taken": 3,
    "python": "/opt/nodeagent/bin/python", "clock_rate": 0.0005,
}  # fmt: skip
FOLDER: dict[str, Any] = {
    "key": "dirs.logs", "path": "/var/log/my logs", "free": 50 * GIB, "total": 100 * GIB, "free_files": 10**6,
}  # fmt: skip

CERTIFICATE = {"certificate": "/c.pem"}
WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"missing": ("redis", "yaml")}, "error", "lacks redis yaml", "that make packages builds"),
    ({"python_closed": "/root"}, "warning", "may not pass through /root", "it is in /opt/nodeagent"),
    ({"other_name": "n9"}, "warning", "is called n9 now, and goes on as the node n1", "set node.id: n1"),
    ({"shm_free": 1 << 20}, "error", "/dev/shm: 1 of 8192 MiB are free: data loaders die", "ls -lS /dev/shm"),
    ({"shm_free": 64 << 20, "shm_total": 64 << 20}, "warning", "64 of 64 MiB", "mount -o remount,size=50% /dev/shm"),
    ({"address_problem": "Cannot assign"}, "error", "10.0.0.1: Cannot assign", "node.address"),
    ({"address_problem": "Cannot assign", "address_now": "10.0.0.1"}, "error", "10.0.0.1: Cannot", "give this machine"),
    (
        {"address_problem": "Cannot assign", "address_now": "10.0.0.9"},
        "error",
        "its address was 10.0.0.1; it is 10.0.0.9 now",
        "systemctl restart nodeagent",
    ),
    ({"interface_state": "missing"}, "error", "eth0 does not exist", "ip -br link"),
    ({"interface_state": "down"}, "error", "eth0 is down", "ip link set eth0 up"),
    (
        {"ports_problem": "overlap", "ports_right": "choose others"},
        "error",
        "ports.rendezvous: overlap",
        "choose others",
    ),
    ({"clock_rate": 0.083333}, "error", "8.3% too fast", "maxslewrate"),
    ({"clock_rate": -0.0123}, "error", "1.2% too slow", "maxslewrate"),
    ({"ports_taken": 480}, "error", "480 of the ports 29400-29899 are taken", "ss -ltnp"),
    (CERTIFICATE | {"certificate_left": -5.0}, "error", "api.tls.cert (/c.pem) has ended", "systemctl restart"),
    (CERTIFICATE | {"certificate_left": 29.6 * 86400}, "warning", "ends in 30 days", "systemctl restart"),
    (
        CERTIFICATE | {"certificate_left": 9e6, "certificate_digest": "ab", "certificate_served": "cd"},
        "warning",
        "api.tls.cert (/c.pem) is another one than the agent serves",
        "systemctl restart",
    ),
    (
        CERTIFICATE | {"certificate_problem": "no openssl"},
        "warning",
        "unknown: when api.tls.cert (/c.pem) ends: no",
        "",
    ),
    ({"memlock": 65536}, "warning", "lock 64 KiB", "LimitMEMLOCK=infinity"),
    ({"gpus_missed": True}, "warning", "found no GPU", "nvidia-smi"),
    ({"undriven": ("0000:3b:00",)}, "warning", "installed (0000:3b:00), but their driver is not loaded", "gpus: none"),
    ({"given_up": ("0000:3b:00",)}, "info", "acknowledged as gone (`nodeagentctl health ack`)", "offered again"),
    ({"hardware_missing": "gone"}, "warning", "hardware is not watched, and no GPU is offered: gone", "health: off"),
    ({"runtimes": ()}, "info", "neither podman nor apptainer is installed", "podman catatonit"),
    ({"runtimes": ("podman",), "podman_lacks": ("catatonit",)}, "warning", "no catatonit", "install catatonit"),
    ({"runtimes": ("podman",), "podman_lacks": ("subuid",)}, "warning", "/etc/subuid is empty", "--add-subuids"),
    ({"runtimes": ("podman",), "podman_lacks": ("cgroups",)}, "warning", "crun", "unified_cgroup_hierarchy=1"),
    ({"unknown": ("the disk hangs",)}, "warning", "unknown: the disk hangs", ""),
]
WRONG_FOLDERS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"problem": "is no folder"}, "error", "dirs.logs (/var/log/my logs) is no folder", "another dirs.logs"),
    ({"others_write": True}, "error", "written to by anybody", "chmod go-w '/var/log/my logs'"),
    ({"closed": "/var/log/my logs"}, "warning", "may not pass through", "chmod o+x '/var/log/my logs'"),
    ({"free": 10 << 20}, "error", "10 of 102400 MiB are free: nothing can be started", "du -xh"),
    ({"free": GIB}, "warning", "1024 of 102400 MiB are free", "du -xh"),
    ({"free_files": 5}, "error", "room for 5 more files", "du -xh"),
]


def test_a_sound_machine_has_no_findings() -> None:
    assert judge_host(HostFacts(**SOUND, folders=(FolderFacts(**FOLDER),))) == ()


@pytest.mark.parametrize(("change", "severity", "what", "fix"), WRONG)
def test_what_is_wrong_is_reported_alone(change: dict[str, Any], severity: str, what: str, fix: str) -> None:
    (found,) = judge_host(HostFacts(**(SOUND | change)))
    assert (found.severity, what in found.what, fix in found.fix) == (severity, True, True), found


@pytest.mark.parametrize(("change", "severity", "what", "fix"), WRONG_FOLDERS)
def test_a_folder_that_is_wrong(change: dict[str, Any], severity: str, what: str, fix: str) -> None:
    (found,) = judge_host(HostFacts(**SOUND, folders=(FolderFacts(**(FOLDER | change)),)))
    assert (found.severity, what in found.what, fix in found.fix) == (severity, True, True), found


@pytest.mark.parametrize(
    "change",
    [
        {"memlock": 65536, "pins_memory": False},
        {"memlock": None},
        {"interface": "", "interface_state": None},
        {"interface_state": "unknown"},
        {"shm_free": None, "shm_total": None},
        {"ports_taken": None},
    ],
)
def test_what_does_not_matter_or_is_not_known_is_no_fault(change: dict[str, Any]) -> None:
    assert judge_host(HostFacts(**(SOUND | change))) == ()


def test_a_folder_that_only_this_user_needs_may_be_closed() -> None:
    folder = FolderFacts(**(FOLDER | {"closed": "/home/me"}))
    assert judge_host(HostFacts(**(SOUND | {"root": False}), folders=(folder,))) == ()


def test_a_small_disk_is_full_by_its_own_measure() -> None:
    """/run is often a few hundred MiB, and that is enough."""
    folder = FolderFacts(**(FOLDER | {"free": 150 << 20, "total": 200 << 20}))
    assert judge_host(HostFacts(**SOUND, folders=(folder,))) == ()


def test_errors_come_first() -> None:
    found = judge_host(HostFacts(**(SOUND | {"python_closed": "/root", "interface_state": "down"})))
    assert [f.severity for f in found] == ["error", "warning"]
