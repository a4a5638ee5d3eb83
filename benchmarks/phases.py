"""The measurements by name: what is run, how often, and what comes back. Each leaves nothing behind.

Times are in seconds, one number per trial. The recovery table's rows are ``recovery.py``'s.
"""

from __future__ import annotations

import compileall
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodeagent
from benchmarks import floor, leasestart, recovery, rest, speed
from benchmarks.launcher import Shape
from benchmarks.ours import Ours
from benchmarks.recovery import START_TIMEOUT
from benchmarks.steplog import NotReachedError
from benchmarks.torchrun import Torchrun
from nodeagent.local import power
from nodeagent.osutil.linux import stat_fields

WARM_UP = 3.0
"""Seconds of steps before speed is measured."""
Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of each thing is done."""

    share: float = 1.0
    """Of the trials of each row of the recovery table."""
    floors: int = 10
    turns: int = 100
    """Of 0.7 s, when steps per second are measured."""
    rest_window: float = 30.0


QUICK = Effort(0.0, 2, 5, 3.0)

FLAT_OUT = Shape(step_delay=0.0, ckpt_every=100)
NO_JOB = "no job"
WATCHED = "no job, 8 GPUs (a driver that is not real)"
LEASE_PROCESS = "lease process"
PROBES = {"GPU probe": "nodeagent.hardware.probes.nvml", "host probe": "nodeagent.hardware.probes.host"}
"""Kinds of processes, and what their command has in it."""
IDLE = Shape(workers=4, step_delay=1.0)
"""At rest: eight workers that do next to nothing."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One measurement; ``measure`` is given a folder that does not exist yet."""

    text: str
    measure: Callable[[Path, Effort], Results]


def steps_per_second(folder: Path, effort: Effort) -> Results:
    """Undisturbed steps per second, both launchers in turns, torchrun at its defaults; one number per turn."""
    with (
        Torchrun(folder / "torchrun", FLAT_OUT, tuned=False) as torchrun,
        Ours(folder / "nodeagent", FLAT_OUT) as ours,
    ):
        for training in (torchrun, ours):
            training.log.wait(FLAT_OUT.world, START_TIMEOUT, check=training.check)
        time.sleep(WARM_UP)
        rates, bare = speed.in_turns(ours, torchrun, effort.turns)
        for training in (torchrun, ours):
            if len(training.log.gangs()) > 1:
                raise NotReachedError("a gang was re-formed while speed was measured: is the machine overloaded?")
    return {"nodeagent": rates, "torchrun": bare}


def at_rest(folder: Path, effort: Effort) -> Results:
    """Memory and CPU per kind of process: without a job, without but with GPUs to watch, and with eight workers. All
    modules are compiled before, as an installation does it: a lease process that compiles its own is a fifth larger."""
    compileall.compile_dir(Path(nodeagent.__file__).parent, quiet=1)
    out: Results = {}
    for state, gpus in ((NO_JOB, 0), (WATCHED, 8)):
        with Ours(folder / f"{gpus}-gpus", None, gpus=gpus) as ours:
            time.sleep(WARM_UP)
            out[state] = _costs(_kinds(ours), effort)
    with Ours(folder / "nodeagent", IDLE) as ours:
        ours.log.wait(IDLE.world, START_TIMEOUT, check=ours.check)
        time.sleep(WARM_UP)
        out["8 workers"] = _costs(_kinds(ours), effort)
    with Torchrun(folder / "torchrun", IDLE) as torchrun:
        torchrun.log.wait(IDLE.world, START_TIMEOUT, check=torchrun.check)
        time.sleep(WARM_UP)
        out["torchrun, 8 workers"] = _costs({"launcher": torchrun.launcher_pids()}, effort)
    return out


def watching(folder: Path, effort: Effort) -> Results:
    """CPU per kind of process with GPUs to watch and without: both clusters side by side, since the difference is
    smaller than what the machine's speed changes by from one minute to the next."""
    with Ours(folder / "none", None) as bare, Ours(folder / "gpus", None, gpus=8) as watched:
        time.sleep(WARM_UP)
        both = {
            (state, kind): pids
            for state, ours in ((NO_JOB, bare), (WATCHED, watched))
            for kind, pids in _kinds(ours).items()
        }
        costs = rest.measure(both, 2 * effort.rest_window)
    return {
        state: {kind: round(cost.cpu_percent, 4) for (where, kind), cost in costs.items() if where == state}
        for state in (NO_JOB, WATCHED)
    }


def _row(row: recovery.Row) -> Phase:
    return Phase(row.text, lambda folder, effort: recovery.measure(row, folder, effort.share))


PHASES: dict[str, Phase] = {
    "floor": Phase(
        "fork, process group, checkpoint and a step, with nothing around it",
        lambda folder, effort: floor.measure(folder, effort.floors),
    ),
    **{name: _row(row) for name, row in recovery.ROWS.items()},
    "torchrun_default": Phase(
        "torchrun at its defaults, worker killed", lambda folder, _: recovery.default_torchrun(folder)
    ),
    "steps_per_second": Phase("undisturbed steps per second, both launchers in turns", steps_per_second),
    "lease_start": Phase(
        "lease process: from its start to its first grant",
        lambda folder, effort: leasestart.measure(folder, effort.floors),
    ),
    "at_rest": Phase("memory and CPU per kind of process", at_rest),
    "watching": Phase("what it costs to watch 8 GPUs, side by side with a cluster that has none", watching),
}


def _kinds(ours: Ours) -> dict[str, list[int]]:
    """The processes of nodeagent, without the workers: what a node runs, and the store that the cluster shares."""
    status = ours.status()
    kinds = {
        "agent": [node["agent_pid"] for node in status["nodes"]],
        "shim": [],
        "watchdog": [],
        "fork server": [],
        "workers": [],
    }
    if ours.shape is not None:
        for pod in ours.job()["pods"]:
            kinds["shim"].append(pod["shim_pid"])
            kinds["fork server"].append(pod["fork_server_pid"])
            kinds["workers"] += [worker["pid"] for worker in pod["workers"]]
    known = {pid for pids in kinds.values() for pid in pids}
    ours_all = power.processes(ours.cluster().uid)
    kinds["watchdog"] = sorted(pid for pid in ours_all - known if _parent(pid) in kinds["shim"])
    for name, module in {LEASE_PROCESS: "nodeagent.lease", **PROBES}.items():
        kinds[name] = sorted(pid for pid in ours_all - known if module in _command(pid))
        known |= set(kinds[name])
    known |= set(kinds["watchdog"])
    kinds["rendezvous stores, pre-forked workers"] = sorted(ours_all - known)
    kinds["redis (one per cluster)"] = [status["redis"]["pid"]]
    del kinds["workers"]
    return kinds


def _parent(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _costs(kinds: dict[str, list[int]], effort: Effort) -> dict[str, dict[str, float]]:
    return {kind: cost.as_json() for kind, cost in rest.measure(kinds, effort.rest_window).items()}
