"""The main job, end to end: a real training on a local cluster that is hit by fault after fault, and finishes.

    make demo

It trains examples/digits once undisturbed, then again on three nodes while a worker is killed, a whole node is cut from
power, a node joins, and the job is scaled up and down; then it checks that every step had the loss of the undisturbed
run, that no two generations ever stepped at the same time, and that the accuracy is what it must be. It uses nothing
but the tool's commands, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

Json = dict[str, Any]
T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/digits/train.py"
STEPS = 600
STEP_DELAY = 0.08
"""Seconds added to each step, at least: the training would be over before the first fault otherwise."""
SETTLE = 20
"""Steps to train between two faults."""
ACCURACY = 0.97
TOLERANCE = 1e-5
PATIENCE = 300.0
"""Seconds to wait for any one thing."""
BEGAN = time.monotonic()


class DemoError(Exception):
    """Something was not as it must be."""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def tool(*words: str, timeout: float = PATIENCE) -> str:
    """Run one nodeagentctl command and return what it printed. Raises DemoError with its own words."""
    command = [sys.executable, "-c", "from nodeagent.ctl.main import main; main()", *words]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != 0:
        raise DemoError(f"nodeagentctl {' '.join(words)}: exit {done.returncode}\n{done.stderr.strip()}")
    return done.stdout.strip()


def until(look: Callable[[], T | None], what: str) -> T:
    """The first true answer. Raises DemoError after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise DemoError(f"waited {PATIENCE:g} s in vain: {what}")
        time.sleep(0.05)
    return found


@contextmanager
def cluster(home: Path) -> Iterator[None]:
    """Three nodes; however this ends, nothing of them is left."""
    os.environ["NODEAGENT_LOCAL"] = str(home)  # apart from any other cluster on this machine
    tool("local", "up", "--nodes", "3", "--name", "demo")
    try:
        yield
    finally:
        tool("local", "down")
        os.environ.pop("NODEAGENTCTL_AGENT", None)


def ask_another_than(node: str) -> None:
    """Let the tool ask an agent that is not about to lose its power."""
    nodes = json.loads(tool("local", "status", "-o", "json"))["nodes"]
    os.environ["NODEAGENTCTL_AGENT"] = next(n["socket"] for n in nodes if n["name"] != node)


def undisturbed(folder: Path) -> dict[int, float]:
    """Train once in a single process that nobody disturbs: step to loss."""
    log = folder / "undisturbed.jsonl"
    alone = {
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--ckpt-dir", str(folder / "alone"), "--step-log"]
    done = subprocess.run(
        [*command, str(log)], env=os.environ | alone, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode != 0:
        raise DemoError(f"the undisturbed run failed:\n{done.stderr}")
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


class Training:
    """The job, seen through the step log that its workers write and through the tool."""

    def __init__(self, folder: Path, delay: float) -> None:
        """``delay``: seconds added to each step."""
        self.log = folder / "steps.jsonl"
        self.faults: list[tuple[str, float]] = []
        self._read = 0
        self._lines: list[Json] = []
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        options = ["--steps", str(STEPS), "--step-delay", f"{delay:.3f}", "--step-log", str(self.log)]
        job = {
            "name": "digits-demo",
            "command": [sys.executable, str(SCRIPT), *options],
            "nodes": {"min": 1, "max": 3, "target": 2},
            "workers_per_node": 2,
            "gpus_per_worker": 0,
            "checkpoint_dir": str(checkpoints),
            "preload": ["torch", "torch.distributed", "torch.optim", "torch._dynamo"],
        }
        file = folder / "job.yaml"
        file.write_text(json.dumps(job))  # JSON is YAML
        say(tool("submit", str(file)))

    def lines(self) -> list[Json]:
        """All steps so far, every rank's."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._lines += map(json.loads, whole.splitlines())
        return self._lines

    def generation(self) -> int:
        """The newest that has stepped; 0 before the first step."""
        return max((line["generation"] for line in self.lines()), default=0)

    def steps(self) -> int:
        """How many steps the newest generation made."""
        newest = self.generation()
        return len({line["step"] for line in self.lines() if line["generation"] == newest})

    def settle(self) -> None:
        """Wait until it has trained on for a while. Raises DemoError if it ended."""
        before, made = self.generation(), self.steps()
        until(lambda: self.generation() > before or self.steps() >= made + SETTLE, f"{SETTLE} more steps")

    def job(self) -> Json:
        found: Json = json.loads(tool("get", "digits-demo", "-o", "json"))
        return found

    def shown(self) -> Json | None:
        """The job once all its workers are shown to run: what a node tells of its pods follows by a heartbeat."""
        job = self.job()
        whole = all(pod["workers"] and all(w["state"] == "running" for w in pod["workers"]) for pod in job["pods"])
        return job if job["pods"] and whole else None

    def disturb(self, what: str, act: Callable[[], object]) -> None:
        """Do something that makes the gang form anew, and tell from the step log how long training stood still."""
        before = self.generation()
        act()
        until(lambda: self.generation() > before, f"a step after: {what}")
        old = max(line["mono"] for line in self.lines() if line["generation"] <= before)
        first = min((line for line in self.lines() if line["generation"] > before), key=lambda line: line["mono"])
        still = first["mono"] - old
        self.faults.append((what, still))
        say(
            f"  ... training stood still for {still:.2f} s; generation {first['generation']}, "
            f"{first['world']} workers, from step {first['step']}"
        )
        self.settle()

    def leave_alone(self, what: str, act: Callable[[], object]) -> None:
        """Do something that must not disturb a single step."""
        before = self.generation()
        act()
        self.settle()
        if self.generation() != before:
            raise DemoError(f"{what}: training was disturbed (generation {before} became {self.generation()})")
        say(f"  ... not one step was disturbed (generation {before} goes on)")


def check(training: Training, expected: dict[int, float]) -> None:
    """Raises DemoError unless the training is exactly what it would have been without any fault."""
    lines = training.lines()
    if {line["step"] for line in lines} != set(expected):
        raise DemoError("some steps are missing from the step log")
    worst = max(abs(line["loss"] - expected[line["step"]]) for line in lines)
    if worst > TOLERANCE:
        raise DemoError(f"a loss differs from the undisturbed run's by {worst:.1e}")
    generations = sorted({line["generation"] for line in lines})
    times = {g: [line["mono"] for line in lines if line["generation"] == g] for g in generations}
    for older, newer in pairwise(generations):
        if max(times[older]) >= min(times[newer]):
            raise DemoError(f"generations {older} and {newer} stepped at the same time")
    say(f"all {STEPS} losses equal the undisturbed run's (largest difference {worst:.0e})")
    say(f"{len(generations)} generations, never two at the same time")


def play(training: Training, expected: dict[int, float]) -> None:
    """The story."""
    until(training.generation, "the first step")
    job = until(training.shown, "its workers to be shown")
    gang = [pod["node"] for pod in job["pods"]]
    say(f"training on {' and '.join(gang)}, 2 workers each; {', '.join({'n1', 'n2', 'n3'} - set(gang))} stands by")
    training.settle()

    victim = max((w for pod in job["pods"] for w in pod["workers"]), key=lambda w: w["rank"])
    say(f"kill -9 of the worker of rank {victim['rank']} (pid {victim['pid']})")
    training.disturb("a worker killed", lambda: os.kill(victim["pid"], signal.SIGKILL))

    chief = training.job()["chief"]
    ask_another_than(chief)
    say(f"power cut of node {chief}, the one of rank 0: agent, shim and workers at once")
    training.disturb("a node killed", lambda: tool("local", "kill", chief))

    say("a node joins, while the job has all it wants: it stands by")
    training.leave_alone("a node joins", lambda: tool("local", "add"))

    say("scale up to 3 nodes")
    training.disturb("scaled up to 3", lambda: tool("scale", "digits-demo", "3"))
    say("scale down to 2 nodes")
    training.disturb("scaled down to 2", lambda: tool("scale", "digits-demo", "2"))

    say("and now to the end")
    job = until(lambda: ended if (ended := training.job())["phase"] in ("succeeded", "failed") else None, "its end")
    if job["phase"] != "succeeded":
        raise DemoError(f"the job {job['phase']}: {job['reason']}")
    output = tool("logs", "digits-demo", "--rank", "0")
    result = [line for line in output.splitlines() if "test accuracy" in line][-1]
    if float(result.split("test accuracy")[1].split()[0]) < ACCURACY:
        raise DemoError(f"not accurate enough: {result}")
    say(result.partition(": ")[2] or result)
    check(training, expected)
    spent = json.loads(tool("describe", "digits-demo", "-o", "json"))["budget"]["used"]
    if spent != 1:
        raise DemoError(f"the restart budget paid {spent} times, not for the killed worker alone")
    say("the restart budget paid for the killed worker only")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="na-demo-", dir="/tmp"))
    try:
        say(f"an undisturbed run first, to compare with: {STEPS} steps in one process")
        began = time.monotonic()
        expected = undisturbed(folder)
        # On a slow or busy machine all that happens to the training takes longer, and it must not be over before.
        delay = max(STEP_DELAY, (time.monotonic() - began) / STEPS)
        say("a local cluster: a private Redis and three agents")
        with cluster(folder / "c"):
            training = Training(folder, delay)
            play(training, expected)
    except DemoError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the cluster is gone", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n  what happened         training stood still")
    for what, still in training.faults:
        print(f"  {what:<20}  {still:6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
