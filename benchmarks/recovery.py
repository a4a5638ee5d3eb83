"""The rows of the recovery table: what is done to a training, how often, and under which launcher.

Times are in seconds, one number per trial, beside the steps that were lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import faults, operations
from benchmarks.faults import EndedError, Trial
from benchmarks.launcher import Launcher, LaunchError, Shape
from benchmarks.ours import Ours
from benchmarks.steplog import NotReachedError
from benchmarks.torchrun import Torchrun

START_TIMEOUT = 120.0
Results = dict[str, Any]

FULL_GANG = Shape()
SHRINKING = Shape(least=1)
GROWING = Shape(most=3, helped=True)
LEAVING = Shape(least=1, helped=True)
SCALING = Shape(nodes=3, least=1, most=3, helped=True)
BORROWING = Shape(nodes=3, least=1, most=3, helped=True, auto=True)
TAKING_TURNS = Shape(nodes=3, least=1, most=3, helped=True, shared=True)
MAKING_ROOM = Shape(helped=True, shared=True)
HANGING = Shape(helped=True, hang=2.0)
"""``helped``: its fourth hang would end a job that shows no progress in between."""

WITH_GPUS = Shape(nodes=4, least=1, most=4, helped=True, gpus=True)

FULL, LEFT = SHRINKING.world, SHRINKING.least * SHRINKING.workers
GROWN = GROWING.most * GROWING.workers
NOT_HERE = "not measured here"
HAS_NONE = "has none"


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, or one wish. ``instead``: why torchrun has no figure."""

    text: str
    shape: Shape
    ours: Callable[[Ours], Trial]
    trials: int
    torchrun: Callable[[Torchrun], Trial] | None = None
    rivals: int = 0
    instead: str = ""


ROWS = {
    "worker_killed": Row(
        "worker `kill -9` → first step of the re-formed gang",
        FULL_GANG,
        lambda t: faults.kill_worker(t, FULL_GANG.world),
        20,
        lambda t: faults.kill_worker(t, FULL_GANG.world),
        5,
    ),
    "empty_pool": Row(
        "the same, no pre-forked worker left",
        FULL_GANG,
        lambda t: faults.kill_worker_again(t, FULL_GANG.world),
        10,
        instead="as above: it forks none ahead",
    ),
    "worker_hung": Row(
        f"worker SIGSTOP → first step, limit {HANGING.hang:g} s",
        HANGING,
        lambda t: operations.hang_worker(t, HANGING.world),
        5,
        instead=NOT_HERE,
    ),
    "node_killed": Row(
        "node killed → first step on the node that is left",
        SHRINKING,
        lambda t: faults.kill_node(t, FULL, LEFT),
        5,
        lambda t: faults.kill_node(t, FULL, LEFT),
        2,
    ),
    "first_node_killed": Row(
        "node of rank 0 and of the rendezvous killed → the same",
        SHRINKING,
        lambda t: operations.lose_first_node(t, FULL, LEFT),
        5,
        lambda t: faults.kill_hosting_node(t, "n1", LEFT),
        1,
    ),
    "agent_killed": Row(
        "agent `kill -9`, started again: training stands still",
        FULL_GANG,
        operations.kill_agent,
        5,
        instead=NOT_HERE,
    ),
    "node_joins": Row(
        "third node joins: training stands still",
        GROWING,
        lambda t: faults.join_node(t, t.next_node(), FULL, GROWN),
        5,
        lambda t: faults.join_node(t, "n3", FULL, GROWN),
        2,
    ),
    "drain": Row(
        "node drained: training stands still",
        LEAVING,
        lambda t: operations.drain(t, FULL, LEFT),
        5,
        lambda t: faults.leave_in_order(t, "n2", t.leave_node, FULL, LEFT),
        2,
    ),
    "scale_down": Row(
        "scaled from 2 nodes to 1: training stands still",
        LEAVING,
        lambda t: operations.scale_down(t, FULL, LEFT),
        5,
        instead=HAS_NONE,
    ),
    "scale_up": Row(
        "scaled from 1 node to 3: training stands still",
        SCALING,
        lambda t: operations.scale_up(t, SCALING.least * SCALING.workers, SCALING.world),
        5,
        instead=HAS_NONE,
    ),
    "give_back": Row(
        "borrowed node given back to a job that comes: training stands still",
        BORROWING,
        lambda t: operations.give_back(t, BORROWING.world, BORROWING.world - BORROWING.workers),
        5,
        instead=HAS_NONE,
    ),
    "shrink": Row(
        "node above its minimum given up to another queue's job: training stands still",
        TAKING_TURNS,
        lambda t: operations.shrink(t, TAKING_TURNS.world, TAKING_TURNS.world - TAKING_TURNS.workers),
        5,
        instead=HAS_NONE,
    ),
    "preempt": Row(
        "another queue's job submitted → it runs, the whole training stopped for it",
        MAKING_ROOM,
        lambda t: operations.preempt(t, MAKING_ROOM.world),
        3,
        instead=HAS_NONE,
    ),
    "gpu_evicted": Row(
        f"Xid 79 on one of {WITH_GPUS.world} GPUs → first step of the gang without it",
        WITH_GPUS,
        lambda t: operations.evict_gpu(t, WITH_GPUS.world),
        5,
        instead=HAS_NONE,
    ),
    "resume": Row(
        "paused job resumed → first step",
        LEAVING,
        lambda t: operations.resume(t, FULL),
        5,
        instead=HAS_NONE,
    ),
}


def measure(row: Row, folder: Path, share: float) -> Results:
    """``share``: of the trials, at least one each."""
    out: Results = {}
    with training("nodeagent", folder / "nodeagent", row.shape) as ours:
        assert isinstance(ours, Ours)
        _trials(out, "nodeagent", row.ours, ours, row.trials, share)
    if row.torchrun is not None:
        with training("torchrun", folder / "torchrun", row.shape) as torchrun:
            assert isinstance(torchrun, Torchrun)
            _trials(out, "torchrun", row.torchrun, torchrun, row.rivals, share)
    return out


def default_torchrun(folder: Path) -> Results:
    """The first row for torchrun at its defaults, once."""
    out: Results = {}
    with training("default", folder / "default", FULL_GANG) as torchrun:
        _trials(out, "default", lambda t: faults.kill_worker_for_good(t, FULL_GANG.world), torchrun, 1, 1)
    return out


@contextmanager
def training(name: str, folder: Path, shape: Shape) -> Iterator[Launcher]:
    """A training that steps, under ``nodeagent``, ``torchrun``, or torchrun at its ``default``."""
    with Ours(folder, shape) if name == "nodeagent" else Torchrun(folder, shape, tuned=name == "torchrun") as launched:
        try:
            launched.log.wait(shape.world, START_TIMEOUT, check=launched.check)
            yield launched
        except NotReachedError as error:
            raise LaunchError(f"{name}: {error}\n{launched.evidence()}") from error


def _trials(
    out: Results, name: str, trial: Callable[[Any], Trial], launched: Launcher, count: int, share: float
) -> None:
    out[name], out[f"{name}_lost"] = [], []
    for _ in range(max(1, round(count * share))):
        try:
            seconds, lost = trial(launched)
        except EndedError as error:
            out[f"{name}_instead"] = str(error)
            print(f"  {name}: {error}", flush=True)
            return
        out[name].append(seconds)
        out[f"{name}_lost"].append(lost)
        print(f"  {name}: {seconds:.3f} s, {lost} steps lost", flush=True)
