"""The training that both launchers run: data parallel on the CPU, with checkpoint and resume, and a log of steps.

A plain torchrun script that knows nothing of nodeagent, unless ``--helped`` has it use ``nodeagent.train``, which does
nothing under torchrun. It averages gradients and steps by hand: the first use of
``DistributedDataParallel`` or ``torch.optim`` imports torch._dynamo, over a second of CPU in every process that
torchrun starts afresh, so leaving them out favours torchrun.

Each rank appends one JSON line per step to the step log. ``gang`` is a number that rank 0 draws when its process group
is up: two lines with one number are of one gang, whoever launched it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, FEATURES, CLASSES = 32, 64, 10
LEARNING_RATE = 0.05
FOREVER = 10**9
"""Steps: the benchmark ends the run, not the script."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network and log every step.")
    parser.add_argument("--folder", type=Path, required=True, help="of the step log and the checkpoint; shared")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="sleep after each step")
    parser.add_argument("--ckpt-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--helped", action="store_true", help="tell progress, and leave gracefully when asked to")
    return parser.parse_args()


def save(path: Path, step: int, model: nn.Module) -> None:
    """All of it or nothing: a kill at any moment leaves the checkpoint before."""
    buffer = io.BytesIO()
    torch.save({"step": step, "model": model.state_dict()}, buffer)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(buffer.getvalue())
    unfinished.replace(path)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, args.width), nn.ReLU(), nn.Linear(args.width, CLASSES))
    sizes = [parameter.numel() for parameter in model.parameters()]
    checkpoint = args.folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():  # whole whenever it exists; a newer one than a peer's cannot appear: nobody has stepped
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        step = state["step"]
    reported = torch.tensor([time.time_ns(), step])
    dist.broadcast(reported, 0)
    gang, first = int(reported[0]), int(reported[1])
    if step != first:
        raise SystemExit(f"rank {rank} resumes at step {step}, rank 0 at step {first}")

    log = os.open(args.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    who = {
        "gang": gang,
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        "generation": os.environ.get("NODEAGENT_GENERATION"),
    }
    if args.helped:
        from nodeagent.train import progress
        from nodeagent.train.leaving import Leaving

        leaving = Leaving()
    while step < FOREVER:
        if args.helped and leaving.at(step):
            leaving.leave(step, partial(save, checkpoint, step, model) if rank == 0 else lambda: None)
        generator = torch.Generator().manual_seed(step * world + rank)
        images = torch.randn(BATCH, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        gradients = torch.autograd.grad(cross_entropy(model(images), labels), list(model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), flat.split(sizes), strict=True):
                parameter.sub_(gradient.view_as(parameter), alpha=LEARNING_RATE / world)
        step += 1
        line = {"step": step, **who, "mono": time.clock_gettime(time.CLOCK_MONOTONIC)}
        os.write(log, (json.dumps(line) + "\n").encode())
        if args.helped:
            progress(step)
        if rank == 0 and step % args.ckpt_every == 0:
            save(checkpoint, step, model)
        time.sleep(args.step_delay)


if __name__ == "__main__":
    main()
