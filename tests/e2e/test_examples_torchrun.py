"""The examples under real torchrun: exact at any world size and across a restart, and as good as they say.

Owns the proof that the scripts are plain torchrun scripts whose losses the fault tests may compare to 1e-5. Nothing
here may start nodeagent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_TARGET = {"digits": ["--target-accuracy", "0"], "tiny_gpt": ["--target-loss", "9"]}
RUN_SECONDS = 300
"""What a run may take; how fast torchrun is on a busy machine is not the subject."""


def torchrun(
    example: str, folder: Path, *options: str, processes: int, through: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end (through another script, if given); it writes folder/ckpt/ and folder/steps."""
    pytest.importorskip("torch")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NODEAGENT_")}
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
            *([str(through)] if through else []),
            *(str(EXAMPLES / example / "train.py"), "--ckpt-dir", str(folder / "ckpt")),
            *("--step-log", str(folder / "steps"), *options),
        ],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=RUN_SECONDS)
        except BaseException:
            process.send_signal(signal.SIGTERM)  # torchrun ends its workers
            process.communicate(timeout=40)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def losses(folder: Path, *, ranks: int) -> dict[int, float]:
    """Step to loss; fails unless each step was logged once by each rank, with one loss."""
    by_step: dict[int, dict[int, float]] = {}
    for line in (folder / "steps").read_text().splitlines():
        entry = json.loads(line)
        assert entry["world"] == ranks
        assert entry["generation"] is None
        assert entry["rank"] not in by_step.setdefault(entry["step"], {})
        by_step[entry["step"]][entry["rank"]] = entry["loss"]
    for step, of_ranks in by_step.items():
        assert sorted(of_ranks) == list(range(ranks)), f"step {step}"
        assert len(set(of_ranks.values())) == 1, f"step {step}"
    return {step: of_ranks[0] for step, of_ranks in by_step.items()}


@pytest.mark.timeout(4 * RUN_SECONDS)
@pytest.mark.parametrize("example", ["digits", pytest.param("tiny_gpt", marks=pytest.mark.endurance)])
def test_losses_are_the_same_at_any_world_size_and_across_a_restart(example: str, tmp_path: Path) -> None:
    alone, together, resumed = (tmp_path / name for name in ("alone", "together", "resumed"))
    for folder in (alone, together, resumed):
        folder.mkdir()
    options = ["--ckpt-every", "5", *NO_TARGET[example]]

    assert torchrun(example, alone, "--steps", "25", *options, processes=1).returncode == 0
    assert torchrun(example, together, "--steps", "25", *options, processes=2).returncode == 0
    assert torchrun(example, resumed, "--steps", "15", *options, processes=2).returncode == 0

    # The newest checkpoint is torn: the run must go on from the one before it, and by another number of processes.
    whole = losses(resumed, ranks=2)
    (resumed / "steps").unlink()
    newest = sorted((resumed / "ckpt").glob("step-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    second = torchrun(example, resumed, "--steps", "25", *options, processes=1)
    assert second.returncode == 0, second.stderr
    assert f"skipped {newest}: it is torn" in second.stdout
    assert "resumed from step 10 (generation -)" in second.stdout

    reference = losses(alone, ranks=1)
    assert list(reference) == list(range(1, 26))
    assert losses(together, ranks=2) == pytest.approx(reference, abs=1e-5)
    rest = losses(resumed, ranks=1)
    assert list(rest) == list(range(11, 26))
    assert whole | rest == pytest.approx(reference, abs=1e-5)
    assert [path.name for path in sorted((resumed / "ckpt").iterdir())] == [
        f"step-{step:08d}.pt" for step in (15, 20, 25)
    ]


THREADS_AFTER_THE_GROUP = """
import os, runpy, sys, time
from pathlib import Path
import torch.distributed

def name(task):
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""  # it has just ended

def threads():
    return sum("gloo" in name(task) for task in Path("/proc/self/task").iterdir())

def destroy_and_count():
    destroy()
    end = time.monotonic() + 10  # a thread that was joined is listed for a moment yet
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    line = f"threads of the group: {threads()}\\n"
    os.write(1, line.encode())  # one write: both ranks share the pipe

destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, destroy_and_count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(2 * RUN_SECONDS)
@pytest.mark.parametrize("example", ["digits", "tiny_gpt"])
def test_nothing_holds_the_group_at_the_end(example: str, tmp_path: Path) -> None:
    """While DDP still held the gloo group at the end, 6 of 40 processes never exited; since it does not, 0 of 40."""
    pytest.importorskip("torch")
    script = tmp_path / "count.py"
    script.write_text(THREADS_AFTER_THE_GROUP)
    out = torchrun(example, tmp_path, "--steps", "2", *NO_TARGET[example], processes=2, through=script).stdout
    assert out.count("threads of the group: 0") == 2, out


@pytest.mark.timeout(2 * RUN_SECONDS)
def test_the_digits_are_learned_and_an_unreached_target_is_a_failure(tmp_path: Path) -> None:
    full = torchrun("digits", tmp_path, processes=2)
    assert full.returncode == 0, full.stdout + full.stderr
    assert "test accuracy 0.9" in full.stdout

    # All steps are done: the same folder again trains no step, and is judged by what it has.
    steps = len(losses(tmp_path, ranks=2))
    judged = torchrun("digits", tmp_path, "--target-accuracy", "1.01", processes=2)
    assert judged.returncode == 1
    assert "resumed from step 600" in judged.stdout
    assert len(losses(tmp_path, ranks=2)) == steps
