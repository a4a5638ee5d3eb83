"""The floor: what a recovery costs with nothing around it. An interpreter that has imported torch forks the workers of
both nodes; each joins its process group, loads the checkpoint and does a step, in ``train.py``'s own words.

``python -m benchmarks.floor --folder FOLDER --trials N`` prints one number of seconds a line: from before the first
fork to the moment when the last rank has done its step. The rendezvous store is there before.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.launcher import PYTHON, LaunchError, Shape
from benchmarks.steplog import StepLog

ADDRESS = "127.0.0.1"
SHAPE = Shape()
TIMEOUT = 60.0
"""Seconds for one trial."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Whatever starts a thread in the template makes its forks unsafe."""


def measure(folder: Path, trials: int) -> dict[str, Any]:
    """In a process of its own: this one must not have imported torch."""
    folder.mkdir(parents=True)
    command = [PYTHON, "-m", "benchmarks.floor", "--folder", str(folder), "--trials", str(trials)]
    done = subprocess.run(
        command,
        env=os.environ | ONE_THREAD | {"RES_OPTIONS": "timeout:1 attempts:1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT * (trials + 1),
        check=False,
    )
    if done.returncode:
        raise LaunchError(f"the floor: exit {done.returncode}: {done.stderr[-2000:]}")
    seconds = [float(line) for line in done.stdout.split()]
    print("  " + ", ".join(f"{value:.3f}" for value in seconds) + " s", flush=True)
    return {"seconds": seconds}


def one(folder: Path, log: StepLog, last: int) -> tuple[float, int]:
    """One trial, and the number of its gang. ``last``: the gang before."""
    port, host = host_store()
    workers: list[int] = []
    at = time.monotonic()
    try:
        for rank in range(SHAPE.world):
            if (pid := os.fork()) == 0:
                become_worker(folder, rank, port)
            workers.append(pid)
        gang = log.wait(SHAPE.world, TIMEOUT, after=last, poll=0.005)
        while not (folder / "checkpoint.pt").exists():  # only the first trial makes one
            time.sleep(0.1)
        return gang.first_step - at, gang.number
    finally:
        for pid in (*workers, host):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def host_store() -> tuple[int, int]:
    """The port and the pid of a rendezvous store that listens."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        from torch.distributed import TCPStore

        store = TCPStore(ADDRESS, 0, None, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        os.close(write)
        while True:
            signal.pause()
    os.close(write)
    with os.fdopen(read) as reported:
        return int(reported.read()), pid


def become_worker(folder: Path, rank: int, port: int) -> None:
    """Run the script; never returns."""
    from benchmarks import train

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(SHAPE.world),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv[:] = SHAPE.command(folder)
    try:
        train.main()
    finally:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The floor of a recovery.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trials", type=int, required=True)
    arguments = parser.parse_args()
    import torch._dynamo
    import torch.distributed
    import torch.optim  # noqa: F401 (as the fork server does: what the script may import is there)

    from benchmarks import train  # noqa: F401

    log, last = StepLog(arguments.folder / "steps.jsonl"), -1
    for trial in range(arguments.trials + 1):
        seconds, last = one(arguments.folder, log, last)
        if trial:  # the first one has no checkpoint to load
            print(f"{seconds:.4f}", flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
