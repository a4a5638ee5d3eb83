"""Linear regression by MindSpore on several CPUs: each worker has a part of the batch, gradients are averaged.

MindSpore finds its scheduler by itself (MS_SCHED_HOST, MS_SCHED_PORT), and the scheduler is this same script with the
role MS_SCHED, as msrun does it. At a planned stop (SIGTERM) rank 0 saves, and all ranks leave after the same step; what
nodeagent left out of the gang as faulty is printed at the next start.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

GLOBAL_BATCH = 12
WIDTH = 16
LEAVES = 101
"""Of a worker that has saved and has left: no fault."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rank, world = 0, 1
    scheduler = os.environ.get("MS_ROLE") == "MS_SCHED"
    if scheduler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it has nothing to save
    if scheduler or int(os.environ.get("MS_WORKER_NUM", "1")) > 1:
        init()  # of the scheduler it does not return
        rank, world = get_rank(), get_group_size()
    total = ops.AllReduce() if world > 1 else ops.identity

    model = nn.Dense(WIDTH, 1, weight_init="zeros", bias_init="zeros")
    optimizer = nn.Adam(model.trainable_params(), learning_rate=1e-2)
    loss_of = nn.MSELoss()
    forward = ms.value_and_grad(lambda x, y: loss_of(model(x), y), None, model.trainable_params())

    step, saved = 0, args.output / "last.ckpt"
    if saved.exists():
        state = ms.load_checkpoint(str(saved))
        step = int(state.pop("step").asnumpy())
        ms.load_param_into_net(model, state)
        ms.load_param_into_net(optimizer, state)
        faulty = json.loads(os.environ.get("NODEAGENT_FAULTY", "{}"))
        print(f"rank {rank} of {world} goes on after step {step}; left out as faulty: {faulty}", flush=True)

    def save() -> None:
        if rank == 0:
            new = args.output / "new.ckpt"
            parameters = [{"name": p.name, "data": p} for p in (*model.get_parameters(), *optimizer.get_parameters())]
            ms.save_checkpoint(list({p["name"]: p for p in parameters}.values()), str(new), append_dict={"step": step})
            new.replace(saved)

    while step < args.steps:
        time.sleep(args.step_delay)
        inputs = np.random.default_rng(step).normal(size=(GLOBAL_BATCH, WIDTH)).astype(np.float32)
        wanted = (inputs @ np.arange(WIDTH, dtype=np.float32))[:, None]
        part = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        loss, gradients = forward(ms.Tensor(inputs[part]), ms.Tensor(wanted[part]))
        optimizer(tuple(total(gradient) / world for gradient in gradients))
        mean, leaves = (float(total(ms.Tensor(x, ms.float32)).asnumpy()) for x in (loss / world, float(bool(asked))))
        step += 1
        if rank == 0:
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": mean, "world": world}) + "\n")
        if step % args.save_every == 0 or step == args.steps or leaves:
            save()
        if leaves:  # somebody was asked to: all see it after the same step
            print(f"rank {rank} leaves after step {step}", flush=True)
            sys.exit(LEAVES)


if __name__ == "__main__":
    main()
