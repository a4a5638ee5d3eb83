"""``pause``, ``resume``, ``restart``, ``stop``, ``delete``: each requests a change and waits until it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from nodeagent.ctl.arrays import end_all
from nodeagent.ctl.client import ENDED, Client, job_path, look_up
from nodeagent.ctl.options import (
    agent_option,
    connect,
    job_argument,
    named_job,
    named_job_argument,
    request_id_option,
    wait_options,
    which_job,
)
from nodeagent.ctl.terminal import CtlError, Exit, WaitTimedOutError, echo
from nodeagent.ctl.waiting import job_line, wait, waits

Json = dict[str, Any]


def running(job: Json) -> bool:
    """Returns whether the job trains."""
    return bool(job["phase"] == "running" and job["generation_state"] == "active")


def not_ended(job: Json, what: str) -> None:
    """Raises ``CtlError`` if the job has ended: the state that the command waits for will never come."""
    if job["phase"] in ENDED:
        raise CtlError(
            f"job {job['name']} ended before it {what}: {job['phase']}: {job['reason']}",
            Exit.FAILED,
            f"see nodeagentctl describe {job['name']}",
        )


WANTED = {"pause": "pause", "resume": "run", "restart": "run"}
"""What each command wants of the job."""
TAKEN_BACK = {"pause": "paused", "run": "resumed"}
"""What was done to a job of which something else is wanted by now."""


def not_taken_back(job: Json, verb: str, rev: int, past: str) -> None:
    """Raises ``CtlError`` if the job was resumed or paused by a change after the command's own, which has this revision
    of the control: the state that the command waits for need never come. A view without the own change proves
    nothing."""
    now = TAKEN_BACK.get(job["desired"])
    if now is not None and job["desired"] != WANTED.get(verb, job["desired"]) and job["control_rev"] >= rev:
        raise CtlError(
            f"job {job['name']} was {now} before it was {past}: {job['phase']}: {job['reason'] or 'no reason given'}",
            Exit.FAILED,
            f"see by whom: nodeagentctl events --job {job['name']}",
        )


class DeletedError(CtlError):
    """Somebody has deleted the job whose state a command waits for."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"job {name} was deleted meanwhile", Exit.FAILED, f"see by whom: nodeagentctl events --job {name}"
        )


def looked_at(client: Client, job: Json) -> Json:
    """This job as it is now. Raises ``DeletedError``: it was there when the wait began."""
    if (found := look_up(client, job_path(job["uid"]))) is None:
        raise DeletedError(job["name"])
    return found


@click.command(short_help="Stop a job's workers, keep the job.")
@job_argument
@wait_options
@request_id_option
@agent_option
@click.pass_context
def pause(ctx: click.Context, /, **asked: Any) -> None:
    """Stop the workers of JOB gracefully and keep the job: it gives its devices back and waits for `resume`."""

    def done(job: Json) -> bool:
        not_ended(job, "paused")
        return bool(job["phase"] == "paused")

    _simple(ctx, "pause", "paused", done, asked)


@click.command(short_help="Run a paused job again.")
@job_argument
@wait_options
@request_id_option
@agent_option
@click.pass_context
def resume(ctx: click.Context, /, **asked: Any) -> None:
    """Run the paused JOB again, and wait until it trains."""

    def done(job: Json) -> bool:
        not_ended(job, "ran again")
        return running(job)

    _simple(ctx, "resume", "resumed", done, asked)


@click.command(short_help="Start a job's workers anew, at no cost to its budget.")
@job_argument
@wait_options
@request_id_option
@agent_option
@click.pass_context
def restart(ctx: click.Context, /, **asked: Any) -> None:
    """Stop the workers of JOB gracefully and start them anew; wait until it trains. Spends no restart budget."""

    def done(job: Json) -> bool:
        not_ended(job, "ran again")
        return running(job) and job["restart"]["done"] >= job["restart"]["asked"]

    _simple(ctx, "restart", "restarted", done, asked)


@click.command(short_help="End a job.")
@named_job_argument
@wait_options
@request_id_option
@agent_option
@click.pass_context
def stop(ctx: click.Context, /, **asked: Any) -> None:
    """End JOB, or every job of an array, for good: its workers get their grace. Its record and its logs stay."""

    def done(job: Json) -> bool:
        return job["phase"] in ENDED and not any(p["phase"] in ("running", "stopping") for p in job["pods"])

    _simple(ctx, "stop", "stopped", done, asked)


def _simple(ctx: click.Context, verb: str, past: str, done: Callable[[Json], bool], asked: dict[str, Any]) -> None:
    client = connect(ctx)
    words = asked["job"], asked["job_named"]
    ref = named_job(client, verb, *words) if verb == "stop" else which_job(client, *words)
    try:
        uid = client.get(job_path(ref))["uid"]
    except CtlError as error:
        if verb != "stop" or error.code != Exit.NOT_FOUND:
            raise
        if not end_all(client, ref, verb, asked["timeout"], asked["no_wait"], asked["request_id"]):
            raise
        return
    # By its uid: where it is asked for again, the name may be that of another job.
    after = client.change("POST", f"{job_path(uid)}/{verb}", asked["request_id"])
    if verb == "resume" and not after["changed"] and not after.get("repeated") and running(after):
        echo(f"job/{after['name']} runs already: there was nothing to resume")
        return
    what = f"job/{after['name']} {verb}"
    text = f"{what} {'asked for' if after['changed'] else 'was asked for already'}"
    if not waits(client, what, after, asked["no_wait"], text):
        return

    def settled(job: Json) -> bool:
        if done(job):
            return True
        not_taken_back(job, verb, after["control_rev"], past)
        return False

    try:
        look, bound = lambda: looked_at(client, after), asked["timeout"]
        last = wait(look, settled, job_line, bound, f"{verb} {after['name']}")
    except DeletedError:
        if verb != "stop":
            raise
        echo(f"job/{after['name']} stopped, and deleted since")  # a record is removed when all of the job has ended
        return
    except WaitTimedOutError as late:
        raise WaitTimedOutError(
            f"{late.message}; it goes on and nothing was taken back", f"nodeagentctl describe {after['name']}"
        ) from late
    if verb == "stop" and last["phase"] != "stopped":
        past = f"ended as {last['phase']}"
    echo(f"job/{after['name']} {past}")


@click.command(short_help="Remove a job's record (a live job is stopped first).")
@named_job_argument
@wait_options
@request_id_option
@agent_option
@click.pass_context
def delete(
    ctx: click.Context, job: str | None, job_named: str | None, timeout: float, no_wait: bool, request_id: str | None
) -> None:
    """Remove the record of JOB, or of every job of an array. A live job is stopped first, with its grace; wait until
    the record is gone.
    """
    client = connect(ctx)
    ref = named_job(client, "delete", job, job_named)
    try:
        found = client.get(job_path(ref))
    except CtlError as error:
        if error.code != Exit.NOT_FOUND or not end_all(client, ref, "delete", timeout, no_wait, request_id):
            raise
        return
    name, uid = found["name"], found["uid"]
    try:  # by its uid: where it is asked for again, the name may be that of another job
        after = client.change("DELETE", job_path(uid), request_id)
    except CtlError as error:
        if error.code != Exit.NOT_FOUND or not error.retried:
            raise
        echo(f"job/{name} is gone")
        return
    if not waits(client, f"job/{name} delete", after, no_wait, f"job/{name} delete asked for"):
        return

    def line(job: Json | None) -> str:
        return job_line(job) if job else ""

    wait(lambda: look_up(client, job_path(uid)), lambda job: job is None, line, timeout, f"deleting {name}")
    echo(f"job/{name} deleted")
