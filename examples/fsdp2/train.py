"""A small transformer by FSDP2 with a hybrid layout, and torch.distributed.checkpoint, as one writes it for torchrun.

The layout follows the number of processes: four are a mesh of 2 copies by 2 shards, two are 2 shards, one has all. A
checkpoint (DCP) holds whole tensors cut in pieces, and each layout reads the pieces that it needs.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH = 12
KEEP = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = 2 if world % 2 == 0 else 1
    kind = "cuda" if cuda else "cpu"
    mesh = init_device_mesh(kind, (world // shards, shards), mesh_dim_names=("copies", "shards"))

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 1)).to(kind)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = 0
    finished = sorted(args.output.glob("step-*/.metadata"))
    if finished:
        folder = finished[-1].parent
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = int(folder.name.removeprefix("step-"))
        print(f"rank {rank} of {tuple(mesh.shape)} goes on after step {step}", flush=True)

    while step < args.steps:
        time.sleep(args.step_delay)
        inputs = torch.randn(GLOBAL_BATCH, 8, 16, generator=torch.Generator().manual_seed(step)).to(kind)
        wanted = inputs.square().mean(-1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs[rank::world]), wanted[rank::world])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1

        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": float(mean) / world, "world": world}) + "\n")
        if step % args.save_every == 0 or step == args.steps:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.output / f"step-{step:06d}")
            if rank == 0:
                for old in sorted(args.output.glob("step-*/.metadata"))[:-KEEP]:
                    shutil.rmtree(old.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
