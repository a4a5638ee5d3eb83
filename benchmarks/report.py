"""The results as Markdown: ``docs/benchmarks.md``, and what is printed. Measures nothing."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import leasecurve, nodes, paired
from benchmarks.goals import LEASE, judged, p95, speed_ratio, times_faster
from benchmarks.launcher import PYTHON, TRAIN, Shape
from benchmarks.lease import CLOCKWORKS
from benchmarks.ours import job_file
from benchmarks.phases import FLAT_OUT, IDLE
from benchmarks.recovery import FULL_GANG, GROWING, HANGING, LEAVING, ROWS, SHRINKING, WITH_GPUS
from benchmarks.speed import TURN, ratios
from benchmarks.torchrun import ENVIRONMENT, rendezvous_arguments
from nodeagent.model.timing import Timing

Results = dict[str, Any]
SNAPSHOTS = Path(__file__).with_name("snapshots.json")
"""The results of ``snapshot_cost.py``, which is run apart."""
NODES = Path(__file__).with_name("nodes.json")
"""What ``make nodes`` has measured."""


def _shorter() -> str:
    """The second clockwork of the lease study as an agent's configuration has it: what differs from the default."""
    usual, shorter = Timing().model_dump(), CLOCKWORKS[1].model_dump()
    differ = {key: value for key, value in shorter.items() if value != usual[key]}
    texts = (f"{key}: {f'{s:g}s' if s == int(s) else f'{s * 1000:g}ms'}" for key, s in differ.items())
    return f"timing: {{{', '.join(texts)}}}"


VERDICT = f"""\
**What follows.** Busy cores hardly delay a renewal: see the gaps. A lease must also outlive a lease process that is
killed and started again: its gap is above. (The agent renews nothing, so it may be away for much longer.) But this
study has no slow disk below Redis, no memory that is short, no virtual machine that moves, no network. So the default
stays: heartbeat {Timing().heartbeat:g} s, lease {LEASE:g} s. Where cores are to spare and a vanished node must be
replaced sooner, the second row's clockwork, with all that goes with it, is consistent; on every node the same:

    {_shorter()}
"""
"""What follows from the lease study for the default."""
METHOD = f"""\
## Method

- One run, one machine, one script ([`benchmarks/train.py`](../benchmarks/train.py)) under both launchers: a small
  network, {FULL_GANG.nodes} nodes of {FULL_GANG.workers} workers, gloo, a checkpoint every {FULL_GANG.ckpt_every}
  steps. What travels to another machine are the ratios.
- Each rank logs each step with the monotonic clock. "First step" is the moment when the *last* rank of the new gang
  has done one, so process start, rendezvous, process group and checkpoint are all inside.
- "Steps lost" is how many steps had been done and were to be done again (median).
- **Worker killed:** SIGKILL to a random worker, rank 0 included, after 2 to 3 s of undisturbed steps, with a pause of
  {FULL_GANG.step_delay * 1000:.0f} ms after each step. **No pre-forked worker left:** a second kill, within 0.4 s of
  the first one: before that no new worker is forked ahead, so all are forked on demand.
- **Worker hung:** SIGSTOP to a random worker, in a job with `hang: {{progress: {HANGING.hang:g}s}}` whose script tells
  its progress. The seconds hold that limit, and the reading of all workers' stacks.
- **Node killed:** all processes of a node (launcher or agent, shim, workers) are stopped and killed at once; the clock
  starts before the first signal. nodeagent loses either node; torchrun only the one that does not host its rendezvous
  store, since its job is dead otherwise. nodeagent's figure holds its lease ({LEASE:g} s by default), torchrun's its
  keep-alive, tuned to 3 s.
- **Agent killed:** kill -9 of a random agent alone; what is measured is the longest pause between two steps of rank 0
  in the 6 s after it, less a normal step. A re-formed gang would fail the measurement.
- **Third node joins:** the longest pause between two steps of rank 0 around the join, less a normal step. nodeagent's
  local clusters wait 5 s before a newcomer is let in (30 s elsewhere), while training goes on. Here and in the next
  rows the script leaves after a step that all ranks agree on, and says with `nodeagent.train.Leaving` when it has saved
  (`--helped`, which does nothing under torchrun): the save is part of the seconds.
- **Drained, scaled down:** as there, from two nodes to one; then back. torchrun's node leaves by SIGTERM to its
  launcher. **Scaled up:** from one node to three; one of the two newcomers was a spare, the other has to get ready.
- **Borrowed node given back:** a job with `nodes: auto` runs on three nodes, two of them borrowed; another is submitted
  that needs a whole node. Afterwards that one is deleted, and its node borrowed again.
- **Given up to another queue:** two queues of the same weight. A training of one fills three nodes, its minimum is one,
  and a job of the other is submitted. Afterwards that job is deleted, and the training grows again.
- **Whole training stopped:** the same with a training that needs both of its nodes, and has had them for a minute. The
  seconds are from the job's submission until its worker runs: the training's last step, its save and its end are in it.
  When that job is deleted, the training goes on; the steps that it lost are counted then.
- **Xid 79:** an event of a driver that is not real (the tests', under the unmodified nvidia-ml-py) on a random GPU of
  {WITH_GPUS.nodes} nodes of {WITH_GPUS.workers}, each with a worker that needs none; the time is taken before it is
  written. The old gang's workers are dead before the new one's start.
- **Resumed:** from the request to the first step, 4 s after the job had been paused.
- **Steps per second:** no sleep between steps, a checkpoint every {FLAT_OUT.ckpt_every}. Both trainings are up and step
  in turns of {TURN:g} s, while everything of the other one (launchers, agents, Redis) is frozen, so that the machine's
  noise strikes both alike. torchrun runs at its defaults here. Each turn of nodeagent's is compared with torchrun's
  before and after it; the noise of the median is 1.57 times the width of the middle half over the root of the number
  of turns, as in a notched box plot.
- **At rest:** PSS (shared pages shared out) and CPU time from `/proc`, per process; the workers sleep
  {IDLE.step_delay:g} s per step. The driver that is not real is the tests', under the unmodified nvidia-ml-py: what a
  real one takes for its answers is not in the GPU probe's time.
- torchrun is given its best known settings: a fixed number of nodes where it may (then no `last_call` wait), else a
  last call of 1 s; a short keep-alive and monitor interval; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which
  torch 2.13 does not recover with gloo at all. The script avoids `DistributedDataParallel` and `torch.optim`, which
  would cost torchrun's fresh interpreters over a second of CPU each.

## What this does not show

GPUs and NCCL; real networks, where a dead node's sockets stay silent instead of closing; more than four nodes; large
state, whose loading then outweighs the restart. Here all nodes share one machine's cores, which slows torchrun's
imports most.
"""


def markdown(results: Results, lease: Results | None) -> str:
    """The whole document; ``lease``: the lease study's results, if there are any."""
    generation = results["machine"]
    facts = [f"- {key}: {generation[key]}" for key in ("date", "machine", "system", "versions", "load")]
    parts = [
        "# Benchmarks\n",
        "Written by `make bench`; do not edit. The figures of each trial are in "
        "[`benchmarks/results.json`](../benchmarks/results.json).\n",
        "\n".join(facts) + "\n",
        tables(results, "![Seconds, on a scale of powers of ten](benchmarks.svg)\n"),
        *([study(lease)] if lease is not None else []),
        METHOD,
        commands(),
        paired.section(json.loads(SNAPSHOTS.read_text())),
        *([nodes.section(json.loads(NODES.read_text()))] if NODES.exists() else []),
    ]
    return "\n".join(parts)


def study(lease: Results) -> str:
    """The lease study."""
    load, machine = lease["load"], lease["machine"]
    least, mean, most = lease["load_average"]
    burners = load["per_core"] * load["cores"]
    beside = f"beside {burners} processes that never rest (niceness {load['nice']}), and " if burners else "beside "
    return (
        "## How short may a lease be?\n\n"
        f"Taken on {machine['date']} with `make bench-lease`, for {load['minutes']:g} minutes: for each clockwork a "
        f"cluster of two nodes with an idle job, all at once, {beside}whatever else there was, on {load['cores']} "
        f"cores; load average {least:g} to {most:g}, mean {mean:g}. A gap is the time between two renewals of a node, "
        "as the store served them: beyond the fence its workers would have been stopped (or gone on with time that "
        "failsafe members lend), beyond the lease the node would have been taken for lost.\n\n"
        f"{leasecurve.tables(lease)}\n{VERDICT}"
    )


def tables(results: Results, picture: str = "") -> str:
    """All tables, of the phases that have run."""
    parts = []
    faults = [_recovery_row(results, phase, row.text) for phase, row in ROWS.items() if phase in results]
    if faults:
        titles = (
            "",
            "nodeagent: median",
            "min / p95 / max",
            "steps lost",
            "trials",
            "times the floor",
            "torchrun: median",
            "min / max",
            "steps lost",
            "trials",
            "ratio",
        )
        parts.append("## Recovery (seconds)\n\n" + _table(titles, faults))
        parts += [picture] if picture else []
    if "floor" in results:
        floor = results["floor"]["seconds"]
        parts.append(
            f"The floor, {statistics.median(floor):.3f} s (median of {len(floor)}; {min(floor):.3f} to "
            f"{max(floor):.3f}), is what a plain fork of the same four workers takes until all have stepped, with "
            "nothing around it. Workers that were forked ahead and warmed up start below it.\n"
        )
    if "torchrun_default" in results:
        default = results["torchrun_default"]
        reported = default.get("default_instead") or f"{default['default'][0]:.1f} s"
        parts.append(f"torchrun at its defaults (`--max-restarts` given), worker killed, once: {reported}.\n")
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
    if "lease_start" in results:
        start = results["lease_start"]
        parts.append(
            f"A lease process gives its first grant {statistics.median(start['seconds']):.3f} s after its start "
            f"({min(start['seconds']):.3f} to {max(start['seconds']):.3f}; {statistics.median(start['cpu']):.3f} s of "
            f"CPU; median of {len(start['seconds'])}).\n"
        )
    if "at_rest" in results:
        rows = [
            (state, kind, f"{cost['processes']}", f"{cost['pss_mb']:.1f}", f"{cost['cpu_percent']:.2f}")
            for state, kinds in results["at_rest"].items()
            for kind, cost in kinds.items()
        ]
        generation = ("state, two nodes", "process", "how many", "PSS each (MB)", "CPU each (% of a core)")
        parts.append("## At rest\n\n" + _table(generation, rows))
    goals = [
        (goal.text, goal.wanted(), f"{value:.3g}{goal.unit}", "yes" if met else "**no**")
        for goal, value, met in judged(results)
    ]
    if goals:
        parts.append("## Goals\n\n" + _table(("goal", "wanted", "measured", "met"), goals))
    return "\n".join(parts)


def commands() -> str:
    """What was run, without this machine's paths."""
    shapes = {"worker killed": FULL_GANG, "node killed": SHRINKING, "node joins": GROWING, "drain": LEAVING}
    calls = [f"# {name}\n{_torchrun_line(shape)}" for name, shape in shapes.items()]
    environ = " ".join(f"{key}={value!r}" for key, value in ENVIRONMENT.items())
    job = yaml.safe_dump(job_file(Path("FOLDER"), FULL_GANG), sort_keys=False)
    job = job.replace(PYTHON, "python").replace(str(TRAIN), "benchmarks/train.py")
    return (
        "## Commands\n\n"
        f"torchrun, once per node (`is_host=0` on all but the first), with `{environ}`:\n\n"
        "```\n" + "\n".join(calls) + "\n```\n\n"
        "nodeagent: `nodeagentctl local up --nodes 2`, then `nodeagentctl submit job.yaml` with this file "
        "(`nodes: 1:2` where a node goes, `2:3` for node joins, `--helped` and `hang` as above):\n\n"
        "```yaml\n" + job + "```\n"
    )


def _torchrun_line(shape: Shape) -> str:
    words = ["torchrun", *rendezvous_arguments(shape, "HOST:PORT", host=True), "train.py", "--folder", "FOLDER"]
    words += ["--helped"] if shape.helped else []
    return " ".join(words)


def _recovery_row(results: Results, phase: str, text: str) -> tuple[str, ...]:
    measured = results[phase]
    ours, lost = measured["nodeagent"], measured["nodeagent_lost"]
    floor = results.get("floor", {}).get("seconds")
    if not ours:
        return text, measured["nodeagent_instead"], "", "", "0", "", *_rival(results, phase)
    median = statistics.median(ours)
    return (
        text,
        f"**{median:.3f}**",
        f"{min(ours):.3f} / {p95(ours):.3f} / {max(ours):.3f}",
        f"{statistics.median(lost):g}",
        str(len(ours)),
        f"{median / statistics.median(floor):.1f}" if floor else "",
        *_rival(results, phase),
    )


def _rival(results: Results, phase: str) -> tuple[str, ...]:
    measured = results[phase]
    torchrun = measured.get("torchrun")
    if not torchrun:
        return measured.get("torchrun_instead") or ROWS[phase].instead, "", "", "", ""
    return (
        f"{statistics.median(torchrun):.2f}",
        f"{min(torchrun):.2f} / {max(torchrun):.2f}",
        f"{statistics.median(measured['torchrun_lost']):g}",
        str(len(torchrun)),
        f"**{times_faster(results, phase):.1f}x**",
    )


def _table(generation: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [generation, ["---"] * len(generation), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


SOAK_MARKS = "<!-- begin soak -->", "<!-- end soak -->"
"""What stands before and after the section that ``make soak`` writes."""


def with_soak(new: str, old: str) -> str:
    """The new document, with the old one's section of ``make soak --record``, which writes it there itself."""
    section = re.search(f"{SOAK_MARKS[0]}.*{SOAK_MARKS[1]}\n", old, re.DOTALL)
    return new.rstrip("\n") + "\n" + (f"\n{section[0]}" if section else "")
