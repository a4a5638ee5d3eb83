"""A small BERT by Hugging Face's Trainer (and so by accelerate), as one writes it for torchrun.

The one line that makes it go on is the Trainer's own: ``resume_from_checkpoint``. The batch of a process is its part of
GLOBAL_BATCH, so that a step means the same at every number of processes.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

GLOBAL_BATCH = 12
SENTENCES = 240


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen random words each; the label is whether the first two are in order."""

    def __init__(self) -> None:
        self.words = torch.randint(2, 100, (SENTENCES, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[0] < words[1]).long()}


class Metrics(TrainerCallback):
    def __init__(self, file: Path, delay: float) -> None:
        self.file, self.delay = file, delay

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        time.sleep(self.delay)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            with self.file.open("a") as file:
                entry = {"step": state.global_step, "loss": logs["loss"], "world": args.world_size}
                file.write(json.dumps(entry) + "\n")


def newest_checkpoint(output: Path) -> str | None:
    """The newest one that is whole. ``transformers.trainer_utils.get_last_checkpoint`` also takes one that was being
    written when its process was killed, and each start would fail on it; the Trainer writes its state last."""
    whole = [file.parent for file in output.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]))) if whole else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    set_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    unchanging = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **shape, **unchanging))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            save_steps=args.save_every,
            save_total_limit=3,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.05,  # larger ones multiply what differs by rounding between numbers of processes
            lr_scheduler_type="constant",
            average_tokens_across_devices=False,  # counted for losses that are sums; that of this model is a mean
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Sentences(),
        callbacks=[Metrics(args.output / "metrics.jsonl", args.step_delay)],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output))
    trainer.accelerator.end_training()  # ends the process group: with one that is left, torch may abort at exit
    time.sleep(1)  # gloo's thread lets go of the last tensors; torch 2.13 may wait for it forever if it frees the group


if __name__ == "__main__":
    main()
