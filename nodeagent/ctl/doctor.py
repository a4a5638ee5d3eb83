"""``doctor``: problems here, between nodes and in the cluster, and the command that fixes each."""

from __future__ import annotations

import os
from typing import Any

import click

from nodeagent.ctl.jobtext import limits_text
from nodeagent.ctl.options import agent_option, connect, output_option
from nodeagent.ctl.output import Column, coloured, dump, fold, show, terminal_width
from nodeagent.ctl.terminal import Exit, NoAgentError, echo
from nodeagent.ctl.where import Where

Json = dict[str, Any]

COLOURS = {"error": "red", "warning": "yellow", "info": "bright_black"}
COLUMNS = (
    Column("SEVERITY", lambda f: f["severity"]),
    Column("WHERE", lambda f: f["where"]),
    Column("WHAT", lambda f: f["what"], text=True),
    Column("FIX", lambda f: f["fix"], text=True),
)


@click.command(short_help="Show what is wrong, and what to do about it.")
@click.option("--peers", is_flag=True, help="Also check whether the agent's machine can reach every other node.")
@output_option
@agent_option
@click.pass_context
def doctor(ctx: click.Context, peers: bool, fmt: str) -> None:
    """Show what is wrong on this node, between nodes and in the cluster, and what fixes it. The exit code is 1 if there
    is an error.

    Works without an agent too: then it checks this machine, its config and the store.
    """
    try:
        client = connect(ctx)
        found = client.get("/v1/doctor", peers=peers)
    except NoAgentError as nobody:
        if (ctx.obj or Where()).complete(os.environ).remote:
            raise  # the user asked about another machine
        found = _alone(nobody.message, peers)
    if fmt in ("json", "yaml"):
        dump(found, fmt)
    elif fmt == "wide":
        show(found, fmt, "", COLUMNS)
    elif fmt == "name":
        for where in dict.fromkeys(f["where"] for f in found["items"]):
            echo(where)
    else:
        for line in lines(found["items"], coloured(), terminal_width()):
            echo(line)
    if fmt in ("table", "wide"):
        for line in limit_lines(found, terminal_width()):
            echo(line, err=True)
        echo(summary(found), err=True)
    ctx.exit(Exit.DONE if found["ok"] else Exit.FAILED)


def _alone(why: str, peers: bool) -> Json:
    import asyncio

    from nodeagent.doctor.cluster import report
    from nodeagent.doctor.machine import config_file, without_agent

    found = asyncio.run(without_agent(why, config_file(os.environ), os.environ, peers))
    return report(found) | {"node": None, "limits": None, "peers": None}


def lines(findings: list[Json], colour: bool, width: int | None = None) -> list[str]:
    """Each finding, and below it the fix, folded to a ``width``."""
    wide = max((len(f["where"]) for f in findings), default=0)
    out = []
    for f in findings:
        severity, left = f["severity"].ljust(7), 7 + 2 + wide + 2
        first, *more = fold(f"{severity}  {f['where'].ljust(wide)}  {f['what']}", width, left)
        if colour:
            first = click.style(severity, fg=COLOURS.get(f["severity"])) + first.removeprefix(severity)
        out += [first, *more]
        if f["fix"]:
            out += fold(f"{'':{left}}fix: {f['fix']}", width, left)
    return out


def limit_lines(found: Json, width: int | None = None) -> list[str]:
    """The limits of one user at the agent that was asked."""
    limits = found.get("limits")
    if not limits:
        return []
    text = f"limits of a user (config of node {found['node']}): {limits_text(limits)}"
    return fold(text, width, 2)


def summary(found: Json) -> str:
    """The number of findings, the node that was asked, and the number of peers that answered."""
    kinds = [f["severity"] for f in found["items"]]
    parts = [f"{kinds.count(k)} {k}{'s' if kinds.count(k) > 1 else ''}" for k in ("error", "warning") if k in kinds]
    text = ", ".join(parts) or "nothing is wrong"
    if found["node"]:
        text += f"; node {found['node']} was asked"
    if found["peers"] is not None:
        reached = sum(p["outcome"] in ("accepted", "refused") for p in found["peers"])
        text += f"; {reached} of its {len(found['peers'])} peers can be reached"
    return text
