"""Teach a small transformer to write Python, from the standard library's own source, with PyTorch DDP.

A plain torchrun script: it reads what torchrun sets and knows nothing of nodeagent.

    torchrun --nproc-per-node 2 examples/tiny_gpt/train.py
    nodeagentctl run --local 2 --nproc-per-node 2 -- python examples/tiny_gpt/train.py

What makes it elastic is one rule: **the step number and the seed decide everything.** Which pieces of text step 137
sees does not depend on how many processes there are, nor on what happened before, so a checkpoint is only the model,
the optimizer and the step, and a run that was killed, shrunk and grown gives the same losses as one left alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: see the end of main()
from torch import nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 24
"""Pieces of text per step, over all processes together. Fixed, so that a step means the same at every world size."""
CONTEXT = 64
"""Bytes the model sees at once: a piece is these and the one that follows."""
TEXT_BYTES = 1_000_000
HELD_OUT_PIECES = 240
"""Pieces the model never learns from, spread over the whole text: its loss on them is the one that counts."""
WIDTH, HEADS, LAYERS = 64, 4, 2
KEEP_CHECKPOINTS = 3
PRINT_EVERY = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn Python's source text with DDP, with checkpoint and resume.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-loss", type=float, default=1.8, help="exit 1 if the held-out text's is above it")
    parser.add_argument(
        "--ckpt-dir",
        type=Path,
        default=Path(os.environ.get("NODEAGENT_CHECKPOINT_DIR") or "ckpt"),
        help="shared by all nodes (default: $NODEAGENT_CHECKPOINT_DIR, else ./ckpt)",
    )
    parser.add_argument("--ckpt-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="slow each step, to watch it")
    parser.add_argument("--step-log", type=Path, help="every rank appends one JSON line per step to this file")
    return parser.parse_args()


def load_text() -> bytes:
    """The first megabyte of the standard library's modules, in the order of their names. No download needed."""
    text = b""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):  # generated, and different on each machine
            text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            return text[:TEXT_BYTES]
    sys.exit(f"the standard library's source is missing, or a part of it: {folder} has only {len(text)} bytes")


class Block(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Attention to the bytes before, then a small network on each byte; both add to what flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces, length, _ = x.shape
        parts = self.query_key_value(self.norm1(x)).view(pieces, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(pieces, length, WIDTH))
        return x + self.think(self.norm2(x))


class TinyGPT(nn.Module):  # type: ignore[misc]
    """Bytes in, for each the scores of the byte that comes next out."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.byte(text) + self.place.weight[: text.shape[1]]
        return self.scores(self.norm(self.blocks(x)))


def loss_sum_of(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    """The loss of each piece (its mean over the bytes, in nats), summed over the pieces."""
    scores = model(pieces[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten(), reduction="sum") / CONTEXT


def batch_of(step: int, rank: int, world: int, *, pieces: int, seed: int) -> torch.Tensor:
    """Which pieces this rank sees in this step: its share of a batch that the step and the seed alone decide."""
    epoch, batch = divmod(step, pieces // GLOBAL_BATCH)
    order = torch.randperm(pieces, generator=torch.Generator().manual_seed(seed + epoch))
    return order[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH][rank::world]


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
    """Train from the latest checkpoint, or from the start, to the last step; returns the loss on the held-out text."""
    rank, world = dist.get_rank(), dist.get_world_size()

    text = load_text()
    must_agree(zlib.crc32(text), "the text: does every node run the same version of Python?", device)
    everything = torch.tensor(bytearray(text)).long()
    everything = everything[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).to(device)
    every_nth = torch.arange(len(everything), device=device) % (len(everything) // HELD_OUT_PIECES) == 0
    held_out, train = everything[every_nth], everything[~every_nth]

    torch.manual_seed(args.seed)
    # float64: sums over 1, 2 or 8 processes round differently, and this keeps it invisible however long the run.
    model = TinyGPT().to(device, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    step = 0
    checkpoint = load_latest_checkpoint(args.ckpt_dir, report=rank == 0)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
        if rank == 0:
            print(f"resumed from step {step} (generation {os.environ.get('NODEAGENT_GENERATION', '-')})", flush=True)
    must_agree(step, f"the latest checkpoint: is {args.ckpt_dir} one folder for all of them?", device)

    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    step_log = StepLog(args.step_log) if args.step_log else None

    while step < args.steps:
        time.sleep(args.step_delay)
        mine = batch_of(step, rank, world, pieces=len(train), seed=args.seed)
        loss_sum = loss_sum_of(ddp, train[mine.to(device)])
        optimizer.zero_grad()
        # DDP averages gradients over the ranks; times world, over the global batch, makes it the mean over all pieces.
        (loss_sum * (world / GLOBAL_BATCH)).backward()
        optimizer.step()
        step += 1

        dist.all_reduce(loss := loss_sum.detach())
        loss /= GLOBAL_BATCH
        if step_log:
            step_log.append(step, float(loss))
        if rank == 0 and (step % args.ckpt_every == 0 or step == args.steps):
            save_checkpoint(
                args.ckpt_dir, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
        if rank == 0 and (step % PRINT_EVERY == 0 or step == args.steps):
            print(f"step {step}/{args.steps} loss {loss:.4f} world {world}", flush=True)

    with torch.no_grad():  # each rank its share
        dist.all_reduce(total := loss_sum_of(model, held_out[rank::world]))
    return float(total) / len(held_out)


def main() -> None:
    args = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    reached = train_model(args, device)
    if dist.get_rank() == 0:
        print(f"held-out loss {reached:.4f} (target {args.target_loss})", flush=True)
    # The group must end here, and nothing else may hold it: ended by DDP or by Python's own end it can hang or abort,
    # since its thread may need Python's lock (torch 2.13). DDP is gone with train_model. torch.distributed.nn, which
    # DDP imports, keeps a group that exists at its import in default arguments, so it is imported before there is one.
    dist.destroy_process_group()
    sys.exit(0 if reached <= args.target_loss else 1)


if __name__ == "__main__":
    main()
