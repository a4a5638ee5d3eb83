"""Train and lose nothing: each sample of each pass is used exactly once, whatever is killed, scaled, drained or paused.

All that ``nodeagent.train`` has for it, to be copied: exact data, snapshots in memory, checkpoints on disk, and leaving
at a planned stop. Replace the data, the model and the loss by yours. Under torchrun it goes on from its checkpoints.

    nodeagentctl run --local 2 --nproc-per-node 2 --checkpoint-dir /tmp/exact -- python examples/exact/train.py
    torchrun --nproc-per-node 2 examples/exact/train.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: see examples/digits
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nodeagent.train import Checkpoints, ExactData, Leaving, resume, snapshot

SAMPLES = 2000
GLOBAL_BATCH = 96
"""Samples of a step, over all processes together, however many these are."""
MICRO_BATCH = 16
"""Samples that fit into one process at once."""
SNAPSHOT_EVERY, CHECKPOINT_EVERY = 5, 50
"""Steps. A snapshot is all that the death of a worker or a node costs; a checkpoint outlives all nodes."""


def train_model(passes: int, step_delay: float, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 16)
    dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    data = ExactData(SAMPLES, GLOBAL_BATCH, micro_batch=MICRO_BATCH, rank=rank, world=world, seed=0)

    # All that training goes on from, the position in the data too. Resume before DDP and before the loader begins.
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data}
    checkpoints = Checkpoints()
    resume(state, checkpoints)
    if rank == 0:
        print(f"from step {data.step}, {data.consumed} samples used, {world} processes", flush=True)

    loader = DataLoader(dataset, batch_sampler=data.sampler, num_workers=1)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    leaving = Leaving()
    while data.epoch < passes:
        for step in data.steps(loader):
            if leaving.at(data.step):  # a planned stop: all ranks are here, after the same step
                leaving.leave(data.step, partial(checkpoints.save_now, state, data.step))
            time.sleep(step_delay)
            for micro, (x, y) in step:
                with contextlib.nullcontext() if micro.last else ddp.no_sync():
                    loss = mse_loss(ddp(x.to(device)), y.to(device))
                    (loss * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if data.step % SNAPSHOT_EVERY == 0:
                snapshot(state, data.step, replicated=True)
            if data.step % CHECKPOINT_EVERY == 0:
                checkpoints.save(state, data.step)
        if rank == 0:
            print(f"pass {data.epoch} of {passes} is over, step {data.step}, loss {loss.item():.4f}", flush=True)
    checkpoints.save_now(state, data.step)
    checkpoints.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a function, using each sample of each pass exactly once.")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="slow each step, to watch it")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train_model(args.passes, args.step_delay, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
