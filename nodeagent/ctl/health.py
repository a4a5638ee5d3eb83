"""``health``: the rules for faulty hardware, an operator's confirmation of a repair, and drills; ``diag``: checks by
work.
"""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.client import Client, node_path
from nodeagent.ctl.options import Duration, agent_option, connect, node_argument, output_option, request_id_option
from nodeagent.ctl.output import Column, dump, show
from nodeagent.ctl.terminal import CtlError, Exit, echo
from nodeagent.ctl.waiting import wait

Json = dict[str, Any]

RULES = (
    Column("RULE", lambda r: r["name"]),
    Column("SEVERITY", lambda r: r["severity"]),
    Column("ACTION", lambda r: r["action"]),
    Column("HEALS", lambda r: r["heals"]),
    Column("MODE", lambda r: r["mode"]),
    Column("MEANING", lambda r: r["text"]),
    Column("AFTER", lambda r: f"{r['after']:g}s" if r["after"] else "", wide=True),
    Column("SOURCE", lambda r: r["source"], wide=True),
)


_request_id_option = click.option(
    "--request-id", metavar="ID", help="Id of this request; it is not remembered: asked again, it is done again."
)
"""The node's own agent keeps no ids of these two."""


@click.group(short_help="The rules for faulty hardware; confirm a repair; drills.")
def health() -> None:
    """Faulty hardware: the rules that find it, and what people do about it. `nodes` and `describe node/NAME` show the
    findings."""


@health.command(short_help="List the rules in force.")
@output_option
@agent_option
@click.pass_context
def rules(ctx: click.Context, fmt: str) -> None:
    """List the rules by which the agent that answers judges its node."""
    show(connect(ctx).get("/v1/health/rules"), fmt, "rule", RULES)


@health.command(short_help="Confirm that a node, or one of its GPUs, is repaired.")
@node_argument()
@click.option("--gpu", metavar="UUID", default="", help="Only this GPU.")
@click.option("--rule", metavar="ID", default="", help="Only the findings of this rule.")
@_request_id_option
@agent_option
@click.pass_context
def ack(ctx: click.Context, node: str, gpu: str, rule: str, request_id: str | None) -> None:
    """Confirm that the faults of NODE are repaired: their probation begins, and after it NODE (or the GPU) gets work
    again. A rule that fires again in this time was not repaired. A missing GPU is no longer expected from now on."""
    after = _change(connect(ctx), node, "ack", request_id, gpu=gpu, rule=rule)
    for verdict in after["verdicts"]:
        echo(f"node/{after['name']}: {verdict['rule']}: {verdict['stage']}")
    if not after["verdicts"]:
        echo(f"node/{after['name']}: taken as it is now: the GPUs that are missing are not expected any more")


@health.command(short_help="A drill: judge an Xid that nothing reported.")
@node_argument()
@click.option("--xid", type=click.IntRange(1, 9999), required=True, help="Its number.")
@click.option("--gpu", metavar="UUID", default="", help="The GPU [the node's first].")
@_request_id_option
@agent_option
@click.pass_context
def inject(ctx: click.Context, node: str, xid: int, gpu: str, request_id: str | None) -> None:
    """Make NODE judge an Xid that its driver did not report, with all consequences: running jobs lose the GPU if the
    Xid is fatal. Undo it with `health ack`."""
    after = _change(connect(ctx), node, "inject", request_id, gpu=gpu, xid=xid)
    echo(f"node/{after['name']}: Xid {after['xid']} on {after['gpu']}")


def _change(client: Client, node: str, what: str, request_id: str | None, **more: object) -> Json:
    return client.change("POST", f"{node_path(node)}/health/{what}", request_id, **more)


COLUMNS = (
    Column("CHECK", lambda c: c["name"]),
    Column("GPU", lambda c: c["gpu"] or "-"),
    Column("OUTCOME", lambda c: "passed" if c["passed"] else "FAILED"),
    Column("VALUE", lambda c: "-" if c["value"] is None else f"{c['value']:g} {c['unit']}"),
    Column("WHY", lambda c: c["why"]),
)


@click.command(short_help="Have a node check its GPUs by work.")
@node_argument(required=False)
@click.option("--gpu", metavar="UUID", default="", help="Only this GPU.")
@click.option("--busy", is_flag=True, help="Also check GPUs that are in use: this slows their jobs down.")
@click.option("--timeout", type=Duration(), default="10m", show_default=True, metavar="DURATION", help="Longest wait.")
@output_option
@request_id_option
@agent_option
@click.pass_context
def diag(
    ctx: click.Context, node: str | None, gpu: str, busy: bool, timeout: float, fmt: str, request_id: str | None
) -> None:
    """Make NODE (by default the node of the agent that answers) check its GPUs, or its CPU if it has no GPU: matrix
    product, memory, copies, a collective. Each result is verified, and compared with the node's history and its peers.

    The exit code is 1 if a check failed, 6 if nothing could be checked.
    """
    client = connect(ctx)
    name = node or client.get("/v1/version")["node"]
    path = f"{node_path(name)}/diag"
    client.change("POST", path, request_id, gpu=gpu, busy=busy)
    found = wait(
        lambda: client.get(path), lambda seen: bool(seen["state"] != "running"), lambda seen: f"{name}: {seen['step']}",
        timeout, f"node {name} is checked",
    )  # fmt: skip
    report = found["report"]
    if report is None:
        raise CtlError(f"the agent of {name} was restarted in the meantime", Exit.FAILED, "try again")
    if report["problem"]:
        raise CtlError(f"node {name} could not be checked: {report['problem']}", Exit.REFUSED)
    if fmt in ("json", "yaml"):
        dump({"node": name} | report, fmt)
    else:
        show({"items": report["checks"]}, fmt, "check", COLUMNS)
    for note in report["notes"]:
        echo(f"note: {note}", err=True)
    ctx.exit(Exit.DONE if report["passed"] else Exit.FAILED)
