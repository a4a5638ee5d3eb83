"""The jobs that the frameworks' benchmark compares differ in what is preloaded alone, and steps of the old worker never
count as the new one's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import frameworks
from benchmarks.frameworks import LAUNCHERS, VARIANTS, job_file, kill_one, own_launcher
from benchmarks.steplog import NotReachedError


@pytest.mark.parametrize("example", LAUNCHERS)
def test_variants_differ_in_their_preload_alone(example: str, tmp_path: Path) -> None:
    jobs = {variant: job_file(example, variant, "python", tmp_path) for variant in VARIANTS}
    preloads = {variant: job.pop("preload", None) for variant, job in jobs.items()}
    assert preloads["preload"] and preloads["none"] == [] and preloads["guess"] is None
    assert [job.pop("name") for job in jobs.values()] == list(VARIANTS)
    assert jobs["preload"] == jobs["none"] == jobs["guess"]
    assert (own_launcher(example, "python", tmp_path) is None) == (example in ("jax", "tensorflow"))


@dataclass
class Fake:
    """A training whose steps the test writes."""

    file: Path

    def workers(self) -> dict[int, int]:
        return {}

    def evidence(self) -> str:
        return "nothing stepped"


def sleepers() -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]


def test_the_clock_runs_until_a_step_after_the_end_of_the_old_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "SETTLE", (0.0, 0.0))
    training, workers, over = Fake(tmp_path / "metrics.jsonl"), sleepers(), threading.Event()

    def old_steps_then_new() -> None:
        workers[1].wait()
        training.file.write_text("a step of the old rank 0\n")
        time.sleep(0.3)
        workers[0].kill()
        workers[0].wait()
        time.sleep(0.3)
        while not over.wait(0.05):
            with training.file.open("a") as file:
                file.write("a step of the new one\n")

    acting = threading.Thread(target=old_steps_then_new)
    acting.start()
    try:
        took = kill_one(training, {rank: worker.pid for rank, worker in enumerate(workers)})
    finally:
        over.set()
        acting.join()
    assert workers[1].returncode == -signal.SIGKILL
    assert took >= 0.6


def test_a_training_that_does_not_come_back_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "SETTLE", (0.0, 0.0))
    monkeypatch.setattr(frameworks, "RECOVERY", 0.1)
    workers = sleepers()
    with pytest.raises(NotReachedError, match=r"no step within 0\.1 s:\nnothing stepped"):
        kill_one(Fake(tmp_path / "none"), {rank: worker.pid for rank, worker in enumerate(workers)})
    os.kill(workers[0].pid, signal.SIGKILL)
    for worker in workers:
        worker.wait()
