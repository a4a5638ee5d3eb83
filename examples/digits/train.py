"""Learn scikit-learn's handwritten digits with PyTorch DDP, through any number of restarts and changes of size.

A torchrun script: it reads what torchrun sets. Of nodeagent it uses two small helpers, which need no agent: ``Plan``
says which images come next, and ``Leaving`` when to save a last checkpoint (under torchrun: never).

    torchrun --nproc-per-node 2 examples/digits/train.py
    nodeagentctl run --local 2 --nproc-per-node 2 -- python examples/digits/train.py

What makes it elastic is one rule: **the step number and the seed decide everything.** Which images step 137 sees
does not depend on how many processes there are, nor on what happened before, so a checkpoint is only the model, the
optimizer and the step, and a run that was killed, shrunk and grown gives the same losses as one that was left alone.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: see the end of main()
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from nodeagent.train import Leaving, Plan

GLOBAL_BATCH = 96
"""Images per step, over all processes together. Fixed, so that a step means the same at every world size."""
TEST_IMAGES = 360
KEEP_CHECKPOINTS = 3
PRINT_EVERY = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn handwritten digits with DDP, with checkpoint and resume.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-accuracy", type=float, default=0.97, help="exit 1 if the test set is below it")
    parser.add_argument(
        "--ckpt-dir",
        type=Path,
        default=Path(os.environ.get("NODEAGENT_CHECKPOINT_DIR") or "ckpt"),
        help="shared by all nodes (default: $NODEAGENT_CHECKPOINT_DIR, else ./ckpt)",
    )
    parser.add_argument("--ckpt-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="slow each step, to watch it")
    parser.add_argument("--bit-exact", action="store_true", help="the same bits whatever restarts, at one world size")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long a process waits for the others in a step, before it gives up (default: torch's, 30 minutes)",
    )
    parser.add_argument("--step-log", type=Path, help="every rank appends one JSON line per step to this file")
    return parser.parse_args()


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All 1797 images (8x8, scaled to 0..1) and their labels.

    Reads the file that scikit-learn bundles without importing scikit-learn, which would cost every start a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        sys.exit("scikit-learn is not installed, and the digits come with it: pip install scikit-learn")
    rows = gzip.decompress((Path(package.origin).parent / "datasets/data/digits.csv.gz").read_bytes())
    table = torch.tensor(bytearray(map(int, rows.replace(b"\n", b",").strip(b",").split(b",")))).reshape(-1, 65)
    # float64: sums over 1, 2 or 8 processes round differently, and this keeps it invisible however long the run.
    return table[:, :64].to(torch.float64) / 16, table[:, 64].long()


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a crash at any moment leaves under its name either all of it or nothing.

    Four bytes of checksum follow it: torch.load does not mind them, and does not notice a flipped bit by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    unfinished = folder / f"step-{state['step']:08d}.{time.time_ns()}.tmp"
    try:
        with unfinished.open("wb") as file:
            file.write(buffer.getvalue() + zlib.crc32(buffer.getvalue()).to_bytes(4, "big"))
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk, say: what is there of it would take the room of the next one
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(folder / f"step-{state['step']:08d}.pt")
    outdated = sorted(folder.glob("step-*.pt"))[:-KEEP_CHECKPOINTS]
    for path in [*outdated, *folder.glob("step-*.tmp")]:  # a .tmp is what a killed process left
        path.unlink(missing_ok=True)


def load_latest_checkpoint(folder: Path, *, report: bool) -> dict[str, Any] | None:
    """The newest whole checkpoint, or None. A torn one (a full disk, one that lied about fsync) is passed over."""
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        content = path.read_bytes()
        if zlib.crc32(content[:-4]).to_bytes(4, "big") == content[-4:]:
            state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return state
        if report:
            print(f"skipped {path}: it is torn", flush=True)
    return None


def must_agree(value: int, what: str, device: torch.device) -> None:
    """End this process unless all ranks hold the same value: going on would train several models at once."""
    bounds = torch.tensor([value, -value], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
    lowest, highest = int(bounds[0]), -int(bounds[1])
    if lowest != highest:
        sys.exit(f"the ranks disagree on {what} (this one: {value}, lowest: {lowest}, highest: {highest})")


class StepLog:
    """One JSON line per step and rank. O_APPEND and a single write: lines of several processes never mix."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        generation = os.environ.get("NODEAGENT_GENERATION")
        self.who = {
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "generation": int(generation) if generation else None,
            "pid": os.getpid(),
        }

    def append(self, step: int, loss: float) -> None:
        now = {"t": time.time(), "mono": time.clock_gettime(time.CLOCK_MONOTONIC)}
        os.write(self.file, (json.dumps({"step": step, "loss": loss, **self.who, **now}) + "\n").encode())


def train_model(args: argparse.Namespace, device: torch.device) -> float:
    """Train from the latest checkpoint, or from the start, to the last step; returns the accuracy on the test set."""
    rank, world = dist.get_rank(), dist.get_world_size()

    images, labels = (part.to(device) for part in load_digits())
    split = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the same test set for any seed
    test, train = split[:TEST_IMAGES].to(device), split[TEST_IMAGES:].to(device)

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.5)

    step = 0
    checkpoint = load_latest_checkpoint(args.ckpt_dir, report=rank == 0)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
        if rank == 0:
            print(f"resumed from step {step} (generation {os.environ.get('NODEAGENT_GENERATION', '-')})", flush=True)
    must_agree(step, f"the latest checkpoint: is {args.ckpt_dir} one folder for all of them?", device)

    # After its first step DDP sorts its gradient buckets anew, and with them the order in which more than two ranks add
    # up: the first step after a restart would differ in the last bit. With this it never sorts.
    devices = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, find_unused_parameters=args.bit_exact)
    step_log = StepLog(args.step_log) if args.step_log else None
    plan = Plan(len(train), GLOBAL_BATCH, args.seed)
    leaving = Leaving()

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(images[test]).argmax(1) == labels[test]).double().mean())

    def save() -> None:
        if rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(args.ckpt_dir, state)

    while step < args.steps:
        if leaving.at(step):  # a planned stop: all ranks are here, after the same step
            leaving.leave(step, save)
        time.sleep(args.step_delay)
        (share,) = plan.share(plan.batch(plan.consumed_at(step)), rank, world)
        mine = train[torch.tensor(share.indices, device=device)]
        loss_sum = cross_entropy(ddp(images[mine]), labels[mine], reduction="sum")
        optimizer.zero_grad()
        # DDP averages gradients over the ranks: with this factor that is the mean over all images of the step.
        (loss_sum * share.of_sum).backward()
        optimizer.step()
        step += 1

        dist.all_reduce(loss := loss_sum.detach() * share.of_sum / world)
        if step_log:
            step_log.append(step, float(loss))
        if step % args.ckpt_every == 0 or step == args.steps:
            save()
        if rank == 0 and (step % PRINT_EVERY == 0 or step == args.steps):
            print(f"step {step}/{args.steps} loss {loss:.4f} acc {accuracy():.4f} world {world}", flush=True)
    return accuracy()


def main() -> None:
    args = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    patience = timedelta(seconds=args.timeout) if args.timeout else None
    dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    reached = train_model(args, device)
    if dist.get_rank() == 0:
        print(f"test accuracy {reached:.4f} (target {args.target_accuracy})", flush=True)
    # The group must end here, and nothing else may hold it: ended by DDP or by Python's own end it can hang or abort,
    # since its thread may need Python's lock (torch 2.13). DDP is gone with train_model. torch.distributed.nn, which
    # DDP imports, keeps a group that exists at its import in default arguments, so it is imported before there is one.
    dist.destroy_process_group()
    sys.exit(0 if reached >= args.target_accuracy else 1)


if __name__ == "__main__":
    main()
