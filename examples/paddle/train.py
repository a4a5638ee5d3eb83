"""LeNet by Paddle's collective data parallelism, as one writes it for ``paddle.distributed.launch``.

Rank 0 saves each few steps with ``paddle.save``; whoever starts goes on from there. Which images a step sees follows
from its number alone, and all of them together are GLOBAL_BATCH: the losses are the same for 1, 2, 3 or 4 trainers.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.nn.functional import cross_entropy
from paddle.vision.models import LeNet

GLOBAL_BATCH = 12
IMAGES = 240


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()

    noise = np.random.default_rng(0)
    labels = noise.integers(0, 10, IMAGES)
    images = noise.normal(size=(10, 1, 28, 28))[labels] + noise.normal(size=(IMAGES, 1, 28, 28))

    paddle.seed(0)
    model = LeNet()
    optimizer = paddle.optimizer.Momentum(0.005, parameters=model.parameters())
    step = 0
    saved = args.output / "last.pdparams"
    if saved.exists():
        state = paddle.load(str(saved))
        model.set_state_dict(state["model"])
        optimizer.set_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {rank} of {world} goes on after step {step}", flush=True)
    parallel = paddle.DataParallel(model)

    while step < args.steps:
        time.sleep(args.step_delay)
        batch: np.ndarray = (np.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH) % IMAGES
        mine = batch[rank::world]
        loss = cross_entropy(
            parallel(paddle.to_tensor(images[mine], dtype="float32")), paddle.to_tensor(labels[mine], dtype="int64")
        )
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        step += 1

        mean = loss.detach()
        if world > 1:
            dist.all_reduce(mean)
        if rank == 0:
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": float(mean) / world, "world": world}) + "\n")
            if step % args.save_every == 0 or step == args.steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                paddle.save(state, f"{saved}.new")
                Path(f"{saved}.new").replace(saved)
    print(f"done: {step} steps, loss {float(mean) / world:.4f}" if rank == 0 else "done", flush=True)


if __name__ == "__main__":
    main()
