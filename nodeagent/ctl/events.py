"""``events``: the audit log."""

from __future__ import annotations

import time
from typing import Any

import click

from nodeagent.ctl.client import Client, job_path, look_up
from nodeagent.ctl.options import JOB, agent_option, complete_jobs, connect, output_option
from nodeagent.ctl.output import dump, fold, moment, terminal_width, yaml_text
from nodeagent.ctl.terminal import BrokeOffError, echo, one_line
from nodeagent.ctl.waiting import AGENT_AWAY_LIMIT, POLL

Json = dict[str, Any]

MOST_BREAKS = 20
"""Times in a row that a connection may break off before the next event."""

HEADING = f"{'TIME':<19}  {'KIND':<18}  ABOUT AND WHY"


def event_line(event: Json, wide: bool = False, width: int | None = None) -> str:
    """Time, kind, subject, and the sentence, folded to a ``width``; ``wide``: also its id first, for ``--after``."""
    seconds = int(event["id"].partition("-")[0]) / 1000
    when = moment(seconds)
    about = [event["job"] and f"job/{event['job']}", event["node"] and f"node/{event['node']}"]
    about.append(f"generation {event['generation']}" if event["generation"] else "")
    parts = (event["id"] if wide else "", when, f"{event['kind']:<18}", " ".join(a for a in about if a), event["text"])
    before = sum(len(part) + 2 for part in parts[:3] if part)
    line = one_line("  ".join(part for part in parts if part))  # a line end in a text would look like another event
    return "\n".join(fold(line, width, before))


@click.command(short_help="Print what happened in the cluster.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new events.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the newest N (default 100); with --after, the first N after it.",
)
@click.option("--after", metavar="ID", help="Only events after this one.")
@click.option(
    "--job", "job_named", type=JOB, metavar="JOB", shell_complete=complete_jobs, help="Only events of this job."
)
@output_option
@agent_option
@click.pass_context
def events(
    ctx: click.Context, follow: bool, limit: int | None, after: str | None, job_named: str | None, fmt: str
) -> None:
    """Print events, oldest first: about jobs, generations and nodes, with the user or node that caused them."""
    client = connect(ctx)
    if follow:
        job_named = _uid(client, job_named) if job_named else None
        client.endure(AGENT_AWAY_LIMIT)
    seen: list[Json] = []
    headed, breaks = False, 0
    while True:
        try:
            for event in client.stream("/v1/events", follow=follow, limit=limit, after=after, job=job_named):
                after, limit, breaks = event["id"], None, 0
                job_named = job_named and (event["uid"] or job_named)
                if fmt in ("json", "yaml") and not follow:
                    seen.append(event)
                else:
                    if not headed and fmt not in ("json", "yaml", "name"):
                        echo(f"{'ID':<15}  {HEADING}" if fmt == "wide" else HEADING)
                    headed = True
                    echo(_text(event, fmt))
            break
        except BrokeOffError:
            breaks += 1
            if not follow or breaks > MOST_BREAKS:
                raise
            time.sleep(POLL)
    if fmt in ("json", "yaml") and not follow:
        dump({"apiVersion": "nodeagent/v1", "items": seen}, fmt)


def _uid(client: Client, job: str) -> str:
    """Of the job with this name: where the connection breaks off, the name may be another one's by the time it is back.
    The name itself, if only events are left of the job. Raises ``CtlError``."""
    return str((look_up(client, job_path(job)) or {"uid": job})["uid"])


def _text(event: Json, fmt: str) -> str:
    """One event while following: a line, on a terminal folded to its width, or a YAML document."""
    if fmt == "name":
        return f"event/{event['id']}"
    if fmt == "json":
        import json

        return json.dumps(event, ensure_ascii=False)
    if fmt == "yaml":
        return "---\n" + yaml_text(event).rstrip()
    return event_line(event, fmt == "wide", terminal_width())
