"""A small network by TensorFlow's MultiWorkerMirroredStrategy, which reads TF_CONFIG, in a training loop of its own.

The checkpoint is restored before the first step; the chief (rank 0) keeps it, and the others write theirs where nobody
reads it, since each process has to take part in a save.
"""

import argparse
import json
import os
import time
from pathlib import Path

import tensorflow as tf

GLOBAL_BATCH = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": [""]}, "task": {"index": 0}}'))
    rank, world = task["task"]["index"], len(task["cluster"]["worker"])

    with strategy.scope():
        random = tf.random.Generator.from_seed(0)
        hidden = tf.Variable(random.normal([16, 64]) / 4)
        out = tf.Variable(random.normal([64, 1]) / 8)
        momentum = [tf.Variable(tf.zeros_like(weights)) for weights in (hidden, out)]
        done = tf.Variable(0, dtype=tf.int64)

    checkpoint = tf.train.Checkpoint(hidden=hidden, out=out, momentum=momentum, done=done)
    folder = args.output / "checkpoints"
    # Restores the newest checkpoint. After SIGTERM all processes save after the same step, and end.
    leaving = tf.distribute.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, str(folder))
    mine = folder if rank == 0 else args.output / f"unused-{rank}"
    manager = tf.train.CheckpointManager(checkpoint, str(mine), max_to_keep=2)
    print(f"rank {rank} of {world} begins after step {int(done.numpy())}", flush=True)

    def one_step(inputs, wanted):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            predicted = tf.nn.relu(inputs @ hidden) @ out
            loss = tf.reduce_sum((predicted - wanted) ** 2) / GLOBAL_BATCH
        gradients = tape.gradient(loss, [hidden, out])
        total = tf.distribute.get_replica_context().all_reduce("SUM", [loss, *gradients])
        for weights, speed, gradient in zip((hidden, out), momentum, total[1:], strict=True):
            speed.assign(0.9 * speed + gradient)
            weights.assign_sub(0.01 * speed)
        return total[0]

    @tf.function
    def train_step(inputs, wanted):  # type: ignore[no-untyped-def]
        return strategy.run(one_step, args=(inputs, wanted))

    for step in range(int(done.numpy()), args.steps):
        time.sleep(args.step_delay)
        inputs = tf.random.stateless_normal([GLOBAL_BATCH, 16], seed=[0, step])
        wanted = tf.reduce_mean(inputs**2, 1, keepdims=True)
        loss = train_step(inputs[rank::world], wanted[rank::world])
        done.assign(step + 1)
        if rank == 0:
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step + 1, "loss": float(loss), "world": world}) + "\n")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            manager.save()
        leaving.save_checkpoint_if_preempted()


if __name__ == "__main__":
    main()
