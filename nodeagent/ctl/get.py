"""``get``: jobs in a table, as arena shows them."""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.client import job_path
from nodeagent.ctl.options import ENDED, agent_option, connect, job_argument, output_option
from nodeagent.ctl.output import Column, show, span

Json = dict[str, Any]


def _nodes(job: Json) -> str:
    ended = job["phase"] in ENDED
    return ",".join(p["node"] for p in job["pods"] if ended or p["phase"] not in ("gone", "exited"))


def _of_nodes(job: Json) -> str:
    live = job["world_nodes"] if job["generation_state"] == "active" else 0
    return f"{live}/{job['target']} ({job['min']}:{job['max']})"


COLUMNS = (
    Column("NAME", lambda j: j["name"]),
    Column("STATUS", lambda j: j["phase"].upper()),
    Column("AGE", lambda j: span(j["age"])),
    Column("DURATION", lambda j: span(j["duration"])),
    Column("CHIEF", lambda j: j["chief"]),
    Column("GPUS", lambda j: j["gpus"]),
    Column("NODE", _nodes, text=True),
    Column("NODES", _of_nodes, wide=True),
    Column("GENERATION", lambda j: j["generation"], wide=True),
    Column("RESTARTS", lambda j: j["restarts"], wide=True),
    Column("OWNER", lambda j: j["owner"], wide=True),
    Column("UID", lambda j: j["uid"], wide=True),
    Column("REASON", lambda j: j["reason"], wide=True, text=True),
)


@click.command(short_help="List jobs, or one job.")
@job_argument
@output_option
@agent_option
@click.pass_context
def get(ctx: click.Context, job: str | None, job_named: str | None, fmt: str) -> None:
    """List all jobs, ended ones too, in the order of their submission; or show one JOB."""
    client = connect(ctx)
    if named := job or job_named:
        show(client.get(job_path(named.removeprefix("job/"))), fmt, "job", COLUMNS, single=True)
        return
    show(client.get("/v1/jobs"), fmt, "job", COLUMNS, empty="no jobs; submit one: nodeagentctl run -- CMD...")
