"""``get``: jobs in a table, as arena shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from nodeagent.ctl.client import Client, job_path
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


def _past(client: Client) -> Iterator[Json]:
    """The history, page by page."""
    after = ""
    while True:
        page = client.get("/v1/history", after=after)
        yield from page["items"]
        if not (after := page["next"]):
            return


@click.command(short_help="List jobs, or one job.")
@job_argument
@click.option("--all", "everything", is_flag=True, help="Also list the ended jobs that are in the history.")
@output_option
@agent_option
@click.pass_context
def get(ctx: click.Context, job: str | None, job_named: str | None, everything: bool, fmt: str) -> None:
    """List jobs in the order of their submission, of the ended ones the newest; with --all before them those in the
    history, in the order of their ends. Or show one JOB.
    """
    client = connect(ctx)
    if named := job or job_named:
        show(client.get(job_path(named.removeprefix("job/"))), fmt, "job", COLUMNS, single=True)
        return
    answer = client.get("/v1/jobs")
    if everything:
        there = {job["uid"] for job in answer["items"]}
        answer["items"][:0] = [job for job in _past(client) if job["uid"] not in there]
    show(answer, fmt, "job", COLUMNS, empty="no jobs; submit one: nodeagentctl run -- CMD...")
