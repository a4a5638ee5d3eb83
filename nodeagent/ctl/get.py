"""``get``: jobs in a table, in the form of arena's; ``hosts``: the nodes of a job's world, in the form that other
launchers need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from nodeagent.ctl.arrays import folded
from nodeagent.ctl.arrays import members as of_array
from nodeagent.ctl.client import ENDED, Client, job_path
from nodeagent.ctl.options import agent_option, connect, job_argument, output_option, which_job
from nodeagent.ctl.output import Column, show, span
from nodeagent.ctl.terminal import CtlError, Exit, echo

Json = dict[str, Any]


def _nodes(job: Json) -> str:
    ended = job["phase"] in ENDED
    return ",".join(p["node"] for p in job["pods"] if ended or p["phase"] not in ("gone", "exited"))


def _of_nodes(job: Json) -> str:
    live = job["world_nodes"] if job["generation_state"] == "active" else 0
    if job["roles"]:
        return ", ".join(f"{name} {role['places']}/{role['target']}" for name, role in job["roles"].items())
    return f"{live}/{job['target'] + (job['borrowed'] or 0)} ({job['min']}:{job['max']})"


def _place(job: Json) -> str:
    line = job.get("queue")
    return f"{line['place']}/{line['of']}" if line else ""


PLACE = Column("PLACE", _place)
"""Only if some job waits in line: its place, and the number of jobs that do."""
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
    Column("QUEUE", lambda j: j.get("in_queue"), wide=True),
    Column("UID", lambda j: j["uid"], wide=True),
    Column("REASON", lambda j: j["reason"], wide=True, text=True),
)


def columns(rows: Iterable[Json]) -> tuple[Column, ...]:
    """Those of a table with these jobs."""
    name, status, *others = COLUMNS
    return (name, status, *([PLACE] if any(map(_place, rows)) else []), *others)


def _listed(client: Client, *, everything: bool) -> Json:
    answer = client.get("/v1/jobs")
    if everything:
        there = {job["uid"] for job in answer["items"]}
        history = client.pages("/v1/history")
        answer["items"][:0] = [job for job in history["items"] if job["uid"] not in there]
        answer["unread"] = history["unread"]
    return answer


def _one(client: Client, ref: str, fmt: str, *, everything: bool) -> None:
    """Shows a job, or the jobs of an array."""
    try:
        found = client.get(job_path(ref))
        show(found, fmt, "job", columns([found]), single=True)
    except CtlError as error:
        if error.code != Exit.NOT_FOUND:
            raise
        answer = _listed(client, everything=everything)
        answer["items"] = of_array(client, answer["items"], ref)
        if not answer["items"]:
            raise
        show(answer, fmt, "job", columns(answer["items"]))


@click.command(short_help="List jobs, or one job.")
@job_argument
@click.option("--all", "everything", is_flag=True, help="Also list the ended jobs that are in the history.")
@output_option
@agent_option
@click.pass_context
def get(ctx: click.Context, job: str | None, job_named: str | None, everything: bool, fmt: str) -> None:
    """List jobs in the order of their submission, of the ended ones the newest; with --all before them those in the
    history, in the order of their ends. An array is one line, except with --all or another -o. Or show one JOB, or the
    jobs of an array. PLACE is the place in line of a job that waits for nodes, of so many that do.
    """
    client = connect(ctx)
    if named := job or job_named:
        _one(client, named, fmt, everything=everything)
        return
    answer = _listed(client, everything=everything)
    if fmt == "table" and not everything:
        answer["items"] = folded(answer["items"])
    show(answer, fmt, "job", columns(answer["items"]), empty="no jobs; submit one: nodeagentctl run -- CMD...")


TRIES = 5
"""Attempts to read a job whose world changes in the meantime."""


HOST_FORMATS = {"horovod": "{host}:{slots}", "mpi": "{host} slots={slots}"}
"""The line for one host: of Horovod's discovery script, and of Open MPI's host file."""


@click.command(short_help="Print the hosts of a job's world, for Horovod or MPI.")
@job_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(tuple(HOST_FORMATS)),
    default="horovod",
    show_default=True,
    help="Format of the lines.",
)
@agent_option
@click.pass_context
def hosts(ctx: click.Context, job: str | None, job_named: str | None, form: str) -> None:
    """Print the nodes that JOB trains on now, one a line: `HOST:SLOTS`, as a Horovod discovery script does, or with
    `--format mpi` `HOST slots=SLOTS`, as in a host file of Open MPI.

    HOST is the address that workers reach each other by, SLOTS the workers there. A job that does not run is refused
    (exit code 6).
    """
    client = connect(ctx)
    for host, slots in world(client, which_job(client, job, job_named)).items():
        echo(HOST_FORMATS[form].format(host=host, slots=slots))


def world(client: Client, ref: str) -> dict[str, int]:
    """Host to number of workers of the job's active generation, by rank. Raises ``CtlError``."""
    for _ in range(TRIES):
        job = client.get(job_path(ref))
        if job["phase"] != "running" or job["generation_state"] != "active":
            raise CtlError(
                f"job {job['name']} does not train now: {job['phase']}: {job['reason']}",
                Exit.REFUSED,
                f"nodeagentctl describe {job['name']}",
            )
        found = members(client.pages("/v1/nodes")["items"], job)
        if found is not None:
            return found
    raise CtlError(f"the nodes of job {job['name']} are changing just now", Exit.REFUSED, "ask again in a moment")


def members(nodes: list[Json], job: Json) -> dict[str, int] | None:
    """Host to number of workers; None if the nodes were read in another generation than the job. Nodes that share an
    address (a development cluster) are one host."""
    pods = [
        (pod["ranks"], node)
        for node in nodes
        for pod in node["pods"]
        if pod["uid"] == job["uid"] and pod["generation"] == job["generation"] and pod["ranks"]
    ]
    if len(pods) != job["world_nodes"]:
        return None
    found: dict[str, int] = {}
    for ranks, node in sorted(pods, key=lambda pod: pod[0]):
        # Horovod splits at the colon, so it cannot use an IPv6 address.
        host = node["hostname"] if ":" in node["address"] else node["address"]
        found[host] = found.get(host, 0) + len(ranks)
    return found
