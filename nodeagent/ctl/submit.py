"""``submit`` and ``validate``: a job file becomes a job, or every mistake in it is told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nodeagent.ctl.client import Client
from nodeagent.ctl.errors import CtlError, Exit
from nodeagent.ctl.options import agent_option, connect, request_id_option
from nodeagent.ctl.output import dump
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.waiting import demand_saved

if TYPE_CHECKING:
    from nodeagent.model.jobspec import JobSpec

Json = dict[str, Any]

STOPPING = "stopping"
"""The agent's word for: the name is not free yet, because workers of the job that had it still stop."""
STOPPING_WAIT = 60.0
"""Seconds that ``submit`` waits for them: the default grace, what follows it, and a lost node's lease."""
STOPPING_POLL = 0.2
"""Seconds between two tries."""


def read_job(file: str) -> JobSpec:
    """The job in a file (``-``: stdin). Raises ``CtlError`` with every mistake."""
    from nodeagent.spec.errors import SpecError
    from nodeagent.spec.jobargs import capture_submitter
    from nodeagent.spec.jobfile import parse_job
    from nodeagent.spec.yamlfile import MAX_BYTES

    name = "<stdin>" if file == "-" else file
    try:
        with click.open_file(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise CtlError(f"cannot read {file}: {error.strerror}", Exit.USAGE, "give the path of a job file") from None
    if len(data) > MAX_BYTES:
        raise CtlError(f"{name} is larger than {MAX_BYTES // 1024} KiB", Exit.USAGE, "is it a job file?")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CtlError(f"{name} is not UTF-8 text: {error}", Exit.USAGE, "is it a job file?") from None
    try:
        return parse_job(text, name, capture_submitter(os.environ, str(Path.cwd())))
    except SpecError as error:
        count = len(error.problems)
        raise CtlError(
            f"{name}: {count} mistake{'s' if count > 1 else ''}",
            Exit.USAGE,
            "correct the file; nothing was submitted",
            str(error).splitlines(),
        ) from None


def send(client: Client, spec: JobSpec, request_id: str | None = None, **more: object) -> Json:
    """Submit. While workers of an ended job of that name still stop, wait for them. Raises ``CtlError``."""
    give_up = time.monotonic() + STOPPING_WAIT
    waits = False
    while True:
        try:
            return client.change("POST", "/v1/jobs", request_id, spec=spec.model_dump(mode="json"), **more)
        except CtlError as error:
            if error.kind != STOPPING or time.monotonic() >= give_up:
                raise
            if not waits:
                echo(f"job/{spec.name} waits: {error.message}", err=True)
            waits = True
        time.sleep(STOPPING_POLL)


@click.command(short_help="Submit a job file.")
@click.argument("file", metavar="FILE|-")
@click.option("--dry-run", is_flag=True, help="Check everything, here and at the agent; print the job; submit nothing.")
@request_id_option
@agent_option
@click.pass_context
def submit(ctx: click.Context, file: str, dry_run: bool, request_id: str | None) -> None:
    """Submit the job in FILE (`-`: standard input). Prints its name; follow it with `logs -f`."""
    spec = read_job(file)
    after = send(connect(ctx), spec, request_id, dry_run=dry_run)
    if after.get("unmet"):
        echo(f"job/{spec.name} waits until nodes come that will do: {after['unmet']}", err=True)
    if dry_run:
        dump(after["spec"], "yaml")
        echo(f"job/{spec.name} would be submitted (dry run)", err=True)
        return
    echo(f"job/{after['name']} submitted (uid {after['uid']})")
    demand_saved(f"job/{after['name']} submit", after)


@click.command(short_help="Check a job file; tell every mistake.")
@click.argument("file", metavar="FILE|-")
def validate(file: str) -> None:
    """Check the job in FILE (`-`: standard input). Needs no agent. Tells every mistake with its line and column."""
    spec = read_job(file)
    echo(f"{file}: job/{spec.name} is a valid job file")
