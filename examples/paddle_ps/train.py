"""Wide and deep click prediction on Paddle's parameter servers, as one writes it for ``paddle.distributed.launch``.

The same script is a server or a trainer, as TRAINING_ROLE says. The embeddings are a sparse table on the servers. Each
few steps all of it is saved; whoever starts goes on from there.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed import fleet

BATCH = 32
SLOTS = 4
"""Categorical features of a sample."""
WORDS = 1000
"""Values of each of them."""
DENSE = 8
"""Numerical features."""
FILES = 4
KEPT = 2
"""Checkpoints."""


def network() -> paddle.static.Variable:
    """The loss."""
    dense = paddle.static.data("dense", [None, DENSE], "float32")
    slots = [paddle.static.data(f"slot{number}", [None, 1], "int64") for number in range(SLOTS)]
    click = paddle.static.data("click", [None, 1], "float32")
    start = paddle.nn.initializer.Uniform(-0.1, 0.1)
    table = paddle.ParamAttr(name="embedding", initializer=start)
    words = [paddle.static.nn.sparse_embedding(slot, size=[SLOTS * WORDS, 8], param_attr=table) for slot in slots]
    deep = paddle.concat([*(paddle.reshape(word, [-1, 8]) for word in words), dense], axis=1)
    for width in (32, 16):
        deep = paddle.static.nn.fc(deep, width, activation="relu")
    wide = paddle.static.nn.fc(dense, 1)
    score = paddle.static.nn.fc(deep, 1) + wide
    return paddle.nn.functional.binary_cross_entropy_with_logits(score, click)


def batch(step: int, trainer: int) -> dict[str, np.ndarray]:
    """Made up: some values of each feature are clicked more often than others."""
    random = np.random.default_rng([step, trainer])
    dense = random.normal(size=(BATCH, DENSE)).astype("float32")
    values = random.integers(0, WORDS, (SLOTS, BATCH, 1))
    likely = dense[:, :1] + (values % 2).sum(0) - SLOTS / 2
    click = (likely > random.normal(scale=0.3, size=(BATCH, 1))).astype("float32")
    slots = {f"slot{number}": values[number] + number * WORDS for number in range(SLOTS)}
    return {"dense": dense, **slots, "click": click}


def newest(output: Path) -> Path | None:
    """The last checkpoint that is whole."""
    whole = sorted(output.glob("step-*/whole"))
    return whole[-1].parent if whole else None


def serve(output: Path) -> None:
    """Until the trainers stop the servers, or the launcher does."""
    found = newest(output)
    fleet.init_server(str(found / "tables")) if found else fleet.init_server()
    print(f"server {fleet.server_index()} of {fleet.server_num()} begins with {found or 'nothing'}", flush=True)
    fleet.run_server()


def train(args: argparse.Namespace, loss: paddle.static.Variable) -> None:
    exe = paddle.static.Executor(paddle.CPUPlace())
    program, trainer = paddle.static.default_main_program(), fleet.worker_index()
    exe.run(paddle.static.default_startup_program())
    step, found = 0, newest(args.output)
    if found:
        step = int(found.name.removeprefix("step-"))
        dense = [variable for variable in program.all_parameters() if variable.name != "embedding"]
        if trainer == 0:  # it gives the servers the weights that are no table
            paddle.static.load_vars(exe, str(found), program, vars=dense, filename="dense")
        print(f"trainer {trainer} of {fleet.worker_num()} goes on after step {step}", flush=True)
    fleet.init_worker()

    while step < args.steps:
        time.sleep(args.step_delay)
        (value,) = exe.run(program, feed=batch(step, trainer), fetch_list=[loss])
        step += 1
        if trainer == 0:
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": float(value), "world": fleet.worker_num()}) + "\n")
        if step % args.save_every == 0 or step == args.steps:
            save(exe, program, args.output, step, first=trainer == 0)
    if trainer == 0:
        print(f"done: {step} steps, loss {float(value):.4f}", flush=True)
    fleet.stop_worker()


def save(exe: paddle.static.Executor, program: paddle.static.Program, output: Path, step: int, first: bool) -> None:
    """All trainers take part."""
    folder = output / f"step-{step:06d}"
    if first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    fleet.save_persistables(exe, str(folder / "tables"))
    fleet.save_dense_params(exe, str(folder / "dense"), paddle.static.global_scope(), program)
    if first:
        (folder / "whole").touch()
        for old in sorted(output.glob("step-*/whole"))[:-KEPT]:
            shutil.rmtree(old.parent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    paddle.enable_static()
    paddle.seed(0)
    fleet.init(is_collective=False)
    loss = network()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    # Each server saves so many files of the table, each with a gzip of its own; Paddle's 1000 take a minute.
    strategy.sparse_table_configs = {"embedding": {"table_parameters.embedding.shard_num": FILES}}
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
    if fleet.is_server():
        serve(args.output)
    else:
        train(args, loss)


if __name__ == "__main__":
    main()
