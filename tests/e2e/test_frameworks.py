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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.bare import Bare, bare
from tests.e2e.netns import Net, both, why_not
from tests.e2e.support import ENDED, ROOT, Cluster, is_alive
from tests.integration.redis_support import Server

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.frameworks, pytest.mark.timeout(600)]

NODES = 3
MACHINES = ("n1", "n2", "n3", "n4")
WHY_NOT = why_not()
STEPS = 150
FIRST_STEP_SECONDS = 60
"""A cold start imports the framework, on machines that are busy."""
SLOW_START_SECONDS = 180
"""Of one whose import takes so long, three times at once."""
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
"""Those of fixed size, with a scheduler as a role."""
FRAMEWORKS = [example for example in MODULES if example not in ("paddle_ps", *SCHEDULED)]
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
    """A job of one worker on each node, two of them at first."""

    def __init__(self, cluster: Cluster, example: str, python: str, most: int = NODES) -> None:
        self.cluster, self.name = cluster, example.replace("_", "-")
        self.folder = cluster.work / f"{example}.ckpt"
        command = [python, script_of(example), "--steps", str(STEPS), "--step-delay", "0.15"]
        cluster.submit(
            f"name: {self.name}\ncommand: {json.dumps(command)}\nnodes: {{min: 1, max: {most}, target: 2}}\n"
            f"workers_per_node: 1\ncheckpoint_dir: {self.folder}\ngrace: 10s\n"
            f"preload: {preload_of(example)}\n"
        )
        self.generation = 0

    def until_it_steps(self, world: int) -> None:
        """Until processes of a newer generation, so many, have made a few steps."""
        job = self.cluster.until_running(self.name, world, limit=FIRST_STEP_SECONDS, above=self.generation)
        self.generation = job["generation"]
        before = len(metrics(self.folder))
        self.cluster.until(
            lambda: sum(row["world"] == world for row in metrics(self.folder)[before:]) >= 6,
            FIRST_STEP_SECONDS,
            f"{self.name} makes six steps with {world} processes",
        )

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
            assert row["loss"] == pytest.approx(reference[row["step"]], rel=1e-3, abs=1e-5), row

    def ended(self) -> bool:
        return self.cluster.job(self.name)["phase"] in ENDED

    def nodes(self) -> list[str]:
        """By group rank."""
        pods = self.cluster.job(self.name)["pods"]
        running = [p for p in pods if any(w["state"] == "running" for w in p["workers"])]
        return [p["node"] for p in sorted(running, key=lambda p: int(p["workers"][0]["rank"]))]


@pytest.mark.parametrize("example", FRAMEWORKS)
def test_killed_cut_scaled_and_drained_with_the_losses_of_one_process(calm: Cluster, example: str) -> None:
    python = python_of(example)
    reference = losses_of_one_process(example, python, calm.work / f"{example}.alone")
    training = Training(calm, example, python)
    training.until_it_steps(2)
    os.kill(calm.workers(training.name)[1], signal.SIGKILL)
    training.until_it_steps(2)
    lost = training.nodes()[0]
    calm.ctl("local", "kill", lost)
    training.until_it_steps(2)
    calm.ctl("scale", training.name, "1")
    training.until_it_steps(1)
    calm.ctl("local", "start", lost)
    calm.until(lambda: calm.nodes()[lost] == "ready", 30, f"{lost} is back")
    calm.ctl("scale", training.name, "2")
    training.until_it_steps(2)
    calm.ctl("drain", training.nodes()[1], "--reason", "test")
    training.until_it_steps(2)
    training.ends_as(reference)
    assert calm.job(training.name)["budget"]["used"] == 1, "only the killed worker costs a restart"


@pytest.mark.parametrize("example", SCHEDULED)
def test_with_its_scheduler_killed_stopped_in_order_and_resumed(calm: Cluster, example: str) -> None:
    python, folder = python_of(example), calm.work / f"{example}.ckpt"
    reference = losses_of_one_process(example, python, calm.work / f"{example}.alone")
    command = [python, script_of(example), "--steps", str(STEPS), "--step-delay", "0.15"]
    calm.submit(
        f"name: {example}\ncommand: {json.dumps(command)}\nnodes: 2\nworkers_per_node: 1\nscheduler: {example}\n"
        f"checkpoint_dir: {folder}\ngrace: 30s\n"
    )

    def until_it_steps() -> None:
        before = len(metrics(folder))
        calm.until(lambda: len(metrics(folder)) >= before + 6, SLOW_START_SECONDS, f"{example} makes six steps")

    until_it_steps()
    trainer = next(w for w in _workers(calm, example) if w["place"] == "worker.1")
    os.kill(trainer["pid"], signal.SIGKILL)
    until_it_steps()
    calm.ctl("pause", example)
    calm.until_phase(example, "paused", 60)
    made = metrics(folder)[-1]["step"]
    calm.ctl("resume", example)
    until_it_steps()
    stepped = [row["step"] for row in metrics(folder)]
    assert stepped[stepped.index(made) + 1] == made + 1, "the last checkpoint was of its last step"
    job = calm.until_phase(example, "succeeded", 200)
    assert job["budget"]["used"] == 1
    assert {row["step"] for row in metrics(folder)} == set(range(1, STEPS + 1))
    for row in metrics(folder):
        assert row["loss"] == pytest.approx(reference[row["step"]], rel=1e-3, abs=1e-4), row


def _workers(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    return [w for pod in cluster.job(job)["pods"] for w in pod["workers"] if w["state"] == "running"]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("example", FRAMEWORKS)
def test_scaled_to_four_and_a_node_cut_off_that_lives_on(example: str, tmp_path: Path) -> None:
    """On machines of their own. The workers on the node that is cut off end by themselves, the others go on without
    it, and take it back when the cables are whole again; with the losses of one process."""
    python = python_of(example)
    reference = losses_of_one_process(example, python, tmp_path / "alone")
    with machines(tmp_path) as (net, one):
        training = Training(one, example, python, most=len(MACHINES))
        training.until_it_steps(2)
        one.ctl("scale", training.name, str(len(MACHINES)))
        training.until_it_steps(len(MACHINES))
        lost = training.nodes()[1]
        theirs = one.workers(training.name, lost).values()
        others = [node for node in MACHINES if node != lost]
        one.frozen.add(lost)  # it knows nothing new
        with net.cut(both([lost], [*others, "store"])):
            training.until_it_steps(len(others))
            assert not any(map(is_alive, theirs)), "they were gone before the others began"
            job = one.job(training.name)
            assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", lost, 0)
        one.frozen.discard(lost)
        training.until_it_steps(len(MACHINES))
        one.ctl("scale", training.name, "1")  # a few cores make the rest of the steps sooner so
        training.until_it_steps(1)
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
                        one.start_agent(node, net.address(node), interface="eth0")
                one.until_ready()
                yield net, one
        finally:
            server.stop()
