"""Train with ``nodeagent.train``: a snapshot in memory every few steps, a checkpoint on disk now and then.

Under nodeagent a worker that is killed costs at most ``--snapshot-every`` steps and no disk is read; under torchrun the
same script goes on from its checkpoints.

    torchrun --nproc-per-node 2 examples/snapshots/train.py
    nodeagentctl run --local 2 --nproc-per-node 2 --checkpoint-dir /tmp/ckpt -- python examples/snapshots/train.py

As in the other examples, the step number and the seed decide everything: the losses do not depend on what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists, as in ../tiny_gpt
from torch.nn.parallel import DistributedDataParallel

from nodeagent.train import Checkpoints, Leaving, context, resume, snapshot

BATCH = 24
"""Samples per step, over all processes together."""
INPUTS = 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn a random function, losing next to nothing when killed.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256, help="of the hidden layers; 2000 makes a state of 50 MB")
    parser.add_argument("--snapshot-every", type=int, default=1, metavar="STEPS", help="0: never")
    parser.add_argument("--ckpt-every", type=int, default=100, metavar="STEPS", help="0: never")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="slow each step, to watch it")
    parser.add_argument("--step-log", type=Path, help="every rank appends one JSON line per step to this file")
    return parser.parse_args()


def batch_of(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a batch that the step alone decides."""
    inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))[rank::world]
    return inputs, inputs.sin().sum(1, keepdim=True)


def train_model(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    width = args.width
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU(),
        torch.nn.Linear(width, 1),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model, "optimizer": optimizer}
    checkpoints = Checkpoints()
    step = resume(state, checkpoints)
    if rank == 0:
        print(f"from step {step} ({context().reason or 'a plain start'})", flush=True)

    leaving = Leaving()
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    while step < args.steps:
        if leaving.at(step):
            leaving.leave(step, partial(checkpoints.save_now, state, step))
        time.sleep(args.step_delay)
        inputs, wanted = batch_of(step, rank, world)
        loss = (ddp(inputs.to(device)) - wanted.to(device)).square().sum() * (world / BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if args.snapshot_every and step % args.snapshot_every == 0:
            snapshot(state, step, replicated=True)
        if args.ckpt_every and step % args.ckpt_every == 0:
            checkpoints.save(state, step)
        log_step(args.step_log, step, rank, world)
        if rank == 0 and step % 50 == 0:
            print(f"step {step}/{args.steps} loss {float(loss):.4f}", flush=True)
    checkpoints.close()


def log_step(path: Path | None, step: int, rank: int, world: int) -> None:
    if path is None:
        return
    row = {"step": step, "rank": rank, "world": world, "generation": context().generation, "pid": os.getpid()}
    now = {"t": time.time(), "mono": time.clock_gettime(time.CLOCK_MONOTONIC)}
    with path.open("a") as file:  # one write of one line: lines of several processes never mix
        file.write(json.dumps(row | now) + "\n")


def main() -> None:
    args = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train_model(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
