"""``top``: what uses the cluster, by node and by job."""

from __future__ import annotations

import time
from typing import Any

import click

from nodeagent.ctl.options import agent_option, connect, output_option
from nodeagent.ctl.output import Column, dump, on_terminal, show, size
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.waiting import AGENT_AWAY_LIMIT

Json = dict[str, Any]

INTERVAL = 2.0
"""Seconds between two updates of ``--watch``; agents measure every 5 s."""


def percent(cores: float | None) -> str:
    """Percent of one core, like top's."""
    return "-" if cores is None else f"{cores * 100:.0f}%"


def _part(row: Json, used: str, total: str) -> str:
    return f"{row[used]}/{row[total]}" if row[total] else "-"


def _memory(node: Json) -> str:
    return "-" if node["memory_used"] is None else f"{size(node['memory_used'])}/{size(node['memory_total'])}"


NODES = (
    Column("NODE", lambda n: n["name"]),
    Column("STATE", lambda n: n["state"]),
    Column("LOAD", lambda n: "-" if n["load"] is None else f"{n['load']:.2f}/{n['cpus']}"),
    Column("MEMORY", _memory),
    Column("GPUS", lambda n: _part(n, "gpus_used", "gpus")),
    Column("SLOTS", lambda n: _part(n, "cpu_slots_used", "cpu_slots")),
    Column("CPU", lambda n: percent(n["cpu"])),
    Column("RSS", lambda n: size(n["memory"])),
    Column("JOBS", lambda n: ",".join(n["jobs"]), text=True),
)
JOBS = (
    Column("JOB", lambda j: j["name"]),
    Column("STATUS", lambda j: j["phase"].upper()),
    Column("NODES", lambda j: j["nodes"]),
    Column("WORKERS", lambda j: j["world_size"]),
    Column("GPUS", lambda j: j["gpus"]),
    Column("CPU", lambda j: percent(j["cpu"])),
    Column("RSS", lambda j: size(j["memory"])),
    Column("UID", lambda j: j["uid"], wide=True),
)
PODS = (
    Column("POD", lambda p: f"{p['job']}/{p['role']}"),
    Column("NODE", lambda p: p["node"]),
    Column("STATUS", lambda p: p["phase"].upper()),
    Column("WORKERS", lambda p: p["workers"]),
    Column("PROCESSES", lambda p: p["processes"]),
    Column("CPU", lambda p: percent(p["cpu"])),
    Column("RSS", lambda p: size(p["memory"])),
)


@click.command(short_help="Show what uses the cluster.")
@click.option("--watch", is_flag=True, help="Continue until interrupted, on a terminal.")
@output_option
@agent_option
@click.pass_context
def top(ctx: click.Context, watch: bool, fmt: str) -> None:
    """Show what uses the cluster. For each node: its machine's load and memory, the GPUs and CPU slots taken, and
    the use by its pods. For each job: the CPU (100% is one core) and resident memory of its processes.

    Nodes measure every 5 s while they have pods. `-o wide` shows each pod.
    """
    client = connect(ctx)
    again = watch and on_terminal() and fmt in ("table", "wide")
    if again:
        client.endure(AGENT_AWAY_LIMIT)
    while True:
        found = client.get("/v1/top")
        if again:
            click.clear()
        _print(found, fmt)
        if not again:
            return
        time.sleep(INTERVAL)


def _print(found: Json, fmt: str) -> None:
    if fmt in ("json", "yaml"):
        dump(found, fmt)
        return
    show(found, fmt, "node", NODES, empty="no node has joined yet")
    blocks: list[tuple[str, tuple[Column, ...], list[Json]]] = [("job", JOBS, found["jobs"])]
    if fmt == "wide":
        blocks.append(("pod", PODS, [p | {"job": j["name"]} for j in found["jobs"] for p in j["pods"]]))
    for kind, columns, rows in blocks:
        if rows and fmt != "name":
            echo()
        if rows:
            show({"items": rows}, fmt, kind, columns)
