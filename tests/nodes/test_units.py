"""The short form, which CI runs: an installation on real systemd nodes, and what its units promise to training."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.support import check_complete, check_steps, check_undisturbed
from tests.nodes.lab import SHARED
from tests.nodes.node import Node
from tests.nodes.support import CTL, Site
from tests.nodes.times import record_time, since
from tests.nodes.training import check_made_once, starts, stopped_as_planned

pytestmark = [pytest.mark.nodes_short, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

NODES = 3
NEEDED = {
    "User=/DynamicUser=": "it starts jobs as their users",
    "PrivateUsers=": "it starts jobs as their users",
    "SystemCallFilter=~@privileged": "part of @system-service: chown",
    "SystemCallFilter=~@clock": "adjtimex, to read; without CAP_SYS_TIME it sets nothing",
    "ProtectClock=": "would refuse the reading, too",
    "CapabilityBoundingSet=~CAP_(CHOWN|FSETID|SETFCAP)": "gives users their logs",
    "CapabilityBoundingSet=~CAP_(DAC_*|FOWNER|IPC_OWNER)": "reads and removes users' files",
    "CapabilityBoundingSet=~CAP_KILL": "fences users' processes",
    "CapabilityBoundingSet=~CAP_SYS_PTRACE": "sees what processes hold a GPU",
    "CapabilityBoundingSet=~CAP_SYSLOG": "reads the kernel's log",
    "ProtectKernelLogs=": "reads the kernel's log",
    "ProcSubset=": "reads load, memory and pressure",
    "PrivateDevices=": "asks GPUs",
    "DeviceAllow=": "asks GPUs, reads the kernel's log",
    "RootDirectory=/RootImage=": "reaches jobs' folders as they are",
    "MemoryDenyWriteExecute=": "the vendors' libraries are not its own",
    "PrivateNetwork=": "talks to Redis and to other agents",
    "IPAddressDeny=": "talks to Redis and to other agents, wherever they are",
    "RestrictAddressFamilies=~AF_(INET|INET6)": "talks to Redis and to other agents",
    "RestrictAddressFamilies=~AF_UNIX": "talks to shims",
    "RestrictAddressFamilies=~AF_NETLINK": "asks for network interfaces",
}
"""What ``systemd-analyze security`` finds open, and why the agent needs it."""


def test_units_are_sound(calm: Site) -> None:
    node = calm.lab.nodes["n1"]
    assert node.run("systemd-analyze", "verify", "nodeagent.service", "nodeagent.slice").stderr == ""
    found = json.loads(node.run("systemd-analyze", "security", "--json=short", "nodeagent.service").stdout)
    assert {one["name"] for one in found if one["set"] is False} == set(NEEDED)
    node.run("systemd-tmpfiles", "--create", "--clean", "/etc/tmpfiles.d/nodeagent.conf")
    assert node.run("getent", "group", "nodeagent-operators").stdout
    assert node.run("systemctl", "--failed", "--no-legend").stdout == ""


def test_a_shim_is_a_service_with_a_logins_rights_and_no_sandbox(calm: Site) -> None:
    calm.train("service", nodes="2", steps=600)
    job = calm.until_running("service", 2)
    pod = job["pods"][0]
    (unit,) = calm.pod_units(pod["node"])
    node = calm.lab.nodes[pod["node"]]
    shown = node.run("systemctl", "show", unit, "-p", "MainPID,Slice,User,ProtectSystem,OOMPolicy").stdout
    reported = dict(line.split("=", 1) for line in shown.splitlines())
    assert reported == {
        "MainPID": str(pod["shim_pid"]), "Slice": "nodeagent.slice", "User": "train", "ProtectSystem": "no",
        "OOMPolicy": "continue",
    }  # fmt: skip
    agent = int(node.run("systemctl", "show", "nodeagent", "-p", "MainPID", "--value").stdout)
    worker = pod["workers"][0]["pid"]
    assert node.here(f"/proc/{worker}/ns/mnt").readlink() == node.here("/proc/1/ns/mnt").readlink()
    assert node.here(f"/proc/{agent}/ns/mnt").readlink() != node.here("/proc/1/ns/mnt").readlink()
    assert limits(node, worker) == limits(node, agent)
    assert sandbox(node, worker) == sandbox(node, 1) != sandbox(node, agent)
    assert "CapEff:\t0000000000000000" in node.here(f"/proc/{worker}/status").read_text()
    calm.ctl("n1", "stop", "service", user="train")
    calm.until(lambda: calm.pod_units(pod["node"]) == [], 30, "its unit is gone with the job")


def test_reload_takes_a_config_whole_or_not_at_all(calm: Site) -> None:
    node, file = calm.lab.nodes["n3"], "/etc/nodeagent/nodeagent.yaml"

    def reload(more: str) -> int:
        node.write(file, calm.config(node, more), 0o600)
        return node.run("systemctl", "reload", "nodeagent", check=False).returncode

    def says(text: str) -> None:
        words = ["systemctl", "show", "nodeagent", "-p", "StatusText", "--value"]
        calm.until(lambda: node.run(*words).stdout.strip() == text, 10, f"the unit says: {text}")

    assert reload("drain: 90s\n") == 0
    says("config reloaded: drain")
    assert reload("drain: soon\n") != 0, "a wrong file does not even reach the agent"
    says("config reloaded: drain")
    assert reload("drain: 30s\nports: {api: 9471}\n") == 0
    says("config not reloaded: ports.api needs a restart")
    assert reload("") == 0
    says("config reloaded: drain")


def sandbox(node: Node, pid: int) -> list[str]:
    """How far a process is shut in; everything on a node has the filters of systemd-nspawn."""
    lines = node.here(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("NoNewPrivs", "Seccomp"))]


def limits(node: Node, pid: int) -> set[str]:
    """The resource limits that nodeagent's unit sets."""
    lines = node.here(f"/proc/{pid}/limits").read_text().splitlines()
    return {" ".join(line.split()) for line in lines if line.startswith(("Max open files", "Max locked memory"))}


def test_restart_loses_no_step_and_stop_is_a_graceful_leave(calm: Site, reference: dict[int, float]) -> None:
    calm.train("served", nodes="'2:3'", steps=600, delay=0.2)
    before = calm.until_running("served", 3)
    calm.until_steps("served", 10)
    started = starts(calm)
    for name in ("n1", "n2", "n3"):  # under load, all of them
        calm.lab.nodes[name].run("systemctl", "restart", "--no-block", "nodeagent")
    calm.until(lambda: starts(calm) == {n: start + 1 for n, start in started.items()}, 60, "all are back")
    calm.until_steps("served", 10)
    check_undisturbed([row for row in calm.steps("served") if row["generation"] == before["generation"]])
    assert calm.job("served")["generation"] == before["generation"]
    record_time("`systemctl restart` of three agents at once", "no step lost")
    began = time.monotonic()
    calm.lab.nodes["n2"].run("systemctl", "stop", "nodeagent")
    took = since(began)
    calm.until_nodes("left", "n2", limit=10)  # as another node sees it, a moment later
    after = calm.until_running("served", 2, above=before["generation"])
    assert after["generation"] == before["generation"] + 1
    calm.lab.nodes["n2"].run("systemctl", "start", "nodeagent")
    calm.until_nodes("ready", "n2")
    calm.until_running("served", 3, above=after["generation"])
    calm.until_steps("served", 5)
    calm.ctl("n1", "stop", "served", user="train")
    rows = calm.steps("served")
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))
    check_made_once(rows)
    record_time("`systemctl stop` of a node that trains", "no step lost or made twice", took)


def test_a_user_who_fills_his_pods_folder_keeps_no_agent_from_starting(calm: Site) -> None:
    """/run is root's, and full it stops more than this agent."""
    calm.train("filled", nodes="1", steps=600, delay=0.2)
    before = calm.until_running("filled", 1)
    calm.until_steps("filled", 5)
    node, pods = calm.lab.nodes[before["chief"]], "/run/nodeagent/pods"
    assert node.run("findmnt", "-n", "-o", "FSTYPE", pods).stdout.split() == ["tmpfs"]
    node.run("mount", "-o", "remount,size=8m", pods)
    fill = f"cat /dev/zero > $(echo {pods}/[!.]*)/much; echo > $(echo {pods}/.answers/*) || true"
    assert "No space left" in node.run("sh", "-c", fill, user="train").stderr
    started = starts(calm)[node.name]
    node.run("systemctl", "restart", "nodeagent")
    calm.until(lambda: starts(calm)[node.name] == started + 1, 60, "the agent is back")
    calm.until_steps("filled", 5)
    assert calm.job("filled")["generation"] == before["generation"]
    calm.ctl("n1", "stop", "filled", user="train")


def test_a_shutdown_is_a_graceful_leave(calm: Site, reference: dict[int, float]) -> None:
    calm.train("off", nodes="'2:3'", steps=40, delay=0.2)
    before = calm.until_running("off", 3)
    calm.until_steps("off", 5)
    victim = next(p["node"] for p in before["pods"] if p["node"] != before["chief"])
    started = time.monotonic()
    calm.lab.nodes[victim].power_off()
    took = since(started)
    calm.until_nodes("left", victim, limit=10)
    stopped_as_planned(calm, "off", reference, 40)
    record_time("`poweroff` of a node that trains, drain included", "no step lost or made twice", took)


def test_a_power_cut_costs_a_lease(calm: Site, reference: dict[int, float]) -> None:
    calm.train("cut", nodes="'2:3'", steps=60, delay=0.2)
    before = calm.until_running("cut", 3)
    calm.until_steps("cut", 10)
    victim = next(p["node"] for p in before["pods"] if p["node"] != before["chief"])
    started = time.monotonic()
    calm.lab.nodes[victim].cut_power()
    calm.until_running("cut", 2, above=before["generation"])
    took = since(started)
    calm.lab.boot(victim)
    calm.until_nodes("ready", victim)
    calm.until_phase("cut", "succeeded", 240)
    check_steps(calm.steps("cut"), reference)
    check_complete(calm.steps("cut"), 60)
    record_time("power cut, until the next generation runs", "re-formed", took)


def test_run_follows_a_training_across_nodes(calm: Site) -> None:
    script = "import torch.distributed as d; d.init_process_group('gloo'); print('rank', d.get_rank(), 'of 3')"
    words = [CTL, "run", "--nodes", "3", "--nproc-per-node", "1", "--", "python", "-c", script]
    environ = ["env", "-C", str(SHARED), f"PATH={calm.python_path}"]
    output = calm.lab.nodes["n2"].run(*environ, *words, user="train", limit=120).stdout
    assert {f"rank {rank} of 3" for rank in range(3)} <= {line.partition(": ")[2] for line in output.splitlines()}, (
        output
    )
