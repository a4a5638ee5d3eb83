"""examples/horovod/launcher.yaml: a launcher as the command of a role reaches the others through ``bin/ssh``.

Instead of Horovod, whose core is not built here, a program that starts its workers as ``horovodrun`` 0.28 does: a shell
runs ``ssh -o ... HOST 'cd DIR > /dev/null 2>&1 ; HOROVOD_RANK=0 ... COMMAND'`` for each slot, all at once, and when one
fails the others are ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from nodeagent.osutil.linux import is_running
from tests.e2e.support import ROOT, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(240)]
NODES, JOB, SLOTS = 2, "horovod-launcher", 'SLOTS: "2"'
EXAMPLE = ROOT / "examples" / "horovod"
HOROVODRUN = """
import os, shlex, subprocess, sys, time
np, hosts, command = int(sys.argv[2]), sys.argv[4].split(","), sys.argv[5:]
slots = [(name, i) for name, n in (host.split(":") for host in hosts) for i in range(int(n))][:np]
processes = []
for rank, (host, local) in enumerate(slots):
    env = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": np, "HOROVOD_LOCAL_RANK": local, "HOROVOD_HOSTNAME": host}
    line = " ".join([*(f"{k}={v}" for k, v in env.items()), *map(shlex.quote, command)])
    there = shlex.quote(f"cd {os.getcwd()} > /dev/null 2>&1 ; {line}")
    ssh = f"ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no {host}   {there}"
    processes.append(subprocess.Popen(ssh, shell=True, start_new_session=True))
while any(p.poll() is None for p in processes):
    if any(p.poll() for p in processes):
        for p in processes:
            if p.poll() is None: os.killpg(p.pid, 15)
        sys.exit("one of them has failed")
    time.sleep(0.02)
sys.exit(max(p.returncode for p in processes))
"""
TRAIN = """
import json, os, sys, time
from pathlib import Path
me = {key: os.environ["HOROVOD_" + key] for key in ("RANK", "SIZE", "LOCAL_RANK", "HOSTNAME")}
os.write(1, f"rank {me['RANK']} of 'four'\\n".encode())
print("to stderr", file=sys.stderr)
Path(f"{me['RANK']}.{os.getpid()}").write_text(json.dumps(me | {"pod": os.getsid(0)}))
while not Path("enough").exists(): time.sleep(0.02)
"""
OTHER = """
import os, shutil, time
shutil.copy(os.environ["NODEAGENT_ROLES_FILE"], "roles.new")
os.rename("roles.new", "roles")
time.sleep(600)
"""


def test_a_launcher_starts_its_workers_in_the_pods_of_another_role(shared: Cluster) -> None:
    folder = shared.work / "launcher"
    shutil.copytree(EXAMPLE, folder)
    (folder / "train.py").write_text(TRAIN)
    tool = folder / "bin" / "horovodrun"
    tool.write_text(f"#!{sys.executable}\n{HOROVODRUN}")
    tool.chmod(0o755)
    (folder / "bin" / "python3").symlink_to(sys.executable)
    (folder / "bin" / "python").symlink_to(sys.executable)
    path = json.dumps(f"{folder / 'bin'}:{os.environ['PATH']}")
    example = (EXAMPLE / "launcher.yaml").read_text()
    assert example.count(SLOTS) == 1
    shared.submit(f"{example.replace(SLOTS, f'{SLOTS}, PATH: {path}')}working_dir: {folder}\ngrace: 5s\n")

    def ranks(seen: frozenset[Path] = frozenset()) -> dict[int, dict[str, Any]]:
        """Pid to what a process of Horovod's has told of itself, of those that are new."""
        files = [file for file in folder.glob("[0-9].*") if file not in seen and file.stat().st_size]
        return {int(file.suffix[1:]): json.loads(file.read_text()) for file in files}

    def pods() -> dict[str, int]:
        return {w["place"]: w["pid"] for p in shared.job(JOB)["pods"] for w in p["workers"] if w["pid"]}

    def check(started: dict[int, dict[str, Any]]) -> None:
        places = pods()
        shown = sorted((int(one["RANK"]), one["LOCAL_RANK"], one["HOSTNAME"], one["pod"]) for one in started.values())
        first, second = places["worker.0"], places["worker.1"]
        assert shown == [
            (0, "0", "worker-0", first), (1, "1", "worker-0", first),
            (2, "0", "worker-1", second), (3, "1", "worker-1", second),
        ], "each is in the session of its place's server"  # fmt: skip

    shared.until(lambda: len(ranks()) == 4, 60, "all four have started")
    check(ranks())

    before, seen = ranks(), frozenset(folder.glob("[0-9].*"))
    os.kill(next(pid for pid, one in before.items() if one["RANK"] == "3"), signal.SIGKILL)
    shared.until(lambda: len(ranks(seen)) == 4, 60, "the launcher has failed, and all is started again")
    assert not any(map(is_running, before))
    shared.until_running(JOB, NODES, above=0)
    check(ranks(seen))
    assert shared.job(JOB)["generation"] == 2

    (folder / "enough").touch()
    shared.until_phase(JOB, "succeeded", 30)
    logs = shared.ctl("logs", JOB)
    assert {f"[launcher.0]<stdout>: rank {rank} of 'four'" for rank in range(4)} <= set(logs.stdout.splitlines())
    assert "[launcher.0]<stderr>: to stderr" in logs.stderr.splitlines()
    assert (folder / "reach.secret").stat().st_mode & 0o777 == 0o600


def test_who_does_not_know_the_secret_starts_nothing(shared: Cluster) -> None:
    folder = shared.work / "secret"
    shutil.copytree(EXAMPLE, folder)
    (folder / "other.py").write_text(OTHER)
    python = json.dumps(sys.executable)
    shared.submit(f"""
name: secret
working_dir: {folder}
roles:
  worker: {{command: [{python}, reach.py, serve], nodes: 1, workers_per_node: 1, gpus_per_worker: 0,
    ready: {{port: true}}}}
  other: {{command: [{python}, other.py], nodes: 1, workers_per_node: 1, gpus_per_worker: 0, after: worker}}
""")
    shared.until((folder / "roles").exists, 60, "the server listens")
    (at,) = json.loads((folder / "roles").read_text())["worker"]
    for seal in ("0" * 64, ""):
        with socket.create_connection((at["host"], at["port"]), 10) as link:
            assert len(link.makefile("rb").readline()) == 33
            link.sendall(
                f"{seal} ".encode() + json.dumps({"command": "touch stolen", "cwd": str(folder)}).encode() + b"\n"
            )
            assert link.recv(1) == b"", "it hangs up"
    assert not (folder / "stolen").exists()
    shared.ctl("stop", "secret")
