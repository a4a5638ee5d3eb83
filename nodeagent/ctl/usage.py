"""``usage``: the GPU hours that each user used, lost to faults, and waited."""

from __future__ import annotations

import csv
import io
from typing import Any

import click

from nodeagent.ctl.options import agent_option, connect
from nodeagent.ctl.output import Column, dump, hours, notice, of_devices, part, show, span
from nodeagent.ctl.terminal import echo

Json = dict[str, Any]

FORMATS = ("table", "wide", "json", "csv", "yaml")
CSV = (
    "name", "user", "queue", "uid", "gpu_hours", "slot_hours", "lost_gpu_hours", "lost_slot_hours",
    "overhead_gpu_hours", "overhead_slot_hours", "lost", "goodput", "waited_hours", "jobs", "restarts",
)  # fmt: skip

ONLY_RECORDED = (
    "nodeagentctl: only jobs that still have a record are listed; what others used is in --by user and --by queue"
)


def columns(by: str) -> tuple[Column, ...]:
    """The table's columns: 80 characters wide with a name of 16."""
    return (
        Column(by.upper(), lambda row: row["name"]),
        Column("GPU-HOURS", lambda row: hours(row["gpu_hours"])),
        Column("SLOT-HOURS", lambda row: hours(row["slot_hours"])),
        Column("LOST", lambda row: hours(of_devices(row, "lost"))),
        Column("GOODPUT", lambda row: part(row["goodput"])),
        Column("WAITED", lambda row: span(row["waited_hours"] * 3600) if row["waited_hours"] else "-"),
        Column("JOBS", lambda row: row["jobs"] or "-"),
        Column("OVERHEAD", lambda row: hours(of_devices(row, "overhead")), wide=True),
        Column("RESTARTS", lambda row: row["restarts"] or "-", wide=True),
        Column("USER", lambda row: row["user"], wide=True),
        Column("QUEUE", lambda row: row["queue"], wide=True),
        Column("UID", lambda row: row["uid"], wide=True),
    )


@click.command(short_help="Show the GPU and CPU hours of users, queues or jobs.")
@click.option(
    "--by", type=click.Choice(("user", "queue", "job")), default="user", show_default=True, help="One row for each."
)
@click.option("--since", metavar="DATE|Nd", default="7d", show_default=True, help="From this day (UTC), or N days ago.")
@click.option("--until", metavar="DATE|Nd", default="0d", help="Up to the end of this day (UTC).  [default: today]")
@click.option(
    "-o", "--output", "fmt", type=click.Choice(FORMATS), default="table", show_default=True, help="Output format."
)
@agent_option
@click.pass_context
def usage(ctx: click.Context, by: str, since: str, until: str, fmt: str) -> None:
    """Say who used how many hours of GPUs and of CPU slots, how many of them were lost to faults (what came after the
    last checkpoint, and the standstill), how long jobs waited to start, and how many were submitted. GOODPUT is the
    part of the hours that was neither lost nor overhead: starts and planned changes.

    Use is kept by the day (UTC), for 400 days, whatever becomes of the jobs; `--by job` lists only those whose record
    is kept, and says so. You see your own, operators everybody's.
    """
    found = connect(ctx).get("/v1/usage", by=by, since=since, until=until)
    if by == "job" and fmt not in ("json", "yaml"):
        echo(ONLY_RECORDED, err=True)
    if fmt in ("json", "yaml"):
        dump(found, fmt)
    elif fmt == "csv":
        notice(found, fmt)
        echo(as_csv(found), nl=False)
    else:
        everything = [found["total"] | {"name": "(all)", "user": None, "queue": None, "uid": None}]
        rows = found["items"] + (everything if len(found["items"]) > 1 else [])
        show(found | {"items": rows}, fmt, "usage", columns(by), empty=_nothing(found))


def _nothing(found: Json) -> str:
    return f"no devices were used from {found['since']} to {found['until']}"


def as_csv(found: Json) -> str:
    """A line of titles, then one for each row; hours, and parts of 1."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found["items"])
    return text.getvalue()
