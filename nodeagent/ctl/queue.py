"""``queue``: how teams share the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from nodeagent.ctl.client import Client
from nodeagent.ctl.files import read_file
from nodeagent.ctl.options import agent_option, connect, output_option, request_id_option
from nodeagent.ctl.output import Column, fold, show, span, table_lines, terminal_width
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.waiting import demand_saved

if TYPE_CHECKING:
    from nodeagent.model.queue import Queue

Json = dict[str, Any]


def amounts(of: Json) -> str:
    """``gpus=8,nodes=2``; empty if no amount is stated."""
    return ",".join(f"{name}={value}" for name, value in of.items() if value is not None)


def in_use(of: Json) -> str:
    """The amounts that are not zero."""
    return amounts({name: value or None for name, value in of.items()})


def short(of: Json) -> str:
    """The amounts in the form for a column: ``8g,2n`` (GPUs, nodes, slots)."""
    return ",".join(f"{value}{name[0]}" for name, value in of.items() if value is not None)


def limits_text(limits: Json) -> str:
    """``max_nodes=8,max_time_limit=2h``."""
    spans = {k: span(v) for k, v in limits.items() if k != "max_nodes" and isinstance(v, int | float)}
    return amounts(limits | spans)


COLUMNS = (
    Column("NAME", lambda q: "  " * q["depth"] + q["name"]),
    Column("WEIGHT", lambda q: f"{q['weight']:g}"),
    Column("GUARANTEE", lambda q: short(q["guarantee"])),
    Column("CAP", lambda q: short(q["capability"])),
    Column("USED", lambda q: short({name: value or None for name, value in q["used"].items()})),
    Column("SHARE", lambda q: f"{q['share']:.0%}"),
    Column("JOBS", lambda q: q["jobs"]),
    Column("WAITING", lambda q: q["waiting"]),
    Column("STATE", lambda q: q["state"]),
    Column("BY WEIGHT", lambda q: f"{q['entitled']:.0%}", wide=True),
    Column("PRIORITY", lambda q: q["priority"], wide=True),
    Column("RECLAIMABLE", lambda q: "yes" if q["reclaimable"] else "no", wide=True),
    Column("USERS", lambda q: ",".join(q["users"]), wide=True, text=True),
    Column("GROUPS", lambda q: ",".join(q["groups"]), wide=True, text=True),
)
WORK = (
    Column("JOB", lambda j: j["name"]),
    Column("OWNER", lambda j: j["owner"]),
    Column("STATUS", lambda j: j["phase"].upper()),
    Column("PLACE", lambda j: j["place"]),
    Column("USED", lambda j: in_use(j["used"])),
    Column("REASON", lambda j: j["reason"], text=True),
)


def queue_path(name: str) -> str:
    """The path of a queue."""
    return f"/v1/queues/{quote(name.removeprefix('queue/'), safe='')}"


@click.group(short_help="How teams share the cluster.")
def queue() -> None:
    """Queues share the cluster: contended devices by weight, with guarantees and caps. Only operators change them."""


@queue.command(short_help="List queues, or one queue.")
@click.argument("name", required=False, metavar="[QUEUE]")
@output_option
@agent_option
@click.pass_context
def get(ctx: click.Context, name: str | None, fmt: str) -> None:
    """List the queues, those below a queue under it; or show one QUEUE. Amounts are of GPUs (g), nodes (n) and CPU
    slots (s). SHARE is the part that a queue uses of the cluster's GPUs, nodes or slots, whichever is largest."""
    client = connect(ctx)
    if name:
        show(client.get(queue_path(name)), fmt, "queue", COLUMNS, single=True)
        return
    show(client.get("/v1/queues"), fmt, "queue", COLUMNS)


@queue.command(short_help="Show what a queue has, and which jobs wait in it.")
@click.argument("name", metavar="QUEUE")
@output_option
@agent_option
@click.pass_context
def describe(ctx: click.Context, name: str, fmt: str) -> None:
    """Show what QUEUE may have and has, which users use it, and what its jobs wait for."""
    answer = connect(ctx).get(queue_path(name))
    if fmt != "table":
        show(answer, fmt, "queue", COLUMNS, single=True)
        return
    echo("\n".join(queue_lines(answer, terminal_width())))


def queue_lines(found: Json, width: int | None = None) -> list[str]:
    """One queue in full."""
    from nodeagent.model.queue import EVERYBODY

    users = ["everybody" if user == EVERYBODY else user for user in found["users"]]
    allowed = [*users, *(f"group {group}" for group in found["groups"])]
    facts = {
        "Queue": found["name"],
        "Parent": found["parent"],
        "Children": ", ".join(found["children"]),
        "State": found["state"],
        "Weight": f"{found['weight']:g}",
        "Priority": found["priority"],
        "Guarantee": amounts(found["guarantee"]),
        "Capability": amounts(found["capability"]),
        "Reclaimable": "yes" if found["reclaimable"] else "no",
        "Min runtime": span(found["runs_at_least"]),
        "Limits": limits_text(found["limits"]),
        "Who": ", ".join(allowed) or ("as its parent" if found["parent"] else "everybody"),
        "Default": "of these" if found["default"] else "",
        "Per user": amounts(found["user_quota"]),
        "Used": in_use(found["used"]),
        "Share": f"{found['share']:.0%} of the cluster; {found['entitled']:.0%} by weight, if all want theirs",
        "Users": ", ".join(f"{u['user']} {in_use(u['used'])}" for u in found["by_user"]),
    }
    shown = [f"{title + ':':<13}{value}" for title, value in facts.items() if value != ""]
    lines = [piece for line in shown for piece in fold(line, width, 13)]
    if found["work"]:
        lines += ["", *table_lines(WORK, found["work"], width)]
    return lines


@queue.command(short_help="Make a queue.")
@click.argument("name", metavar="QUEUE")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Check everything; change nothing.")
@request_id_option
@agent_option
@click.pass_context
def create(ctx: click.Context, name: str, settings: tuple[str, ...], dry_run: bool, request_id: str | None) -> None:
    """Make QUEUE. A setting is KEY=VALUE, such as weight=2, parent=research, guarantee.gpus=8 or 'users=[ann,bob]'."""
    _change(connect(ctx), "POST", f"{queue_path(name)}/create", request_id, dry_run, settings=list(settings))


@queue.command(name="set", short_help="Change a queue.")
@click.argument("name", metavar="QUEUE")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@click.option("--dry-run", is_flag=True, help="Check everything; change nothing.")
@request_id_option
@agent_option
@click.pass_context
def set_(ctx: click.Context, name: str, settings: tuple[str, ...], dry_run: bool, request_id: str | None) -> None:
    """Change settings of QUEUE, and leave the others. `KEY=` is the key's default."""
    _change(connect(ctx), "POST", f"{queue_path(name)}/set", request_id, dry_run, settings=list(settings))


@queue.command(name="open", short_help="Let a queue take jobs again.")
@click.argument("name", metavar="QUEUE")
@request_id_option
@agent_option
@click.pass_context
def open_(ctx: click.Context, name: str, request_id: str | None) -> None:
    """Let QUEUE take jobs again."""
    _change(connect(ctx), "POST", f"{queue_path(name)}/open", request_id)


@queue.command(short_help="Let a queue take no new jobs.")
@click.argument("name", metavar="QUEUE")
@request_id_option
@agent_option
@click.pass_context
def close(ctx: click.Context, name: str, request_id: str | None) -> None:
    """Let QUEUE take no new jobs. Its jobs continue, and start as before."""
    _change(connect(ctx), "POST", f"{queue_path(name)}/close", request_id)


@queue.command(short_help="Remove a queue.")
@click.argument("name", metavar="QUEUE")
@request_id_option
@agent_option
@click.pass_context
def delete(ctx: click.Context, name: str, request_id: str | None) -> None:
    """Remove QUEUE, which may have neither live jobs nor queues below it."""
    _change(connect(ctx), "DELETE", queue_path(name), request_id)


@queue.command(short_help="Replace the queues by those of a file.")
@click.option("-f", "--file", "file", required=True, metavar="FILE|-", help="The file (`-`: standard input).")
@click.option("--dry-run", is_flag=True, help="Check everything, and show what would change; change nothing.")
@request_id_option
@agent_option
@click.pass_context
def apply(ctx: click.Context, file: str, dry_run: bool, request_id: str | None) -> None:
    """Replace all queues by those of FILE: all or nothing. Reports every mistake in it."""
    queues = [one.model_dump(mode="json") for one in read_queues(file)]
    _change(connect(ctx), "PUT", "/v1/queues", request_id, dry_run, queues=queues)


def read_queues(file: str) -> tuple[Queue, ...]:
    """The queues in a file (``-``: stdin). Raises ``CtlError`` with every mistake."""
    from nodeagent.spec.queuefile import parse_queues

    return read_file(file, "queue file", "nothing was changed", parse_queues)


def _change(
    client: Client, method: str, path: str, request_id: str | None, dry_run: bool = False, **more: object
) -> None:
    after = client.change(method, path, request_id, dry_run=dry_run, **more)
    for one in after["changes"]:
        keys = f": {', '.join(one['keys'])}" if one["keys"] else ""
        echo(f"queue/{one['name']} {'would be ' if dry_run else ''}{one['change']}{keys}")
    if not after["changes"]:
        echo("the queues are so already", err=True)
    if after["warning"]:
        echo(f"nodeagentctl: warning: {after['warning']}", err=True)
    demand_saved("queue", after)
