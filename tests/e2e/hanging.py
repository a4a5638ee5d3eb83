"""A training that hangs on demand, for the tests of hangs: one rank, in one of several ways, at one of several places.

Owns the script and what asks it to hang; what is expected of nodeagent is each test's own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests.e2e.support import Cluster, is_alive

WAYS = ("stop", "lock", "spin", "disk")
"""SIGSTOP from outside at any moment; waiting for a lock that nobody frees; a busy loop; D state (the parent of a
vfork, whose child waits to open a FIFO)."""
PLACES = ("before", "after", "between")

SCRIPT = """
import json, os, sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

work, steps, helper = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "helper"
if helper:
    from nodeagent.train import progress
else:
    def progress(*_args, **_more): pass
rank, generation = int(os.environ["RANK"]), int(os.environ["NODEAGENT_GENERATION"])
lock = threading.Lock()
lock.acquire()

def hang_spin():
    while True:
        pass

def hang_lock():
    lock.acquire()

def hang_disk():
    fifo = os.path.join(work, f"fifo-{generation}-{rank}")
    os.mkfifo(fifo)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])

def perhaps(place):
    try:
        with open(os.path.join(work, "hang.json")) as file:
            wish = json.load(file)
    except FileNotFoundError:
        return
    if (wish["generation"], wish["rank"], wish["place"]) == (generation, rank, place):
        globals()["hang_" + wish["how"]]()

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpoint = os.path.join(work, "step")
step = 0
if os.path.exists(checkpoint):
    with open(checkpoint) as file:
        step = int(file.read())
while step < steps:
    perhaps("before")
    if step == 20 and rank == 1 and os.path.exists(os.path.join(work, "hang-always")):
        hang_lock()
    step += 1
    loss = model(torch.ones(4, 64)).sum()
    loss.backward()
    optimizer.step()
    perhaps("between")
    progress(step)
    if rank == 0:
        with open(checkpoint + ".new", "w") as file:
            file.write(str(step))
        os.replace(checkpoint + ".new", checkpoint)
    if not helper:
        print("step", step, flush=True)
    time.sleep(0.05)
    perhaps("after")
    if os.path.exists(os.path.join(work, f"evaluate-{generation}")) and rank == 0:
        os.unlink(os.path.join(work, f"evaluate-{generation}"))
        progress(step, "evaluate")
        end = time.monotonic() + 8
        while time.monotonic() < end:
            pass
        progress(step)
        open(os.path.join(work, "evaluated"), "w").close()
dist.destroy_process_group()
"""


def hanging_job(work: Path, name: str, *, hang: str, steps: int, helper: bool = True, more: str = "") -> str:
    """A job file: two nodes of two workers; steps of 50 ms, going on at the step where the one before was."""
    script = work / "hanging.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(work), str(steps), "helper" if helper else "plain"]
    return (
        f"name: {name}\ncommand: {json.dumps(words)}\nnodes: 2\nworkers_per_node: 2\nhang: {hang}\n"
        f"preload: [torch, torch.distributed, torch.optim, torch._dynamo]\ngrace: 5s\n{more}"
    )


def step_of(work: Path) -> int:
    file = work / "step"
    return int(file.read_text()) if file.exists() else 0


def until_steps(cluster: Cluster, count: int, limit: float = 60.0) -> None:
    """Until the training has made so many more steps."""
    goal = step_of(cluster.work) + count
    cluster.until(lambda: step_of(cluster.work) >= goal, limit, f"{count} more steps")


def make_hang(cluster: Cluster, name: str, how: str, rank: int, place: str) -> str:
    """Have this rank hang in the present generation; the node it is on."""
    job = cluster.job(name)
    node, pid = next((p["node"], w["pid"]) for p in job["pods"] for w in p["workers"] if w["rank"] == rank)
    assert is_alive(pid)
    if how == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        request: dict[str, Any] = {"generation": job["generation"], "rank": rank, "how": how, "place": place}
        draft = cluster.work / "hang.new"
        draft.write_text(json.dumps(request))
        draft.replace(cluster.work / "hang.json")
    return str(node)


def trial(cluster: Cluster, name: str, how: str, dice: random.Random) -> dict[str, Any]:
    """One hang of a random rank at a random place and moment of a running job; what was found, and how long it took."""
    before = cluster.until_running(name, 2)
    until_steps(cluster, dice.randrange(2, 12))
    rank, place = dice.randrange(4), dice.choice(PLACES)
    node = make_hang(cluster, name, how, rank, place)
    took = cluster.until(
        lambda: cluster.job(name)["generation"] > before["generation"], 60, f"the hang of rank {rank} ({how}) is seen"
    )
    cause = cluster.job(name)["cause"]
    return {
        "how": how, "rank": rank, "node": node, "place": place, "took": round(took, 2), "text": cause["text"],
        "named": (cause["kind"], cause["rank"], cause["node"]) == ("hang", rank, node),
    }  # fmt: skip
