"""``submit`` and ``validate``: turn a job file into a job, or report every mistake in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nodeagent.ctl.client import Client
from nodeagent.ctl.files import read_file
from nodeagent.ctl.options import agent_option, connect, request_id_option
from nodeagent.ctl.output import dump
from nodeagent.ctl.terminal import CtlError, Exit, echo
from nodeagent.ctl.waiting import demand_saved

if TYPE_CHECKING:
    from nodeagent.model.jobspec import Submission, Submitter

Json = dict[str, Any]

STOPPING = "stopping"
"""The agent's code for a name that is not free yet, because workers of the job that had it still stop."""
STOPPING_WAIT = 60.0
"""Seconds that ``submit`` waits for these workers: the default grace, the steps after it, and a lost node's lease."""
STOPPING_POLL = 0.2
"""Seconds between two attempts."""


def readable_shell(wanted: Callable[[str], bool]) -> dict[str, str]:
    """The shell's variables with these names. Those that are not UTF-8 text are left out and named, since no job's
    record can hold them."""
    shell = {name: value for name, value in os.environ.items() if wanted(name)}
    # A byte that is not UTF-8 is half of a surrogate pair here.
    odd = sorted(name for name, value in shell.items() if any("\ud800" <= char <= "\udfff" for char in value))
    for name in odd:
        echo(f"nodeagentctl: warning: left out, since its value is not UTF-8 text: {name}", err=True)
    return {name: value for name, value in shell.items() if name not in odd}


def this_submitter() -> Submitter:
    """Who submits, from where, with which variables. Raises ``CtlError``."""
    from nodeagent.spec.jobargs import capture_submitter
    from nodeagent.spec.jobvalues import RECORDED

    try:
        folder = str(Path.cwd())
    except OSError:
        raise CtlError(
            "the current folder does not exist any more", Exit.USAGE, "change to one that does: it is the job's"
        ) from None
    return capture_submitter(readable_shell(RECORDED.__contains__), folder)


def read_jobs(file: str) -> list[Submission]:
    """The jobs in a file (``-``: stdin). Raises ``CtlError`` with every mistake."""
    from nodeagent.spec.jobfile import parse_jobs

    def parse(text: str, name: str) -> list[Submission]:
        return parse_jobs(text, name, this_submitter())

    return read_file(file, "job file", "nothing was submitted", parse)


def send(client: Client, jobs: list[Submission], request_id: str | None = None, **more: object) -> Json:
    """Submit all of these jobs, or none. While workers of an ended job of such a name still stop, wait for them. Raises
    ``CtlError``."""
    rows = [
        {
            "spec": job.spec.model_dump(mode="json", exclude={"submitter"}),
            "after": job.after,
            "array": job.array or None,
            "begin_in": job.begin_in,
        }
        for job in jobs
    ]
    submitter = jobs[0].spec.submitter.model_dump(mode="json")
    give_up = time.monotonic() + STOPPING_WAIT
    waits = False
    while True:
        try:
            return client.change("POST", "/v1/jobs", request_id, jobs=rows, submitter=submitter, **more)
        except CtlError as error:
            if error.kind != STOPPING or time.monotonic() >= give_up:
                raise
            if not waits:
                echo(f"job/{jobs[0].spec.name} waits: {error.message}", err=True)
            waits = True
        time.sleep(STOPPING_POLL)


def _with_options(jobs: list[Submission], after: tuple[str, ...], array: str | None) -> list[Submission]:
    """The jobs of a file, with the additions of the command line. Raises ``CtlError``."""
    from dataclasses import replace

    from nodeagent.spec import jobvalues
    from nodeagent.spec.errors import CheckError

    if array is not None and len(jobs) > 1:
        raise CtlError(f"--array is for one job, the file holds {len(jobs)}", Exit.USAGE, "write array: into the file")
    try:
        more = dict(jobvalues.after_option(text) for text in after)
        if array is not None:
            for index in jobvalues.indices(array).numbers:
                jobvalues.member_name(jobs[0].spec.name, index)
    except CheckError as error:
        raise CtlError(f"{'--after' if array is None else '--after or --array'}: {error}", Exit.USAGE) from None
    return [replace(job, after={**job.after, **more}, array=array or job.array) for job in jobs]


def _guessed(job: Submission) -> Submission:
    """With a guess at what to preload, where the file says nothing of it."""
    from dataclasses import replace

    from nodeagent.ctl.preloads import guess_for

    return replace(job, spec=guess_for(job.spec)) if job.guess else job


@click.command(short_help="Submit a job file.")
@click.argument("file", metavar="FILE|-")
@click.option("--array", metavar="INDICES", help="Submit it once for each index: 0-99, 1,3,5-7, 0-99%8 (8 at once).")
@click.option("--after", multiple=True, metavar="JOB[:ok|any]", help="Start when JOB has succeeded (any: has ended).")
@click.option("--dry-run", is_flag=True, help="Check everything, here and at the agent; print the job; submit nothing.")
@request_id_option
@agent_option
@click.pass_context
def submit(
    ctx: click.Context, file: str, array: str | None, after: tuple[str, ...], dry_run: bool, request_id: str | None
) -> None:
    """Submit the job in FILE (`-`: standard input), or all jobs in it (separated by lines of `---`), or none of them.
    Prints each name; follow a job with `logs -f`.
    """
    jobs = [_guessed(job) for job in _with_options(read_jobs(file), after, array)]
    done = send(connect(ctx), jobs, request_id, dry_run=dry_run)
    _say_unmet((job["spec"]["name"] if dry_run else job["name"], job) for job in done["jobs"])
    if dry_run:
        _print(done)
        return
    for job in done["jobs"]:
        echo(f"job/{job['name']} submitted (uid {job['uid']})")
    demand_saved(f"job/{done['jobs'][0]['name']} submit" if len(done["jobs"]) == 1 else "submit", done)


def _say_unmet(jobs: Iterable[tuple[str, Json]]) -> None:
    """Prints which jobs no known node could run. ``jobs``: name and the agent's answer for each. Neighbours that lack
    the same, such as members of an array, share one line."""
    for unmet, alike in groupby(jobs, key=lambda job: job[1].get("unmet", "")):
        names = [name for name, _ in alike]
        more = f" and {len(names) - 1} more wait" if len(names) > 1 else " waits"
        if unmet:
            echo(f"job/{names[0]}{more} until nodes come that will do: {unmet}", err=True)


def _print(dry_run: Json) -> None:
    """What would be submitted."""
    for i, job in enumerate(dry_run["jobs"]):
        if i:
            echo("---")
        dump(job["spec"] | {"submitter": dry_run["submitter"]}, "yaml")
        times = f", {job['jobs']} times" if job["jobs"] > 1 else ""
        echo(f"job/{job['spec']['name']} would be submitted{times} (dry run)", err=True)


@click.command(short_help="Check a job file; report every mistake.")
@click.argument("file", metavar="FILE|-")
def validate(file: str) -> None:
    """Check the jobs in FILE (`-`: standard input). Needs no agent. Reports every mistake with its line and column."""
    jobs = read_jobs(file)
    for job in jobs:
        echo(f"{file}: job/{job.spec.name} is a valid job file" if len(jobs) == 1 else f"{file}: job/{job.spec.name}")
    if len(jobs) > 1:
        echo(f"{file}: {len(jobs)} valid jobs")
