"""A small network by Lightning, as one writes it for torchrun: Lightning knows torchrun's environment by itself.

The one line that makes it go on is Lightning's own: ``ckpt_path="last"``. Checkpoints are made at the end of an epoch,
since Lightning begins an epoch's data anew.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 12
SAMPLES = 60


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.layers(inputs), wanted)
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Metrics(Callback):
    def __init__(self, file: Path, delay: float) -> None:
        self.file, self.delay = file, delay

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.delay)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.logged_metrics["loss"])
            with self.file.open("a") as file:
                entry = {"step": trainer.global_step, "loss": loss, "world": trainer.world_size}
                file.write(json.dumps(entry) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    lightning.seed_everything(0)
    inputs = torch.randn(SAMPLES, 16)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True) / 16)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank)  # one order at any number of processes
    trainer = lightning.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        use_distributed_sampler=False,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=args.steps // (SAMPLES // GLOBAL_BATCH),  # with max_steps it goes on from the wrong epoch
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(dirpath=args.output, save_last=True),
            Metrics(args.output / "metrics.jsonl", args.step_delay),
        ],
    )
    trainer.fit(Net(), DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler), ckpt_path="last")


if __name__ == "__main__":
    main()
