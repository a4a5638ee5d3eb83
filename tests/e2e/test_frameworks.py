"""Frameworks as they are: each example under faults and changes of size has the losses of one process left alone.

A framework is tried with the Python of its own environment (`make frameworks` makes them, one for each example that
has a requirements.txt); where there is none the test is skipped. Nothing here may know how a framework works.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.bare import Bare, bare
from tests.e2e.netns import Net, both, named, why_not
from tests.e2e.support import ENDED, ROOT, Cluster, is_alive
from tests.integration.redis_support import Server

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.frameworks, pytest.mark.timeout(600)]

NODES = 3
MACHINES = ("n1", "n2", "n3", "n4")
WHY_NOT = why_not()
STEPS = 150
STEP_DELAY = "0.4"
"""Seconds between steps: the training is not to be done before the last fault."""
FIRST_STEP_SECONDS = 60
"""A cold start imports the framework, on machines that are busy."""
ENVIRONMENTS = Path(os.environ.get("NODEAGENT_FRAMEWORKS", ROOT / ".frameworks"))
MODULES = {
    "paddle_ps": "paddle",
    "paddle": "paddle",
    "hf_trainer": "transformers",
    "lightning": "lightning",
    "fsdp2": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow",
    "mindspore": "mindspore",
}
"""Example to the module that it must be possible to import."""
SCHEDULED = ("mindspore",)
"""Those with a scheduler as a role."""
FRAMEWORKS = [example for example in MODULES if example != "paddle_ps"]
"""Those whose workers are all alike; of parameter servers see test_paddle_servers.py."""


def python_of(example: str) -> str:
    """The Python that has the framework; the test is skipped where there is none."""
    own = ENVIRONMENTS / example / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULES[example]!r}) is None)"
    if subprocess.run([python, "-c", look], timeout=60).returncode != 0:
        pytest.skip(f"{MODULES[example]} is not installed here (make frameworks)")
    return python


def preload_of(example: str) -> str:
    """What its job file preloads, as a list of YAML."""
    return json.dumps(yaml.safe_load((ROOT / "examples" / example / "job.yaml").read_text())["preload"])


def script_of(example: str) -> str:
    return str(ROOT / "examples" / example / "train.py")


def losses_of_one_process(example: str, python: str, folder: Path) -> dict[int, float]:
    """Step to loss, with no launcher near."""
    command = [python, script_of(example), "--steps", str(STEPS), "--output", str(folder)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    subprocess.run(
        command, env=os.environ | alone | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=200
    )
    return {int(row["step"]): float(row["loss"]) for row in metrics(folder)}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of rank 0, in the order in which they were written."""
    file = folder / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


class Training:
    """A job of one worker on each node, two of them at first; if it is ``SCHEDULED``, with a scheduler beside them."""

    def __init__(self, cluster: Cluster, example: str, python: str, most: int = NODES) -> None:
        self.cluster, self.name, self.scheduled = cluster, example.replace("_", "-"), example in SCHEDULED
        self.folder = Path(tempfile.mkdtemp(dir=cluster.work))
        command = [python, script_of(example), "--steps", str(STEPS), "--step-delay", STEP_DELAY]
        cluster.submit(
            f"name: {self.name}\ncommand: {json.dumps(command)}\nnodes: {{min: 1, max: {most}, target: 2}}\n"
            f"workers_per_node: 1\ncheckpoint_dir: {self.folder}\ngrace: {30 if self.scheduled else 10}s\n"
            f"preload: {preload_of(example)}\n" + (f"scheduler: {example}\n" if self.scheduled else "")
        )
        self.generation = 0
        self.until_it_steps(2, "first start")

    def until_it_steps(self, world: int, after: str, *call: str) -> None:
        """Until processes of a newer generation, so many, have made a few steps, after this call of the tool if there
        is one. How long the first step took is printed."""
        began = time.monotonic()
        if call:
            self.cluster.ctl(*call)

        def runs() -> bool:
            job = self.cluster.job(self.name)
            assert job["phase"] not in ENDED, f"{job['phase']}: {job['reason']}\n{self.cluster.state()}"
            return job["phase"] == "running" and job["generation"] > self.generation and len(self.workers()) == world

        what = f"{self.name} runs on {world} nodes after: {after}"
        self.cluster.until(runs, FIRST_STEP_SECONDS, what)
        self.generation = self.cluster.job(self.name)["generation"]
        before = len(metrics(self.folder))

        def steps() -> int:
            return sum(row["world"] == world for row in metrics(self.folder)[before:])

        self.cluster.until(lambda: steps() > 0, FIRST_STEP_SECONDS, f"{what}, and steps")
        print(f"\n{what}: first step after {time.monotonic() - began:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        self.cluster.until(lambda: steps() >= 6, FIRST_STEP_SECONDS, f"{what}, and makes six steps")

    def scale(self, world: int) -> None:
        size = f"worker={world}" if self.scheduled else str(world)
        self.until_it_steps(world, f"scaled to {world}", "scale", self.name, size)

    def ends_as(self, reference: dict[int, float]) -> None:
        """It makes all steps, each with the loss of one process. How long that takes is the machine's matter, as long
        as there are ten more steps each minute."""
        while not self.ended():
            before = len(metrics(self.folder))
            self.cluster.until(
                lambda before=before: self.ended() or len(metrics(self.folder)) >= before + 10,  # type: ignore[misc]
                FIRST_STEP_SECONDS,
                f"{self.name} makes ten steps, or ends",
            )
        assert self.cluster.job(self.name)["phase"] == "succeeded", self.cluster.state()
        rows = metrics(self.folder)
        assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
        assert rows[-1]["step"] == STEPS
        for row in rows:
            assert row["loss"] == pytest.approx(reference[row["step"]], rel=1e-3, abs=self.close), row

    @property
    def close(self) -> float:
        """How far a loss may be from another one that is almost 0."""
        return 1e-4 if self.scheduled else 1e-5

    def ended(self) -> bool:
        return self.cluster.job(self.name)["phase"] in ENDED

    def workers(self) -> list[tuple[str, int]]:
        """Node and pid of those that run, by rank; not the scheduler."""
        job = self.cluster.job(self.name)
        running = [
            (int(w["rank"]), str(p["node"]), int(w["pid"]))
            for p in job["pods"]
            for w in p["workers"]
            if p["generation"] == job["generation"] and w["state"] == "running" and w["place"] != "scheduler.0"
        ]
        return [(node, pid) for _, node, pid in sorted(running)]


@pytest.mark.parametrize("example", FRAMEWORKS)
def test_killed_cut_scaled_and_drained_with_the_losses_of_one_process(calm: Cluster, example: str) -> None:
    python = python_of(example)
    reference = losses_of_one_process(example, python, calm.work / f"{example}.alone")
    training = Training(calm, example, python)
    os.kill(training.workers()[1][1], signal.SIGKILL)
    training.until_it_steps(2, "a worker killed")
    lost = training.workers()[0][0]
    training.until_it_steps(2, "a node without power", "local", "kill", lost)
    training.scale(1)
    calm.ctl("local", "start", lost)
    calm.until(lambda: calm.nodes()[lost] == "ready", 30, f"{lost} is back")
    training.scale(2)
    calm.until(
        lambda: any(pod["phase"] == "ready" for pod in calm.job(training.name)["spares"]), 60, "a spare is ready"
    )
    training.until_it_steps(2, "a node drained", "drain", training.workers()[1][0], "--reason", "test")
    training.scale(1)  # a few cores make the rest of the steps sooner so
    training.ends_as(reference)
    assert calm.job(training.name)["budget"]["used"] == 1, "only the killed worker costs a restart"


@pytest.mark.parametrize("example", SCHEDULED)
def test_with_its_scheduler_paused_and_resumed_after_its_last_step(calm: Cluster, example: str) -> None:
    python = python_of(example)
    training = Training(calm, example, python)
    calm.ctl("pause", training.name)
    calm.until_phase(training.name, "paused", 60)
    made = metrics(training.folder)[-1]["step"]
    training.until_it_steps(2, "resumed", "resume", training.name)
    stepped = [row["step"] for row in metrics(training.folder)]
    assert stepped[stepped.index(made) + 1] == made + 1, "the last checkpoint was of its last step"
    calm.until_phase(training.name, "succeeded", 200)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("example", FRAMEWORKS)
def test_scaled_to_four_and_a_node_cut_off_that_lives_on(example: str, tmp_path: Path) -> None:
    """On machines of their own. The workers on the node that is cut off end by themselves, the others go on without
    it, and take it back when the cables are whole again; with the losses of one process."""
    python = python_of(example)
    reference = losses_of_one_process(example, python, tmp_path / "alone")
    with machines(tmp_path) as (net, one):
        training = Training(one, example, python, most=len(MACHINES))
        training.scale(len(MACHINES))
        lost = training.workers()[1][0]
        theirs = one.workers(training.name, lost).values()
        others = [node for node in MACHINES if node != lost]
        one.frozen.add(lost)  # it knows nothing new
        with net.cut(both([lost], [*others, "store"])):
            training.until_it_steps(len(others), "a node cut off")
            assert not any(map(is_alive, theirs)), "they were gone before the others began"
            job = one.job(training.name)
            assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", lost, 0)
        one.frozen.discard(lost)
        training.until_it_steps(len(MACHINES), "the node is back")
        training.scale(1)  # a few cores make the rest of the steps sooner so
        training.ends_as(reference)
        assert one.job(training.name)["budget"]["used"] == 0, "nothing of it costs a restart"


@contextmanager
def machines(folder: Path) -> Iterator[tuple[Net, Bare]]:
    """Network namespaces with a store and an agent each."""
    with Net() as net:
        for name in ("store", *MACHINES):
            net.machine(name)
        server = Server(folder / "redis", ["appendonly yes"], port=6379, address=net.address("store"))
        with net.inside("store"):
            server.start()
            asyncio.run(server.ready())
        try:
            with bare({"url": server.url}) as one:
                for node in MACHINES:
                    with net.inside(node):
                        own = named(node, net.address(node), folder)  # where JAX's gloo listens
                        one.start_agent(node, net.address(node), interface="eth0", under=own)
                one.until_ready()
                yield net, one
        finally:
            server.stop()
