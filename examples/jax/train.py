"""Linear regression by JAX on several processes: one array over all of them, one jitted step.

JAX finds the coordinator by itself (JAX_COORDINATOR_ADDRESS); how many processes there are, and which one this is, it
is told. At a planned stop it saves, and all processes leave after the same step: JAX's own preemption service.
"""

import argparse
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

GLOBAL_BATCH = 12
WIDTH = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--output", type=Path, default=os.environ.get("NODEAGENT_CHECKPOINT_DIR", "output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        jax.distributed.initialize(num_processes=world, process_id=int(os.environ["RANK"]))
    rank = jax.process_index()
    mesh = Mesh(jax.devices(), "data")
    split, copied = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    optimizer = optax.adam(1e-2)

    @jax.jit
    def train_step(weights, moments, inputs, wanted):  # type: ignore[no-untyped-def]
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((inputs @ w - wanted) ** 2))(weights)
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(weights, updates), moments, loss

    step = 0
    weights: np.ndarray | jax.Array = np.zeros(WIDTH, np.float32)
    moments = optimizer.init(weights)
    saved = args.output / "last.npz"
    if saved.exists():
        with np.load(saved) as state:
            step, weights = int(state["step"]), state["weights"]
            leaves = [state[f"moment{n}"] for n in range(len(jax.tree.leaves(moments)))]
        moments = jax.tree.unflatten(jax.tree.structure(moments), leaves)
        print(f"rank {rank} of {world} goes on after step {step}", flush=True)
    weights, moments = jax.device_put((weights, moments), copied)

    def save() -> None:
        if rank == 0:
            leaves = {f"moment{n}": np.asarray(leaf) for n, leaf in enumerate(jax.tree.leaves(moments))}
            with saved.with_suffix(".new").open("wb") as file:
                np.savez(file, step=step, weights=np.asarray(weights), **leaves)
            saved.with_suffix(".new").replace(saved)

    while step < args.steps:
        time.sleep(args.step_delay)
        inputs = np.random.default_rng(step).normal(size=(GLOBAL_BATCH, WIDTH)).astype(np.float32)
        wanted = inputs @ np.arange(WIDTH, dtype=np.float32)
        part = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        batch = [jax.make_array_from_process_local_data(split, whole[part]) for whole in (inputs, wanted)]
        weights, moments, loss = train_step(weights, moments, *batch)
        step += 1
        if rank == 0:
            with (args.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": float(loss), "world": world}) + "\n")
        if step % args.save_every == 0 or step == args.steps:
            save()
        if world > 1 and multihost_utils.reached_preemption_sync_point(step):
            save()
            print(f"rank {rank} leaves after step {step}", flush=True)
            break


if __name__ == "__main__":
    main()
