"""Checkpoints on disk under plain torchrun: another number of ranks loads them, damaged ones are passed over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.train.folder import entries, entry_of

pytest.importorskip("torch")
BOUND = 300.0
"""Seconds for one training, on a machine where torch is slow to import."""
pytestmark = [pytest.mark.torch, pytest.mark.timeout(BOUND + 100)]
ROOT = Path(__file__).parents[2]

TRAIN = """
import os, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from nodeagent.train import Checkpoints, resume, snapshot
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
if "RANK" in os.environ:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = {{"model": model, "optimizer": optimizer, "epoch": 0}}
checkpoints = Checkpoints(keep=2)
step = resume(state, checkpoints)
def total():
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return sum(float(v.detach().double().abs().sum()) for v in values)
print("from", step, state["epoch"], f"{{total():.6f}}", flush=True)
while step < int(sys.argv[1]):
    optimizer.zero_grad()
    model(torch.full((2, 16), 1.0 + step)).square().sum().backward()
    optimizer.step()
    step += 1
    state["epoch"] = step // 2
    assert not snapshot({{"step": step}}, step)
    checkpoints.wait()
    assert checkpoints.save(state, step)
committed, value = checkpoints.close(), total()
if dist.is_initialized():
    dist.destroy_process_group()
print("end", step, committed, f"{{value:.6f}}", flush=True)
os._exit(0)  # the groups that FSDP still holds can abort Python's own end
"""

BUSY = """
import sys, threading
sys.path.insert(0, {root!r})
import torch
from nodeagent.train import Checkpoints

writing, asked = threading.Event(), threading.Event()
class Slow(Checkpoints):
    def _commit(self, *what):
        writing.set()
        assert asked.wait(30)
        return super()._commit(*what)
    def wait(self):
        if writing.is_set():
            asked.set()
        return super().wait()

checkpoints, state = Slow(), {{"weights": torch.ones(4)}}
assert checkpoints.save(state, 1)
assert writing.wait(30)
print(checkpoints.save(state, 2), checkpoints.save_now(state, 3))
"""

TROUBLE = """
import errno, json, os, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from nodeagent.train import Checkpoints, folder
from nodeagent.train.link import ShimAnswer

class Shim:
    def ask(self, op, timeout=0.0, /, **fields):
        json.dumps(fields)
        return ShimAnswer(name="")

class Number:  # as numpy's
    def __init__(self, value):
        self.value = value
    def __index__(self):
        return self.value
    def __format__(self, how):
        return format(self.value, how)

class Checked(Checkpoints):
    broken = False
    def _commit(self, *what):
        if self.broken:
            raise TypeError("unforeseen")
        return super()._commit(*what)

def stale(_):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

dist.init_process_group("gloo")
checkpoints, state, order = Checked(), {{"weights": torch.ones(4)}}, folder.next_order
checkpoints._link = Shim()
results = [checkpoints.save_now(state, Number(1))]
checkpoints.broken = True
results.append(checkpoints.save_now(state, 2))
checkpoints.broken = False
folder.next_order = stale
results.append(checkpoints.save(state, 3))
results.append(checkpoints.save_now(state, 4))
folder.next_order = order
results.append(checkpoints.save_now(state, 5))
print(dist.get_rank(), *results, checkpoints.close(), flush=True)
dist.barrier()
os._exit(0)
"""


def train(folder: Path, last: int, ranks: int = 0) -> tuple[list[str], str]:
    """What rank 0 printed, and all that was complained of. 0 ranks: no torchrun at all."""
    script = folder / "t.py"
    script.write_text(TRAIN.format(root=str(ROOT)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NODEAGENT")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(last)]
    if ranks:
        logs = ["--local-ranks-filter", "0"]
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *logs]
        command = [*run, *command[1:]]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def newest(folder: Path) -> Path:
    return folder / "ckpt" / entries(folder / "ckpt")[0].name


@pytest.mark.timeout(4 * BOUND)  # four trainings, each with its own bound
def test_one_process_goes_on_and_passes_over_what_is_damaged(tmp_path: Path) -> None:
    (start, end), _ = train(tmp_path, 3)
    assert start.startswith("from 0 0")
    assert end.startswith("end 3 True")
    assert [e.step for e in entries(tmp_path / "ckpt")] == [3, 2]
    (start, _), output = train(tmp_path, 3)
    assert start == f"from 3 1 {end.split()[-1]}"
    assert "passed over" not in output
    part = next(newest(tmp_path).glob("__0_*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (start, again), output = train(tmp_path, 3)
    assert start.startswith("from 2 1")
    assert again == end, "the lost step was made again, to the same end"
    assert f"the checkpoint of step 3 is passed over: {Path('ckpt') / newest_damaged(output)}" in output
    part = next(newest(tmp_path).glob("__0_*"))
    part.write_bytes(part.read_bytes()[:-1])
    (start, _), output = train(tmp_path, 2)
    assert start.startswith("from 2 1")
    assert "bytes instead of" in output


def test_one_that_must_not_be_left_out_waits_for_the_one_before(tmp_path: Path) -> None:
    """Else a script that leaves would take the commit of an older one for its own."""
    (tmp_path / "t.py").write_text(BUSY.format(root=str(ROOT)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NODEAGENT")}
    done = subprocess.run(
        [sys.executable, "t.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=BOUND
    )
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
    assert [e.step for e in entries(tmp_path / "ckpt")] == [3, 1]


def test_what_goes_wrong_on_rank_0_is_known_to_all_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TROUBLE.format(root=str(ROOT)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NODEAGENT")} | {"OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*run, "t.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stdout + done.stderr
    results = "True False False False True True"
    assert sorted(done.stdout.splitlines()) == [f"0 {results}", f"1 {results}"], done.stderr
    assert "the checkpoint of step 2 does not count: rank 0: TypeError: unforeseen" in done.stderr
    assert "no checkpoint of step 3: rank 0: OSError: [Errno 116] Stale file handle" in done.stderr
    assert [e.step for e in entries(tmp_path / "ckpt") if e.step != 2] == [5, 1]


def newest_damaged(output: str) -> str:
    """The part that a complaint names, below the folder of checkpoints."""
    path = output.partition("passed over: ckpt/")[2].partition(" has ")[0]
    assert entry_of(path.partition("/")[0]) is not None
    return path


@pytest.mark.slow
@pytest.mark.timeout(2 * BOUND)
def test_another_number_of_ranks_goes_on_with_the_same_state(tmp_path: Path) -> None:
    """The model's parts are spread over two ranks, then all on one."""
    two, _ = train(tmp_path, 2, 2)
    assert two[-1].startswith("end 2 True")
    one, _ = train(tmp_path, 2, 1)
    assert one[0].startswith("from 2 1")
    assert one[0].split()[-1] == two[-1].split()[-1]
