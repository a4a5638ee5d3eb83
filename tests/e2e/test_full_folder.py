"""The folder of a job's checkpoints is full: training goes on, or says what ended it and goes on once there is room;
what was written half is never loaded.

A node's agent of its own mounts a small file system there; the other node is cordoned.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nodeagent.train import folder as files
from tests.e2e.apart import agent_apart, why_not
from tests.e2e.support import Cluster, check_complete, check_steps, digits_job, read_steps
from tests.e2e.test_snapshots import snapshots_job

NODES = 1
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.redis,
    pytest.mark.torch,
    pytest.mark.timeout(480),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
SMALL = "mkdir -p small && mount -t tmpfs -o size=8m tmpfs small"


@dataclass(frozen=True)
class Small:
    """The small file system, as the job's nodes know it (``inside``) and as the test reaches it (``here``)."""

    inside: Path
    here: Path

    def fill(self) -> None:
        """To the last byte."""
        with (self.here / "ballast").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def clear(self) -> None:
        (self.here / "ballast").unlink()


@pytest.fixture(scope="module")
def small(shared: Cluster) -> Iterator[Small]:
    with agent_apart(shared, "n2", SMALL) as agent:
        shared.until(lambda: shared.nodes().get("n2") == "ready", 30, "n2 is there")
        yield Small(shared.work / "small", Path(f"/proc/{agent.pid}/root{shared.work}/small"))


@pytest.fixture
def there(calm: Cluster, small: Small) -> Iterator[Small]:
    """Empty, and jobs run nowhere else."""
    calm.ctl("cordon", "n1", "--reason", "sees another folder")
    yield small
    calm.stop_jobs()
    subprocess.run(["sh", "-c", 'rm -rf "$0"/* "$0"/.[!.]*', str(small.here)], check=True)


def description(calm: Cluster, job: str) -> str:
    """What rank 0 of the newest generation has printed."""
    done = calm.ctl("logs", job, "--rank", "0")
    return done.stdout + done.stderr


def committed(calm: Cluster, job: str) -> int:
    """The step of the newest checkpoint that counts."""
    return int((calm.job(job)["checkpoint"] or {"step": 0})["step"])


def test_training_goes_on_without_checkpoints_until_there_is_room(calm: Cluster, there: Small) -> None:
    text = snapshots_job(there.inside, "going", "1", "--steps", "100000", "--ckpt-every", "20", "--snapshot-every", "0")
    text = text.replace(str(there.inside / "going.steps"), str(calm.work / "going.steps"))
    calm.submit(text)
    first = calm.until_running("going", 1)
    calm.until(lambda: committed(calm, "going") >= 20, 60, "one is committed")

    problem = "does not count: rank [01]: .*No space left on device; 0.0 of 8.0 MiB are free in"

    def refused() -> bool:
        """Not for the one in whose middle the folder got full: what was written of it gives room again."""
        there.fill()
        return bool(re.search(f"the checkpoint of step [0-9]+ {problem} {there.inside}", description(calm, "going")))

    calm.until(refused, 30, "one could not be written")
    calm.until_steps("going", 30)
    last = committed(calm, "going")
    folder = there.here / "going.ckpt"
    calm.until(
        lambda: all((folder / e.name / files.MARKER).exists() for e in files.entries(folder)), 10, "no half one is left"
    )
    os.kill(calm.workers("going")[1], 9)
    calm.until_running("going", 1, above=first["generation"])
    calm.until(lambda: f"from step {last} " in description(calm, "going"), 30, f"it goes on from step {last}")
    assert "passed over" not in description(calm, "going")
    calm.until_steps("going", 30)
    there.clear()
    calm.until(lambda: committed(calm, "going") > last, 30, "one is committed again")
    assert calm.job("going")["restarts"] == 1


def test_a_script_that_cannot_save_says_why_and_goes_on_when_submitted_again(
    calm: Cluster, there: Small, reference: dict[int, float]
) -> None:
    """It ends with an error of its own, as most scripts do; the next one loads the last whole checkpoint."""
    text = digits_job(calm.work, "own", nodes="1", steps=200, more="restarts: {max: 0}\n")
    text = text.replace(str(calm.work / "own.ckpt"), str(there.inside / "own.ckpt"))
    calm.submit(text)
    calm.until_running("own", 1)
    calm.until_steps("own", 10)

    def failed() -> bool:
        there.fill()
        return bool(calm.job("own")["phase"] == "failed")

    calm.until(failed, 60, "it could not save")
    output = calm.ctl("describe", "own").stdout
    assert "rank 0 on n2 failed first: exit code 1" in output, output
    assert "OSError: [Errno 28] No space left on device" in output, output
    there.clear()
    calm.submit(text)
    calm.until_phase("own", "succeeded", 90)
    assert "resumed from step" in description(calm, "own")
    rows = read_steps(calm.work, "own")
    check_steps(rows, reference)
    check_complete(rows, 200)


def test_a_job_whose_folder_is_full_from_the_start_waits_for_room(calm: Cluster, there: Small) -> None:
    there.fill()
    text = snapshots_job(there.inside, "late", "1", "--steps", "20", "--ckpt-every", "20")
    calm.submit(text.replace(str(there.inside / "late.steps"), str(calm.work / "late.steps")))
    where = f"checkpoint_dir {there.inside}/late.ckpt: .nodeagent-folder in it"
    why = f"n2 cannot run it: {where} cannot be written or read: No space left on device"
    calm.until(lambda: why in " ".join(calm.job("late")["why"]), 30, f"it says {why!r}")
    there.clear()
    calm.until_phase("late", "succeeded", 90)
    assert committed(calm, "late") == 20
