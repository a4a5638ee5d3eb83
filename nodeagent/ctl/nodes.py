"""``nodes``, ``cordon``, ``uncordon``, ``drain``, ``forget``."""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.client import Client, node_path
from nodeagent.ctl.options import (
    FORMATS,
    agent_option,
    connect,
    node_argument,
    output_option,
    request_id_option,
    wait_options,
)
from nodeagent.ctl.output import Column, show, span
from nodeagent.ctl.terminal import CtlError, Exit, WaitTimedOutError, echo
from nodeagent.ctl.waiting import demand_saved, wait, waits

Json = dict[str, Any]

AWAY = ("silent", "lost", "left")
"""States of a node that can run nothing."""


def _gpus(node: Json) -> str:
    gpus = node["gpus"]
    if not gpus or node["state"] in AWAY:
        return "-"
    free = sum(g["healthy"] and not g["job"] and g["uuid"] not in _held(node) for g in gpus)
    return f"{free}/{len(gpus)} free"


def _healthy(node: Json) -> str:
    gpus = node["gpus"]
    return f"{sum(g['healthy'] for g in gpus)}/{len(gpus)}" if gpus and node["state"] not in AWAY else "-"


def _left_out(node: Json) -> str:
    """GPUs that are not used, and the reasons."""
    return "; ".join(f"GPU {gpu['index']}: {gpu['why']}" for gpu in node["gpus"] if not gpu["healthy"])


def _slots(node: Json) -> str:
    if node["state"] in AWAY:
        return "-"
    taken = node["cpu_slots_used"] + sum(device.startswith("cpu") for device in _held(node))
    return f"{node['cpu_slots'] - taken}/{node['cpu_slots']} free"


def _held(node: Json) -> set[str]:
    """Devices that nobody is given."""
    return {device for one in node["held"] for device in one["devices"]}


COLUMNS = (
    Column("NAME", lambda n: n["name"]),
    Column("STATE", lambda n: n["state"]),
    Column("ADDRESS", lambda n: n["address"]),
    Column("GPUS", _gpus),
    Column("HEALTHY", _healthy),
    Column("SLOTS", _slots),
    Column("JOBS", lambda n: ",".join(sorted({p["job"] for p in n["pods"]})), text=True),
    Column("REASON", lambda n: n["reason"], text=True),
    Column("CONDITION", lambda n: n["condition"], text=True),
    Column("REPAIR", lambda n: n["repair"], wide=True, text=True),
    Column("AGENT", lambda n: n["agent_pid"], wide=True),
    Column("AGE", lambda n: span(n["agent_age"]), wide=True),
    Column("VERSION", lambda n: n["version"], wide=True),
    Column("LEFT OUT", _left_out, wide=True, text=True),
    Column("SPOT", lambda n: "yes" if n["spot"] else "-", wide=True),
    Column("LABELS", lambda n: ",".join(f"{k}={v}" for k, v in sorted(n["labels"].items())), wide=True, text=True),
)


@click.command(short_help="List nodes, or one node.")
@node_argument(required=False)
@output_option
@agent_option
@click.pass_context
def nodes(ctx: click.Context, node: str | None, fmt: str) -> None:
    """List the nodes of the cluster; or show one NODE."""
    client = connect(ctx)
    if node:
        show(client.get(node_path(node)), fmt, "node", COLUMNS, single=True)
        return
    show(client.pages("/v1/nodes"), fmt, "node", COLUMNS, empty="no node has joined yet")


@click.command(short_help="Give a node no new work.")
@node_argument()
@click.option("--reason", required=True, help="The reason; shown to all users.")
@request_id_option
@agent_option
@click.pass_context
def cordon(ctx: click.Context, node: str, reason: str, request_id: str | None) -> None:
    """Give NODE no new work. Its running work continues. A NODE that is being drained stops being drained."""
    after = connect(ctx).change("POST", node_path(node) + "/cordon", request_id, reason=reason)
    echo(f"node/{after['name']} cordoned")
    demand_saved(f"node/{after['name']} cordon", after)


@click.command(short_help="Let a node take work again.")
@node_argument()
@request_id_option
@agent_option
@click.pass_context
def uncordon(ctx: click.Context, node: str, request_id: str | None) -> None:
    """Let NODE take work again."""
    after = connect(ctx).change("POST", node_path(node) + "/uncordon", request_id)
    echo(f"node/{after['name']} uncordoned")
    demand_saved(f"node/{after['name']} uncordon", after)


@click.command(short_help="Move a node's work away, and give it no more.")
@node_argument()
@click.option("--reason", required=True, help="The reason; shown to all users.")
@wait_options
@request_id_option
@agent_option
@click.pass_context
def drain(ctx: click.Context, node: str, reason: str, timeout: float, no_wait: bool, request_id: str | None) -> None:
    """Move the work of NODE away gracefully, and give it no more; wait until nothing runs there.

    If that takes too long, the drain is cancelled, the cordon stays, and the exit code is 4. If somebody cancels the
    drain meanwhile (`uncordon`, `cordon`), the exit code is 1.
    """
    client = connect(ctx)
    after = client.change("POST", node_path(node) + "/drain", request_id, reason=reason)
    if not waits(client, f"node/{after['name']} drain", after, no_wait, f"node/{after['name']} draining"):
        return

    def empty(now: Json) -> bool:
        _not_taken_back(now, after["rev"])
        return not now["pods"]

    try:
        wait(lambda: client.get(node_path(node)), empty, _line, timeout, f"draining {node}")
    except WaitTimedOutError as late:
        _give_up(client, node, reason, late)
    echo(f"node/{after['name']} drained")


@click.command(short_help="Confirm that a node is permanently down; remove its record.")
@node_argument()
@click.option("-o", "--output", "fmt", type=click.Choice(FORMATS), help="Show the node, in this format.")
@request_id_option
@agent_option
@click.pass_context
def forget(ctx: click.Context, node: str, fmt: str | None, request_id: str | None) -> None:
    """Confirm that NODE, which is silent, is permanently down: its machine is off, or was restarted. Jobs that wait
    for it, because it may keep them running without the store, then continue without it. If NODE has left, or is lost
    already, its record and its cordon are removed: `nodes` no longer lists it.

    Never use it for a node that may only be cut off: workers may still train with its help, beside the workers that
    would replace them. Make sure that the machine is off first. A node that holds its lease is refused (exit code 6).
    If the node comes back, it joins with a new life.
    """
    after = connect(ctx).change("POST", node_path(node) + "/forget", request_id)
    if fmt is None:
        echo(f"node/{after['name']} {'removed' if after['removed'] else 'forgotten'}")
    else:
        show(after, fmt, "node", COLUMNS, single=True)
    demand_saved(f"node/{after['name']} forget", after)


def _not_taken_back(node: Json, rev: int) -> None:
    """Raises ``CtlError`` if the drain, which gave the node's record this revision, was cancelled after it. A view
    without it proves nothing."""
    if not node["draining"] and node["rev"] >= rev:
        raise CtlError(
            f"the drain of node {node['name']} was taken back before it was drained: it is {node['state']}",
            Exit.FAILED,
            "see by whom: nodeagentctl events",
        )


def _line(node: Json) -> str:
    left = ", ".join(f"{p['job']} ({'stopping' if p['stopping'] else 'running'})" for p in node["pods"])
    return f"{node['name']}: {node['state']}: waits for {left or 'nothing'}"


def _give_up(client: Client, node: str, reason: str, late: WaitTimedOutError) -> None:
    client.change("POST", node_path(node) + "/cordon", reason=reason)
    raise WaitTimedOutError(
        f"{late.message}; the drain was taken back, the node stays cordoned",
        f"see what holds it: nodeagentctl describe {node}; then drain again with a longer --timeout, or uncordon it",
    ) from late
