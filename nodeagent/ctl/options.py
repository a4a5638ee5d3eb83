"""Parts that many commands share: the agent, the JOB argument, durations, output formats, waiting."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from nodeagent.ctl import client as agent_client
from nodeagent.ctl.client import ENDED, Client
from nodeagent.ctl.terminal import CtlError, Exit
from nodeagent.ctl.where import where_options

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "wide", "json", "yaml", "name")
DEFAULT_TIMEOUT = 600.0
"""The most seconds of a wait, unless an option says otherwise."""


class Duration(click.ParamType[float]):
    """Converts what a job file takes (``500ms``, ``5m``, ``1h30m``), or a number of seconds, to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds of a duration; fails with what to write."""
        from nodeagent.spec.errors import CheckError
        from nodeagent.spec.units import duration

        plain = isinstance(value, str) and re.fullmatch(r"\s*\d+(\.\d+)?\s*", value)
        try:
            return duration(float(value) if plain else value)
        except CheckError as wrong:
            self.fail(str(wrong), param, ctx)


class Named(click.ParamType[str]):
    """Converts ``NAME`` or ``node/NAME``, as ``-o name`` prints it, to the name."""

    def __init__(self, kind: str) -> None:
        self.name = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name without its kind."""
        return str(value).removeprefix(f"{self.name}/")


class NamedNode(Named):
    """A node that is named has a name, also where the argument may be left out."""

    def __init__(self) -> None:
        super().__init__("node")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name without its kind. Raises ``CtlError`` for an empty one."""
        if name := super().convert(value, param, ctx):
            return name
        raise CtlError(
            "the name of the node is empty; nothing was changed",
            Exit.USAGE,
            "name one, see: nodeagentctl nodes (is a variable of your shell not set?)",
        )


JOB, NODE = Named("job"), NamedNode()


def complete_jobs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Job names for the shell."""
    try:
        jobs = agent_client.find(ctx.obj).get("/v1/jobs")["items"]
    except CtlError:
        return []
    return sorted({j["name"] for j in jobs if j["name"].startswith(incomplete)})


def complete_nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Node names for the shell."""
    try:
        nodes = agent_client.find(ctx.obj).pages("/v1/nodes")["items"]
    except CtlError:
        return []
    return [n["name"] for n in nodes if n["name"].startswith(incomplete)]


def agent_option(command: F) -> F:
    """Adds ``--agent`` and its companions, which are accepted after the verb too."""
    return where_options(hidden=True)(command)


def job_option(command: F) -> F:
    """Adds ``--job``, for users who prefer an option to the argument."""
    words = "The job (in place of the argument)."
    option = click.option("--job", "job_named", type=JOB, metavar="JOB", shell_complete=complete_jobs, help=words)
    return option(command)


def job_argument(command: F) -> F:
    """Adds JOB, which may be left out if exactly one job is live, and ``--job``."""
    argument = click.argument("job", type=JOB, required=False, metavar="[JOB]", shell_complete=complete_jobs)
    return argument(job_option(command))


def named_job_argument(command: F) -> F:
    """Adds JOB or ``--job``, for verbs that cannot be undone: ``named_job`` reads them."""
    argument = click.argument("job", type=JOB, required=False, metavar="JOB", shell_complete=complete_jobs)
    return argument(job_option(command))


def node_argument(required: bool = True) -> Callable[[F], F]:
    """Adds NODE."""
    metavar = "NODE" if required else "[NODE]"
    return click.argument("node", type=NODE, required=required, metavar=metavar, shell_complete=complete_nodes)


def output_option(command: F) -> F:
    """Adds ``-o``."""
    return click.option(
        "-o", "--output", "fmt", type=click.Choice(FORMATS), default="table", show_default=True, help="Output format."
    )(command)


def no_wait_option(command: F) -> F:
    """Adds ``--no-wait``."""
    return click.option("--no-wait", is_flag=True, help="Return as soon as the request is accepted.")(command)


def wait_options(command: F) -> F:
    """Adds ``--timeout`` and ``--no-wait``."""
    timeout = click.option(
        "--timeout", type=Duration(), default="10m", show_default=True, metavar="DURATION", help="Longest wait."
    )
    return timeout(no_wait_option(command))


def request_id_option(command: F) -> F:
    """Adds ``--request-id``."""
    return click.option(
        "--request-id", metavar="ID", help="Id of this change: a second request with the same id changes nothing."
    )(command)


def connect(ctx: click.Context) -> Client:
    """A client for the agent of this command. Raises ``UnreachableError``."""
    return agent_client.find(ctx.obj)


def named_job(client: Client, verb: str, argument: str | None, named: str | None) -> str:
    """The job for a verb that cannot be undone: the user must name it. Raises ``CtlError``."""
    if argument or named:
        return which_job(client, argument, named)
    live = [j["name"] for j in client.get("/v1/jobs")["items"] if j["phase"] not in ENDED]
    there = f"live jobs: {', '.join(live)}" if live else "no job is live; ended ones: nodeagentctl get"
    raise CtlError(f"{verb} needs the name of a job; nothing was changed", Exit.USAGE, there)


def which_job(client: Client, argument: str | None, named: str | None) -> str:
    """The job that the user named, else the only live one. Raises ``CtlError``."""
    if argument and named and argument != named:
        raise CtlError(f"two jobs are named: {argument!r} and --job {named!r}", Exit.USAGE, "name one")
    given = argument or named
    if given:
        return given
    jobs = client.get("/v1/jobs")["items"]
    live = [j for j in jobs if j["phase"] not in ENDED]
    if len(live) == 1:
        uid: str = live[0]["uid"]
        return uid
    if not jobs:
        raise CtlError("there is no job, and none was named", Exit.NOT_FOUND, "submit one: nodeagentctl submit FILE")
    if not live:
        raise CtlError("no job is live, and none was named", Exit.NOT_FOUND, "name an ended one, see: nodeagentctl get")
    names = ", ".join(j["name"] for j in live)
    raise CtlError(f"{len(live)} jobs are live; which one?", Exit.USAGE, f"name one of: {names}")


VARIABLE = "_NODEAGENTCTL_COMPLETE"


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(("bash", "zsh")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL. For this session: `source <(nodeagentctl completion bash)`."""
    from click.shell_completion import get_completion_class

    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(ctx.find_root().command, {}, "nodeagentctl", VARIABLE).source())
