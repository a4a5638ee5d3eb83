"""``logs``: what a job's workers wrote, from any node."""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.follow import Printer, print_logs
from nodeagent.ctl.options import agent_option, connect, job_argument, which_job
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.waiting import PATIENCE


@click.command(short_help="Print what a job's workers wrote.")
@job_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Go on until the job has ended, over newer generations and all nodes."
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines (with -f: of each node).")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@click.option(
    "--generation", type=click.IntRange(min=1), metavar="G", help="Only this generation [default: the newest that ran]."
)
@click.option("--previous", is_flag=True, help="Only the generation before the newest.")
@agent_option
@click.pass_context
def logs(
    ctx: click.Context,
    job: str | None,
    job_named: str | None,
    follow: bool,
    tail: int | None,
    rank: int | None,
    generation: int | None,
    previous: bool,
) -> None:
    """Print what the workers of JOB wrote, as `[rank]<stdout>: text`; what they wrote to stderr goes to stderr.

    In a job of several roles: `[trainer.0]<stdout>: text`.

    Nodes that cannot be asked are named on stderr, the others go on.
    """
    if previous and generation is not None:
        raise click.UsageError("--previous and --generation exclude each other")
    client = connect(ctx)
    ref = which_job(client, job, job_named)
    if follow:
        client.endure(PATIENCE)
    query: dict[str, Any] = {"tail": tail, "rank": rank}
    if generation is not None:
        query["generation"] = generation
    elif previous:
        query["previous"] = True
    printer = Printer()
    print_logs(client, ref, printer, follow=follow, **query)
    if rank is not None and not printer.lines:
        echo(f"nodeagentctl: nothing is kept of what rank {rank} wrote there, or it wrote nothing", err=True)
