"""``describe``: what a job or node does, and why."""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.client import Client, job_path, node_path
from nodeagent.ctl.errors import CtlError, Exit
from nodeagent.ctl.jobtext import job_lines
from nodeagent.ctl.nodetext import node_lines
from nodeagent.ctl.options import agent_option, connect, job_option, output_option, which_job
from nodeagent.ctl.output import coloured, dump, notice, terminal_width
from nodeagent.ctl.terminal import echo

Json = dict[str, Any]


@click.command(short_help="Say what a job or node does, and why.")
@click.argument("name", required=False, metavar="[JOB|NODE]")
@job_option
@output_option
@agent_option
@click.pass_context
def describe(ctx: click.Context, name: str | None, job_named: str | None, fmt: str) -> None:
    """Say of JOB or NODE what state it is in and why, what it waits for, what went wrong and whose fault it was, what
    each fault cost, and what to do next. `job/NAME` or `node/NAME` where both have the name.
    """
    client = connect(ctx)
    kind, found = _find(client, name, job_named)
    notice(found, fmt)
    if fmt in ("json", "yaml"):
        dump(found, fmt)
        return
    if fmt == "name":
        echo(f"{kind}/{found['name']}")
        return
    say = job_lines if kind == "job" else node_lines
    echo("\n".join(say(found, coloured(), terminal_width())))


def _find(client: Client, name: str | None, job_named: str | None) -> tuple[str, Json]:
    if name and name.startswith("node/"):
        return "node", client.get(node_path(name.removeprefix("node/")))
    if not name or job_named or name.startswith("job/"):
        return "job", client.get(job_path(which_job(client, name, job_named)))
    try:
        return "job", client.get(job_path(name))
    except CtlError as no_job:
        if no_job.code != Exit.NOT_FOUND:
            raise
        try:
            return "node", client.get(node_path(name))
        except CtlError as no_node:
            if no_node.code != Exit.NOT_FOUND:
                raise
            hints = [e.next_step for e in (no_job, no_node) if "did you mean" in e.next_step]
            raise CtlError(
                f"no job and no node {name!r}",
                Exit.NOT_FOUND,
                " or ".join(hints) or "list them: nodeagentctl get, nodeagentctl nodes",
            ) from None
