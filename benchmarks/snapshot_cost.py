"""What snapshots cost a training: blocks of steps with one snapshot at their end, and without, by turns in one process.

    nodeagentctl run --local 1 --nproc-per-node 2 -- python benchmarks/snapshot_cost.py

Which of two neighbouring blocks has the snapshot is drawn by lot, so that a busy machine disturbs both alike. What
comes of the pairs is ``paired.py``'s; ``--out benchmarks/snapshots.json`` is what the next ``make bench`` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

from nodeagent.train import snapshot

Reported = dict[str, dict[str, list[float]]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Paired cost of snapshots.")
    parser.add_argument("--width", type=int, default=2000, help="of the hidden layer; 2000 is a state of 50 MB")
    parser.add_argument("--batch", type=int, default=512, help="samples of each rank")
    parser.add_argument("--every", type=int, default=10, help="steps of a block")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("snapshot-cost.json"))
    return parser.parse_args()


def measure(args: argparse.Namespace) -> Iterator[Reported]:
    """One number for each block so far, after each pair: its seconds, the CPU seconds of all ranks, the seconds in the
    call, the CPU seconds in the calls."""
    model = torch.nn.Sequential(
        torch.nn.Linear(64, args.width), torch.nn.GELU(), torch.nn.Linear(args.width, args.width)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    state = {"model": model, "optimizer": optimizer}
    inputs = torch.randn(args.batch, 64)
    steps = 0

    def block(take: bool) -> tuple[float, float, float, float]:
        nonlocal steps
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(args.every):
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        steps += args.every
        stepped, called = time.perf_counter(), time.thread_time()
        kept = not take or snapshot(state, steps, replicated=True)
        ended, called = time.perf_counter(), time.thread_time() - called
        if not kept:
            raise SystemExit("no snapshot could be kept: run this under nodeagentctl, on a node with enough memory")
        return ended - began, time.process_time() - cpu, ended - stepped, called

    for _ in range(2):  # the memory is made, the optimizer has its state
        block(True)
    lots = random.Random(0)  # the same on all ranks
    kinds = ("seconds", "cpu", "call", "call_cpu")
    reported: Reported = {"with": {k: [] for k in kinds}, "without": {k: [] for k in kinds}}
    for _ in range(args.pairs):
        for take in lots.sample((True, False), 2):
            took = torch.tensor(block(take), dtype=torch.float64)
            dist.all_reduce(took)
            ranks = dist.get_world_size()
            whole = {"seconds": took[0] / ranks, "cpu": took[1], "call": took[2] / ranks, "call_cpu": took[3]}
            for kind, value in whole.items():
                reported["with" if take else "without"][kind].append(round(float(value), 6))
        yield reported


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    size = 3 * 4 * (65 * args.width + (args.width + 1) * args.width)  # the parameters, and two moments of each
    load = os.getloadavg()[0]
    busy = f"at a load of {load:.0f} on {os.cpu_count()} cores"
    facts = {"load": busy, "state_mb": round(size / 1e6, 1), "ranks": dist.get_world_size(), "every": args.every}
    for reported in measure(args):  # what there is counts, also if it is stopped
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(facts | reported))
    if dist.get_rank() == 0:
        print(f"written: {args.out}; python -m benchmarks.paired {args.out} sums it up")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
