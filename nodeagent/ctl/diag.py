"""``diag``: have a node check its GPUs by work."""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.client import node_path
from nodeagent.ctl.errors import CtlError, Exit
from nodeagent.ctl.options import Duration, agent_option, connect, node_argument, output_option, request_id_option
from nodeagent.ctl.output import Column, dump, show
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.waiting import wait

Json = dict[str, Any]

COLUMNS = (
    Column("CHECK", lambda c: c["name"]),
    Column("GPU", lambda c: c["gpu"] or "-"),
    Column("OUTCOME", lambda c: "passed" if c["passed"] else "FAILED"),
    Column("VALUE", lambda c: "-" if c["value"] is None else f"{c['value']:g} {c['unit']}"),
    Column("WHY", lambda c: c["why"]),
)


@click.command(short_help="Have a node check its GPUs by work.")
@node_argument(required=False)
@click.option("--gpu", metavar="UUID", default="", help="This GPU only.")
@click.option("--busy", is_flag=True, help="Check GPUs that are in use, too: who uses them is slowed down.")
@click.option("--timeout", type=Duration(), default="10m", show_default=True, metavar="DURATION", help="Longest wait.")
@output_option
@request_id_option
@agent_option
@click.pass_context
def diag(
    ctx: click.Context, node: str | None, gpu: str, busy: bool, timeout: float, fmt: str, request_id: str | None
) -> None:
    """Have NODE (without it: the node of the agent that answers) check its GPUs, or its CPU where it has none: matrix
    product, memory, copies, a collective, each verified and held against the node's history and its peers.

    The exit code is 1 if a check failed, 6 if nothing could be checked.
    """
    client = connect(ctx)
    name = node.removeprefix("node/") if node else client.get("/v1/version")["node"]
    path = f"{node_path(name)}/diag"
    client.change("POST", path, request_id, gpu=gpu, busy=busy)
    found = wait(
        lambda: client.get(path), lambda seen: bool(seen["state"] != "running"), lambda seen: f"{name}: {seen['step']}",
        timeout, f"node {name} is checked",
    )  # fmt: skip
    report = found["report"]
    if report is None:
        raise CtlError(f"the agent of {name} was started anew meanwhile", Exit.FAILED, "ask again")
    if report["problem"]:
        raise CtlError(f"node {name} could not be checked: {report['problem']}", Exit.REFUSED)
    if fmt in ("json", "yaml"):
        dump({"node": name} | report, fmt)
    else:
        show({"items": report["checks"]}, fmt, "check", COLUMNS)
    for note in report["notes"]:
        echo(f"note: {note}", err=True)
    ctx.exit(Exit.DONE if report["passed"] else Exit.FAILED)
