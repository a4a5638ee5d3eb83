"""``scale``, ``scaleout``, ``scalein``: ask for another size, then wait until the agents have settled it.

The agents judge the deadline and roll back, not this tool: it may be interrupted, and nothing is left half done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from nodeagent.ctl.client import Client, job_path, new_request_id
from nodeagent.ctl.control import looked_at, not_ended, running
from nodeagent.ctl.options import (
    DEFAULT_TIMEOUT,
    JOB,
    NODE,
    Duration,
    F,
    agent_option,
    complete_jobs,
    complete_nodes,
    connect,
    job_argument,
    job_option,
    no_wait_option,
    request_id_option,
    which_job,
)
from nodeagent.ctl.output import count
from nodeagent.ctl.terminal import CtlError, Exit, WaitTimedOutError, echo
from nodeagent.ctl.waiting import job_line, wait, waits

Json = dict[str, Any]

SETTLING = 60.0
"""Seconds beyond a scale's own time and the job's grace: a gang that began to form in time may still become whole."""


def _timeout_option(help_text: str) -> Callable[[F], F]:
    return click.option("--timeout", type=Duration(), metavar="DURATION", help=help_text)


@click.command(short_help="Change how many nodes a job wants, or places of a role.")
@click.argument("words", type=JOB, nargs=-1, required=True, metavar="[JOB] N|ROLE=N", shell_complete=complete_jobs)
@job_option
@_timeout_option(
    "More: rolled back after this long, unless met (default 10m). Fewer: from SIGTERM to SIGKILL (default: the "
    "job's grace)."
)
@no_wait_option
@request_id_option
@agent_option
@click.pass_context
def scale(ctx: click.Context, /, words: tuple[str, ...], job_named: str | None, **asked: Any) -> None:
    """Want N nodes for JOB (absolute), and wait until it trains on N. In a job of several roles: N places of ROLE.

    A scale-out that is not met in time is rolled back while training goes on; the exit code is then 4.
    """
    role, named, size = words[-1].rpartition("=")
    if len(words) > 2 or not size.isdecimal() or (named and not role):
        raise click.UsageError(
            "write: scale [JOB] N, with N a whole number of nodes, or scale [JOB] ROLE=N, with N of the role's places"
        )
    client = connect(ctx)
    ref = which_job(client, words[0] if len(words) == 2 else None, job_named)
    _change(client, "scale", ref, asked, target=int(size), **({"role": role} if role else {}))


@click.command(short_help="Give a job more nodes: all of them, or none.")
@job_argument
@click.option("--count", type=click.IntRange(min=1), required=True, metavar="N", help="Nodes more than the target.")
@_timeout_option("Rolled back after this long, unless met (default 10m).")
@no_wait_option
@request_id_option
@agent_option
@click.pass_context
def scaleout(ctx: click.Context, /, job: str | None, job_named: str | None, **asked: Any) -> None:
    """Want N nodes more than the target of JOB, and wait until it trains on all of them.

    All or nothing: the newcomers join together when all are ready. If they are not in time, the target goes back to
    what it was, training goes on undisturbed, and the exit code is 4.
    """
    client = connect(ctx)
    _change(client, "scaleout", which_job(client, job, job_named), asked, count=asked.pop("count"))


@click.command(short_help="Take nodes from a job.")
@job_argument
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Nodes fewer than the target.")
@click.option(
    "--node",
    "nodes",
    type=NODE,
    multiple=True,
    metavar="NODE",
    shell_complete=complete_nodes,
    help="Which; may be repeated.",
)
@_timeout_option("From SIGTERM to SIGKILL, for this once (default: the job's grace).")
@no_wait_option
@request_id_option
@agent_option
@click.pass_context
def scalein(ctx: click.Context, /, job: str | None, job_named: str | None, **asked: Any) -> None:
    """Want N nodes fewer than the target of JOB, or let the named ones go; wait until it trains without them.

    Without names those of the highest ranks go. Named ones are not cordoned: other jobs may have them, and this job
    chooses them last until the next scale.
    """
    number, nodes = asked.pop("count"), asked.pop("nodes")
    if (number is None) == (not nodes):
        raise click.UsageError("say either how many are to go (--count N) or which (--node NODE, may be repeated)")
    client = connect(ctx)
    ref = which_job(client, job, job_named)
    body = {"count": number} if nodes == () else {"nodes": list(nodes)}
    _change(client, "scalein", ref, asked, **body)


def _change(client: Client, verb: str, ref: str, asked: dict[str, Any], **body: Any) -> None:
    request = asked["request_id"] or new_request_id()
    # By its uid: where it is asked for again, the name may be that of another job.
    uid = client.get(job_path(ref))["uid"]
    after = client.change("POST", f"{job_path(uid)}/{verb}", request, timeout=asked["timeout"], **body)
    name, before, want = after["name"], after["previous_target"], after["asked_target"]
    role = body.get("role", "") if after["roles"] else ""
    what = f"role {role}" if role else "target"
    text = f"job/{name} " + (f"{what} is {want} already" if before == want else f"{what} {before} -> {want}")
    if after.get("repeated") and asked["request_id"]:
        text += " was asked for with this request id before: nothing new was done"
    paused = after["desired"] == "pause"
    text += " (paused: it counts when it runs again)" if paused else ""
    if not waits(client, f"job/{name} {verb}", after, asked["no_wait"] or paused, text):
        return
    last = _wait(client, after, request, want, asked["timeout"], role)
    nodes = count(last["world_nodes"], "node")
    had = f"with {count(last['roles'][role]['places'], 'place')} of {role} on {nodes}" if role else f"on {nodes}"
    echo(f"job/{name} scaled: trains {had}")


def _wait(client: Client, after: Json, request: str, want: int, timeout: float | None, role: str) -> Json:
    """``role``: of several, whose places are meant."""
    name = after["name"]
    size = f"{want} places of {role}" if role else f"{want} nodes"

    def target(job: Json) -> int:
        return int(job["roles"][role]["target"] if role else job["target"])

    def has(job: Json) -> int:
        return int(job["roles"][role]["places"] if role else job["world_nodes"])

    def asked_for(job: Json) -> Json | None:
        scale: Json | None = job["scale"]
        return scale if scale and scale["request"] == request else None

    def done(job: Json) -> bool:
        mine = asked_for(job)
        if mine and mine["state"] == "rolled_back":
            return True
        not_ended(job, f"had {size}")
        if target(job) != want:
            raise CtlError(
                f"job {name} was asked to have {size}; since then its target became {target(job)}",
                Exit.FAILED,
                f"see why: nodeagentctl events --job {name}",
            )
        if mine and mine["state"] == "pending":
            return False
        return running(job) and (mine is not None or has(job) == want)

    bound = DEFAULT_TIMEOUT if timeout is None else timeout
    spec = looked_at(client, after)["spec"]
    bound += max([spec["grace"], *(one.get("grace") or 0.0 for one in spec["roles"])]) + SETTLING
    try:
        last = wait(lambda: looked_at(client, after), done, _line, bound, f"scaling {name} to {size if role else want}")
    except WaitTimedOutError as late:
        raise WaitTimedOutError(
            f"{late.message}; the target is {size if role else want} still", f"nodeagentctl describe {name}"
        ) from late
    mine = asked_for(last)
    if mine and mine["state"] == "rolled_back":
        raise WaitTimedOutError(
            f"job {name}: {mine['reason']}; its target is {target(last)} again",
            f"see what is missing: nodeagentctl nodes, nodeagentctl describe {name}",
        )
    return last


def _line(job: Json) -> str:
    """What it waits for says more than the state of the generation that goes on."""
    return f"{job['name']}: {job['phase']}: {'; '.join(job['why'])}" if job["why"] else job_line(job)
