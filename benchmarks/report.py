"""The results as Markdown: ``docs/benchmarks.md``, and what is printed. Measures nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import paired
from benchmarks.goals import LEASE, judged, speed_ratio, times_faster
from benchmarks.launcher import PYTHON, TRAIN, Shape
from benchmarks.ours import job_file
from benchmarks.phases import FLAT_OUT, FULL_GANG, GROWING, IDLE, SHRINKING
from benchmarks.speed import TURN, ratios
from benchmarks.torchrun import ENVIRONMENT, rendezvous_arguments

Results = dict[str, Any]
SNAPSHOTS = Path(__file__).with_name("snapshots.json")
"""The results of ``snapshot_cost.py``, which is run apart."""

RECOVERY = {
    "worker_killed": "worker `kill -9` → first step of the re-formed gang",
    "node_killed": "node killed → first step on the node that is left",
    "node_joins": "third node joins: training stands still",
}

METHOD = f"""\
## Method

- One run, one machine, one script ([`benchmarks/train.py`](../benchmarks/train.py)) under both launchers: a small
  network, {FULL_GANG.nodes} nodes of {FULL_GANG.workers} workers, gloo, a checkpoint every {FULL_GANG.ckpt_every}
  steps. What travels to another machine are the ratios.
- Each rank logs each step with the monotonic clock. "First step" is the moment when the *last* rank of the new gang
  has done one, so process start, rendezvous, process group and checkpoint are all inside.
- **Worker killed:** SIGKILL to a random worker, rank 0 included, after 2 to 3 s of undisturbed steps, with a pause of
  {FULL_GANG.step_delay * 1000:.0f} ms after each step.
- **Node killed:** all processes of a node (launcher or agent, shim, workers) are stopped and killed at once; the clock
  starts before the first signal. nodeagent loses either node; torchrun only the one that does not host its rendezvous
  store, since its job is dead otherwise. nodeagent's figure holds its lease ({LEASE:g} s by default), torchrun's its
  keep-alive, tuned to 3 s.
- **Third node joins:** the longest pause between two steps of rank 0 around the join, less a normal step. nodeagent's
  local clusters wait 5 s before a newcomer is let in (30 s elsewhere), while training goes on.
- **Steps per second:** no sleep between steps, a checkpoint every {FLAT_OUT.ckpt_every}. Both trainings are up and step
  in turns of {TURN:g} s, while everything of the other one (launchers, agents, Redis) is frozen, so that the machine's
  noise strikes both alike. torchrun runs at its defaults here. Each turn of nodeagent's is compared with torchrun's
  before and after it; the noise of the median is 1.57 times the width of the middle half over the root of the number
  of turns, as in a notched box plot.
- **At rest:** PSS (shared pages shared out) and CPU time from `/proc`, per process; the workers sleep
  {IDLE.step_delay:g} s per step.
- torchrun is given its best known settings: a fixed number of nodes where it may (then no `last_call` wait), else a
  last call of 1 s; a short keep-alive and monitor interval; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which
  torch 2.13 does not recover with gloo at all. The script avoids `DistributedDataParallel` and `torch.optim`, which
  would cost torchrun's fresh interpreters over a second of CPU each.

## What this does not show

GPUs and NCCL; real networks, where a dead node's sockets stay silent instead of closing; more than three nodes; large
state, whose loading then outweighs the restart. Here all nodes share one machine's cores, which slows torchrun's
imports most.
"""


def markdown(results: Results) -> str:
    """The whole document."""
    head = results["machine"]
    facts = [f"- {key}: {head[key]}" for key in ("date", "machine", "system", "versions", "load")]
    parts = [
        "# Benchmarks\n",
        "Written by `make bench`; do not edit. The figures of each trial are in "
        "[`benchmarks/results.json`](../benchmarks/results.json).\n",
        "\n".join(facts) + "\n",
        tables(results),
        METHOD,
        commands(),
        paired.section(json.loads(SNAPSHOTS.read_text())),
    ]
    return "\n".join(parts)


def tables(results: Results) -> str:
    """All tables, of the phases that have run."""
    parts = []
    faults = [_recovery_row(results, phase, text) for phase, text in RECOVERY.items() if phase in results]
    if faults:
        titles = (
            "",
            "nodeagent: median",
            "min / p95 / max",
            "trials",
            "torchrun: median",
            "min / max",
            "trials",
            "ratio",
        )
        parts.append("## Recovery (seconds)\n\n" + _table(titles, faults))
    if "steps_per_second" in results:
        rates = results["steps_per_second"]
        compared = ratios(rates["nodeagent"], rates["torchrun"])
        low, _, high = statistics.quantiles(compared, n=4)
        row = (
            f"{statistics.median(rates['nodeagent']):.1f}",
            f"{statistics.median(rates['torchrun']):.1f}",
            str(len(rates["nodeagent"])),
            f"**{speed_ratio(results):.3f}x** ± {1.57 * (high - low) / len(compared) ** 0.5:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
        columns = ("nodeagent: median", "torchrun: median", "turns", "ratio: median ± noise", "middle half")
        parts.append("## Undisturbed steps per second\n\n" + _table(columns, [row]))
    if "at_rest" in results:
        rows = [
            (state, kind, f"{cost['processes']}", f"{cost['pss_mb']:.1f}", f"{cost['cpu_percent']:.2f}")
            for state, kinds in results["at_rest"].items()
            for kind, cost in kinds.items()
        ]
        head = ("state, two nodes", "process", "how many", "PSS each (MB)", "CPU each (% of a core)")
        parts.append("## At rest\n\n" + _table(head, rows))
    goals = [
        (goal.text, goal.wanted(), f"{value:.3g}{goal.unit}", "yes" if met else "**no**")
        for goal, value, met in judged(results)
    ]
    if goals:
        parts.append("## Goals\n\n" + _table(("goal", "wanted", "measured", "met"), goals))
    return "\n".join(parts)


def commands() -> str:
    """What was run, without this machine's paths."""
    shapes = {"worker killed": FULL_GANG, "node killed": SHRINKING, "node joins": GROWING}
    calls = [f"# {name}\n{_torchrun_line(shape)}" for name, shape in shapes.items()]
    environ = " ".join(f"{key}={value!r}" for key, value in ENVIRONMENT.items())
    job = yaml.safe_dump(job_file(Path("FOLDER"), FULL_GANG), sort_keys=False)
    job = job.replace(PYTHON, "python").replace(str(TRAIN), "benchmarks/train.py")
    return (
        "## Commands\n\n"
        f"torchrun, once per node (`is_host=0` on all but the first), with `{environ}`:\n\n"
        "```\n" + "\n".join(calls) + "\n```\n\n"
        "nodeagent: `nodeagentctl local up --nodes 2`, then `nodeagentctl submit job.yaml` with this file "
        "(`nodes: 1:2` for node killed, `2:3` for node joins):\n\n"
        "```yaml\n" + job + "```\n"
    )


def _torchrun_line(shape: Shape) -> str:
    words = ["torchrun", *rendezvous_arguments(shape, "HOST:PORT", host=True), "train.py", "--folder", "FOLDER"]
    return " ".join(words)


def _recovery_row(results: Results, phase: str, text: str) -> tuple[str, ...]:
    ours, torchrun = results[phase]["nodeagent"], results[phase]["torchrun"]
    return (
        text,
        f"**{statistics.median(ours):.3f}**",
        f"{min(ours):.3f} / {p95(ours):.3f} / {max(ours):.3f}",
        str(len(ours)),
        f"{statistics.median(torchrun):.2f}",
        f"{min(torchrun):.2f} / {max(torchrun):.2f}",
        str(len(torchrun)),
        f"**{times_faster(results, phase):.1f}x**",
    )


def p95(values: Sequence[float]) -> float:
    """The value that 95 % do not exceed; the largest of fewer than 20."""
    return sorted(values)[-(len(values) // 20) - 1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
