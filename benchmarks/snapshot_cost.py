"""What snapshots cost a training: blocks of steps with one snapshot at their end, and without, by turns in one process.

    nodeagentctl run --local 1 --nproc-per-node 2 -- python benchmarks/snapshot_cost.py

Neighbouring blocks are compared, so that a busy machine disturbs both alike; medians and the middle half are told.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

from nodeagent.train import snapshot


def main() -> None:
    parser = argparse.ArgumentParser(description="Paired cost of snapshots.")
    parser.add_argument("--width", type=int, default=2000, help="of the hidden layer; 2000 is a state of 50 MB")
    parser.add_argument("--batch", type=int, default=512, help="samples of each rank")
    parser.add_argument("--every", type=int, default=10, help="steps of a block")
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), args.width
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    state = {"model": model, "optimizer": optimizer}
    inputs = torch.randn(args.batch, 64)

    def block(take: bool) -> tuple[float, float]:
        """Seconds of the block, and of the snapshot in it."""
        began = time.perf_counter()
        for _ in range(args.every):
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        copied = time.perf_counter()
        kept = not take or snapshot(state, block_steps, replicated=True)
        ended = time.perf_counter()
        assert kept, "no snapshot could be kept: run this under nodeagentctl"
        return ended - began, ended - copied

    block_steps = 0
    for _ in range(2):  # the memory is made, the optimizer has its state
        block(True)
    ratios, costs, plain = [], [], []
    for pair in range(args.pairs):
        block_steps += args.every
        order = (True, False) if pair % 2 else (False, True)
        took = {take: block(take) for take in order}
        ratios.append(took[True][0] / took[False][0] - 1)
        costs.append(took[True][1])
        plain.append(took[False][0] / args.every)
    size = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    if rank == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"state {size / 1e6:.0f} MB, {os.environ['WORLD_SIZE']} ranks, step {statistics.median(plain) * 1e3:.0f} ms"
        )
        print(f"a snapshot takes {statistics.median(costs) * 1e3:.1f} ms (worst {max(costs) * 1e3:.1f})")
        share = statistics.median(costs) / statistics.median(plain) / args.every
        print(f"one each {args.every} steps: {share:.2%} of the steps' time by its own duration")
        print(f"paired blocks: {middle:+.2%} (middle half {low:+.2%} to {high:+.2%})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
