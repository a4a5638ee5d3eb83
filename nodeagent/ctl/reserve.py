"""``reserve``: maintenance windows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from nodeagent.ctl.options import agent_option, connect, output_option, request_id_option
from nodeagent.ctl.output import Column, show, span
from nodeagent.ctl.terminal import CtlError, Exit, echo
from nodeagent.ctl.waiting import demand_saved

if TYPE_CHECKING:
    from nodeagent.spec.jobvalues import When

Json = dict[str, Any]
_GRAMMAR = "NODE... from TIME for DURATION"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _state(window: Json) -> str:
    if window["state"] == "ahead":
        return f"in {span(window['begins'])}"
    return f"open for {span(window['closes'])}" if window["state"] == "open" else "over"


COLUMNS = (
    Column("NAME", lambda w: w["name"]),
    Column("NODES", lambda w: ",".join(w["nodes"]), text=True),
    Column("FROM", lambda w: _when(w["starts"])),
    Column("TO", lambda w: _when(w["ends"])),
    Column("STATE", _state),
    Column("BY", lambda w: w["by"]),
    Column("WHY", lambda w: w["why"], text=True),
    Column("KNOWN", lambda w: ",".join(w["known"]), wide=True, text=True),
)


@click.group(short_help="Maintenance windows: nodes that take no work for a time.")
def reserve() -> None:
    """Maintenance windows: nodes that take no work for a time. Only operators may change them."""


@reserve.command(short_help="Keep nodes free of work for a time.")
@click.argument("words", nargs=-1, required=True, metavar=_GRAMMAR)
@click.option("--why", default="", help="The purpose; shown to all users.")
@request_id_option
@agent_option
@click.pass_context
def nodes(ctx: click.Context, words: tuple[str, ...], why: str, request_id: str | None) -> None:
    """Keep nodes free of work for a time: 'n[1-8]' from 2030-01-31T22:00 for 4h. A TIME without an
    offset is this machine's (with one: 2030-01-31T22:00+01:00); +2h counts from now, by the agent's clock.

    Jobs that would not have ended by then start elsewhere. Work on the nodes leaves in time, as for a drain; a job
    that can save loses no step. Afterwards the nodes take work again.
    """
    patterns, begins, seconds = parse(words)
    when = {"starts_in" if begins.from_now else "starts": begins.seconds}
    after = connect(ctx).change(
        "POST", "/v1/windows", request_id, nodes=list(patterns), seconds=seconds, why=why, **when
    )
    _tell(after, "made")


@reserve.command(name="list", short_help="List the maintenance windows.")
@output_option
@agent_option
@click.pass_context
def list_(ctx: click.Context, fmt: str) -> None:
    """List the maintenance windows, in the order in which they begin. An ended window is listed for one more day."""
    show(connect(ctx).get("/v1/windows"), fmt, "window", COLUMNS, empty="there is no maintenance window")


@reserve.command(short_help="Remove a maintenance window.")
@click.argument("window", metavar="ID")
@request_id_option
@agent_option
@click.pass_context
def delete(ctx: click.Context, window: str, request_id: str | None) -> None:
    """Remove the window ID, begun or not: its nodes take work at once."""
    path = f"/v1/windows/{quote(window.removeprefix('window/'), safe='')}"
    _tell(connect(ctx).change("DELETE", path, request_id), "deleted")


def parse(words: tuple[str, ...]) -> tuple[tuple[str, ...], When, float]:
    """The nodes' names, when the window begins, and for how many seconds it lasts. Raises ``CtlError``."""
    from nodeagent.spec.errors import CheckError
    from nodeagent.spec.jobvalues import moment
    from nodeagent.spec.units import duration

    if len(words) < 5 or (words[-4], words[-2]) != ("from", "for"):
        raise CtlError(
            f"write {_GRAMMAR}", Exit.USAGE, "such as: nodeagentctl reserve nodes 'n[1-8]' from 2030-01-31T22:00 for 4h"
        )
    try:
        return tuple(w.removeprefix("node/") for w in words[:-4]), moment(words[-3]), duration(words[-1])
    except CheckError as wrong:
        raise CtlError(wrong.what, Exit.USAGE, wrong.right) from None


def _tell(after: Json, done: str) -> None:
    window = after["window"]
    if window is None:
        echo("this was done with this request id before: nothing new was done", err=True)
    else:
        if not after["changed"]:
            done += " with this request id before"
        where = ", ".join(window["known"]) or "no node that is known"
        echo(f"window/{window['name']} {done}: {where}, from {_when(window['starts'])} to {_when(window['ends'])}")
    demand_saved("window", after)
