"""A state of FSDP (DTensors) on two ranks: one state is right for snapshots in memory, written out, and checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]

TRAIN = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from nodeagent.train.checkpoints import Checkpoints
from nodeagent.train.context import context
from nodeagent.train.folder import entries, mark_committed
from nodeagent.train.link import ShimAnswer
from nodeagent.train.snapshots import WorkerSnapshots, load_written
from nodeagent.train.writeout import WriteOrder, write_out

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Keeps:
    \"\"\"A shim in this process.\"\"\"
    def __init__(self):
        self.kept = {{}}
    def ask(self, name, timeout=0.0, *, fds=(), **fields):
        if name == "snapshot.put":
            if fds:
                self.kept[fields["index"]] = os.dup(fds[0])
            return ShimAnswer()
        if "slot" not in fields:
            return ShimAnswer(slots=[rank], own=rank)
        answer = ShimAnswer(indexes=list(self.kept))
        answer.fds = tuple(os.dup(fd) for fd in self.kept.values())
        return answer

def fresh(seed, names=None):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 31), torch.nn.Linear(31, 4))  # 31: the parts differ in size
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=names))
    return {{"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "rng": {{f"{{rank}}": rank}}}}

def train(state, steps):
    for step in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.full((2, 16), 1.0 + step)).square().sum().backward()
        state["optimizer"].step()

def whole(state):
    moments = [m["exp_avg"] for m in state["optimizer"].state.values()]
    values = [p.full_tensor().detach() for p in [*state["model"].parameters(), *moments]]
    return torch.cat([v.flatten() for v in values])

shim = Keeps()
first = fresh(0)
train(first, 2)
assert WorkerSnapshots(shim, context()).take(first, 2)
checkpoints = Checkpoints(Path("ckpt"))
assert checkpoints.save_now(first, 2)
kept = whole(first)
train(first, 2)
expected = whole(first)
assert not torch.equal(kept, expected)

second = fresh(1)
assert WorkerSnapshots(shim, context()).load(second) == 2
assert torch.equal(whole(second), kept), "from memory"
train(second, 2)
assert torch.equal(whole(second), expected), "it goes on like the first"

third = fresh(2)
assert checkpoints.load(third) == 2
assert torch.equal(whole(third), kept), "from disk"

written = Path("written")
written.mkdir(exist_ok=True)
memories = [(rank, index, fd) for index, fd in shim.kept.items()]
order = WriteOrder("written", 1, "ab", rank, world, [rank], world, memories, (0, 0), False, time.monotonic() + 20)
print(write_out(order, lambda _: ""))
dist.barrier()
path = written / entries(written)[0].name
fourth = fresh(3)
assert load_written(fourth, path, rank, world) == ""
assert torch.equal(whole(fourth), kept), "from what was written out"

other = fresh(4, ("data",))
before = whole(fresh(4))[:100]
assert "no such device mesh" in load_written(other, path, rank, world)
assert torch.equal(torch.cat([p.full_tensor().detach().flatten() for p in other["model"].parameters()])[:100], before)

try:
    WorkerSnapshots(shim, context()).take(first, 4, replicated=True)
except TypeError as error:
    assert "DTensors each rank has its own part" in str(error)
else:
    raise AssertionError("each rank has its own part of it")
checkpoints.close()
dist.barrier()
os.write(1, b"end %d\\n" % rank)  # in one piece
os._exit(0)
"""


def test_one_state_is_right_for_all(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TRAIN.format(root=str(ROOT)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NODEAGENT")} | {"OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*run, "t.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "end" in line) == ["end 0", "end 1"]
