"""Train on each sample exactly once, whatever happens: exact data, snapshots, checkpoints and a graceful leave.

Kill workers, scale the job, drain nodes: it goes on with the next sample, in the same global batches.

    nodeagentctl run --local 2 --nproc-per-node 2 --checkpoint-dir /tmp/ckpt -- python examples/exact/train.py
    torchrun --nproc-per-node 2 examples/exact/train.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nodeagent.train import Checkpoints, ExactData, Leaving, context, resume, snapshot

SAMPLES, INPUTS = 1000, 16


class Waves:
    """A function to learn; each sample comes with its number, to be written down."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(0))
        self.wanted = self.inputs.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.wanted[index]


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = Waves()
    data = ExactData(len(dataset), global_batch=48, micro_batch=8, rank=rank, world=world, seed=0)
    loader = DataLoader(dataset, batch_sampler=data.sampler, num_workers=args.loader_workers)

    state = {"model": model, "optimizer": optimizer, "data": data}
    checkpoints = Checkpoints()
    resume(state, checkpoints)
    if rank == 0:
        print(f"from step {data.step}, {data.consumed} samples ({context().reason or 'a plain start'})", flush=True)

    def save() -> bool:
        checkpoints.wait()  # an earlier one that is still being written
        checkpoints.save(state, data.step)
        return checkpoints.wait()

    leaving = Leaving()
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    for epoch in range(data.epoch, args.epochs):
        for batch in data.steps(loader):
            if leaving.at(data.step):
                leaving.leave(data.step, save)
            time.sleep(args.step_delay)
            used: list[int] = []
            for micro, (numbers, inputs, wanted) in batch:
                with contextlib.nullcontext() if micro.last else ddp.no_sync():
                    loss = (ddp(inputs.to(device)) - wanted.to(device)).square().mean()
                    (loss * micro.weight).backward()
                used += numbers.tolist() if micro.used else []
            optimizer.step()
            optimizer.zero_grad()
            snapshot(state, data.step, replicated=True)
            if data.step % args.ckpt_every == 0:
                checkpoints.save(state, data.step)
            log_step(args.step_log, data.step, epoch, used)
        if rank == 0:
            print(f"pass {epoch + 1} of {args.epochs}: loss {float(loss):.4f}", flush=True)
    checkpoints.close()


def log_step(path: Path | None, step: int, epoch: int, used: list[int]) -> None:
    if path is None:
        return
    here = {"rank": dist.get_rank(), "world": dist.get_world_size(), "generation": context().generation}
    row = {"step": step, "epoch": epoch, "samples": used, "mono": time.monotonic(), "pid": os.getpid()} | here
    with path.open("a") as file:  # one write of one line: lines of several processes never mix
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a function, using each sample of a pass exactly once.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--ckpt-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that fetch ahead, for each rank")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="slow each step, to watch it")
    parser.add_argument("--step-log", type=Path, help="every rank appends one JSON line per step, with its samples")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
