"""What only a real GPU shows, on a machine with one of them, without a network, in a few minutes: ``make gpu``.

The driver's answers against nvidia-smi's, memory at rest, which GPU a worker gets, CUDA in forked workers, and a
training that is killed and goes on from its snapshot. Where there is no GPU all of it is skipped, and says why. CUDA is
used by the Python in ``NODEAGENT_GPU_PYTHON`` (default: the one that runs the tests), which needs a torch with CUDA.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nodeagent.hardware.judging.judge import JudgeMemory, judge
from nodeagent.hardware.judging.rules import LEFTOVER
from nodeagent.hardware.monitor import _gpu
from nodeagent.hardware.plugins import NVIDIA
from nodeagent.hardware.probes.process import packages, reader_command
from nodeagent.hardware.readings import GpuReading, Readings
from tests.e2e.support import ROOT, Cluster, home, read_steps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BOUND = 60.0
"""Seconds for what takes one or two; CUDA's first start takes some ten."""
NEAR = 64 << 20
"""Bytes by which two readings of memory a moment apart may differ."""
PYTHON = os.environ.get("NODEAGENT_GPU_PYTHON", sys.executable)
_ASKED = (
    "uuid,name,pci.bus_id,driver_version,memory.used,ecc.mode.current,pcie.link.width.current,"
    "pcie.link.width.max,temperature.gpu"
)  # fmt: skip


def run(*command: str, environ: Mapping[str, str] | None = None, limit: float = BOUND) -> str:
    """What it writes; AssertionError with what it said if it fails."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f"{' '.join(command)[:200]}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def smi() -> dict[str, str]:
    """The first GPU, in nvidia-smi's words."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        pytest.skip("no GPU: there is no nvidia-smi")
    done = subprocess.run(
        [tool, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=BOUND
    )
    if done.returncode != 0 or not done.stdout.strip():
        pytest.skip(f"no GPU: nvidia-smi says {(done.stdout + done.stderr).strip()[:100]!r}")
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_ASKED.split(","), values, strict=True))


@pytest.fixture(scope="module")
def cuda(smi: dict[str, str]) -> str:
    """A Python whose torch has CUDA."""
    done = subprocess.run(
        [PYTHON, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"], capture_output=True, timeout=120
    )
    if done.returncode != 0:
        pytest.skip(f"{PYTHON} has no torch with CUDA: set NODEAGENT_GPU_PYTHON")
    return PYTHON


class Looks:
    """The real probe under the real driver."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        environ = {**os.environ, "PYTHONPATH": packages()}
        self.process = subprocess.Popen(
            reader_command(sys.executable, NVIDIA, 0.5), env=environ, stdout=subprocess.PIPE
        )

    def next(self) -> GpuReading:
        """The first GPU at the next look."""
        assert self.process.stdout is not None
        until = time.monotonic() + BOUND
        while time.monotonic() < until:
            assert select.select([self.process.stdout], [], [], BOUND)[0], "the driver does not answer"
            reported: dict[str, Any] = json.loads(self.process.stdout.readline())
            assert "problem" not in reported, reported
            for fields in reported.get("gpus", ()):
                if fields["uuid"] == self._uuid:
                    return _gpu(fields)
        raise AssertionError("the GPU is not among those that the probe lists")

    def until(self, wanted: Callable[[GpuReading], object], what: str) -> GpuReading:
        last = self.next()
        until = time.monotonic() + BOUND
        while not wanted(last):
            assert time.monotonic() < until, f"not within {BOUND:g} s: {what}: {last}"
            last = self.next()
        return last


@pytest.fixture
def looks(smi: dict[str, str]) -> Iterator[Looks]:
    found = Looks(smi["uuid"])
    with found.process:
        yield found
        found.process.kill()


def test_the_probe_and_nvidia_smi_say_the_same(smi: dict[str, str], looks: Looks) -> None:
    gpu = looks.next()
    assert (gpu.name, gpu.driver) == (smi["name"], smi["driver_version"])
    assert smi["pci.bus_id"].lower().endswith(f"{gpu.pci}.0")
    assert gpu.error == ""
    assert gpu.recovery in (None, "none")
    assert {True: "Enabled", False: "Disabled", None: "[N/A]"}[gpu.ecc] == smi["ecc.mode.current"]
    assert (str(gpu.pcie_width), str(gpu.pcie_width_max)) == (
        smi["pcie.link.width.current"], smi["pcie.link.width.max"],
    )  # fmt: skip
    assert gpu.temperature is not None
    assert abs(gpu.temperature - int(smi["temperature.gpu"])) <= 15
    print(f"\n{gpu}")


def test_a_gpu_at_rest_is_sound_and_holds_nothing(looks: Looks) -> None:
    """Whatever its driver reserves, whether it has a bridge or not, whatever it does not tell."""
    gpu = looks.next()
    if gpu.processes:
        pytest.skip(f"the GPU is in use: {gpu.owners}")
    assert gpu.memory_used is not None
    assert gpu.memory_used < LEFTOVER
    memory, before = JudgeMemory(), Readings(boot="b", gpus=(gpu,), expected=(gpu.uuid,))
    for n in range(5):
        now = Readings(boot="b", gpus=(looks.next(),), expected=(gpu.uuid,))
        memory = judge(memory, now, before, 1_000.0 + 10 * n, 10.0)
        before = now
    assert {v.rule for v in memory.verdicts if v.severity in ("fatal", "unknown")} == set()
    assert "gpu.leftover" not in {v.rule for v in memory.verdicts}


_HOLDS = """
import sys, torch
held = torch.ones(256 << 20, dtype=torch.uint8, device="cuda"); torch.cuda.synchronize()
print("holds", flush=True); sys.stdin.read()
"""


def test_who_uses_the_gpu_is_seen_and_what_it_held_is_free_when_it_is_killed(cuda: str, looks: Looks) -> None:
    before = looks.next().memory_used
    with subprocess.Popen([cuda, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"holds\n"
        used = looks.until(lambda gpu: (gpu.memory_used or 0) >= 256 << 20, "its memory is seen").memory_used
        assert used is not None
        seen = looks.next().processes
        if seen:  # in a container with pids of its own the driver names others, or nobody
            print(f"\npids {seen}, it is {user.pid}")
        user.kill()
    began = time.monotonic()
    looks.until(lambda gpu: (gpu.memory_used or 0) <= (before or 0) + NEAR, "its memory is free")
    print(f"\nfree {time.monotonic() - began:.1f} s after SIGKILL")


def test_a_worker_gets_the_gpu_that_its_uuid_names(cuda: str, smi: dict[str, str]) -> None:
    script = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    count, uuid = run(cuda, "-c", script, environ={**os.environ, "CUDA_VISIBLE_DEVICES": smi["uuid"]}).split()
    assert (count, uuid) == ("1", smi["uuid"].removeprefix("GPU-"))
    none = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-00000000-0000-0000-0000-000000000000"}
    assert run(cuda, "-c", "import torch; print(torch.cuda.device_count())", environ=none).split() == ["0"]


_FORKS = """
import os, sys, torch, torch.distributed
for _ in range(3):
    assert not torch.cuda.is_initialized(), "the parent must have no context of its own"
    child = os.fork()
    if not child:
        total = torch.ones(1000, device="cuda").sum().item()
        os._exit(0 if total == 1000 else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked child cannot use CUDA"
print("forked")
"""


def test_children_of_a_parent_that_imported_torch_and_has_no_context_use_cuda(cuda: str) -> None:
    """As the fork server forks its workers."""
    assert run(cuda, "-c", _FORKS, limit=120) == "forked\n"


@pytest.mark.e2e
@pytest.mark.torch
@pytest.mark.redis
def test_a_training_on_the_gpu_that_is_killed_goes_on_from_its_snapshot(cuda: str, smi: dict[str, str]) -> None:
    with home() as (folder, environ):
        one = Cluster(folder, folder / "work", environ)
        try:
            one.up(1)
            one.until(lambda: len(one.node("n1")["gpus"]) >= 1, BOUND, "the node has its GPU")
            (gpu, *_) = one.node("n1")["gpus"]
            assert (gpu["uuid"], gpu["healthy"]) == (smi["uuid"], True), one.node("n1")["verdicts"]
            train(one, folder / "work", cuda)
        finally:
            one.ctl("local", "down", check=None)


def train(one: Cluster, work: Path, python: str) -> None:
    words = [
        python, str(ROOT / "examples" / "snapshots" / "train.py"), "--steps", "100000", "--ckpt-every", "0",
        "--step-delay", "0.02", "--step-log", str(work / "onegpu.steps"),
    ]  # fmt: skip
    one.submit(
        f"name: onegpu\ncommand: {json.dumps(words)}\nnodes: 1\nworkers_per_node: gpu\n"
        f"checkpoint_dir: {work / 'onegpu.ckpt'}\nenv: {{PYTHONPATH: {json.dumps(str(ROOT))}}}\ngrace: 5s\n"
        "preload: [torch, torch.distributed]\n"
    )
    first = one.until_running("onegpu", 1, limit=120)
    one.until_steps("onegpu", 20, limit=120)
    for pid in one.workers("onegpu").values():
        os.kill(pid, signal.SIGKILL)
    one.until_running("onegpu", 1, limit=120, above=first["generation"])
    one.until_steps("onegpu", 20, limit=120)
    rows = read_steps(work, "onegpu")
    before = max(row["step"] for row in rows if row["generation"] == first["generation"])
    after = min(row["step"] for row in rows if row["generation"] > first["generation"])
    assert before - 1 <= after - 1 <= before + 1, "it goes on from the step that it had reached"
    assert {v["rule"] for v in one.node("n1")["verdicts"] if v["severity"] == "fatal"} == set()
