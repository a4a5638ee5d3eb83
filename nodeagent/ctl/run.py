"""``run``: a command becomes a job; its output and its exit code come back as if it had run here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nodeagent.ctl import client as agent_client
from nodeagent.ctl.client import Client
from nodeagent.ctl.errors import RUN_CODES, CtlError, Exit, UnreachableError
from nodeagent.ctl.options import agent_option, request_id_option
from nodeagent.ctl.saved import mention_unsaved
from nodeagent.ctl.session import Session
from nodeagent.ctl.submit import send
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.where import Where

if TYPE_CHECKING:
    from nodeagent.model.jobspec import JobSpec

Json = dict[str, Any]

NODES_PER_CORE, LEAST_LOCAL = 4, 8
"""Most local nodes for each core of this machine, and how many are allowed on any."""


@click.command(
    short_help="Run a command as a job, follow its output, exit with its code.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--local", type=click.IntRange(min=1), metavar="N", help="On N nodes brought up here for this command.")
@click.option("--nodes", metavar="MIN:MAX|N", help="Nodes to train on [default: 1, or all N of --local].")
@click.option("--nproc-per-node", "--nproc_per_node", "nproc", metavar="N|gpu", help="Workers per node [default: gpu].")
@click.option("--max-restarts", "--max_restarts", type=click.IntRange(min=0), metavar="N", help="The restart budget.")
@click.option("--name", metavar="NAME", help="The job's name [default: from the command].")
@click.option("--env", multiple=True, metavar="K=V", help="A variable for the workers; may be repeated.")
@click.option(
    "--checkpoint-dir", metavar="DIR", help="A shared folder; the workers find it in NODEAGENT_CHECKPOINT_DIR."
)
@click.option("--preload", multiple=True, metavar="MOD", help="A module to import ahead of time; may be repeated.")
@click.option("--no-standby", is_flag=True, help="Keep no interpreter ready; each worker starts from nothing.")
@click.option("--detach", is_flag=True, help="Submit and return; print the job's name.")
@request_id_option
@agent_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def run(ctx: click.Context, /, local: int | None, detach: bool, request_id: str | None, **asked: Any) -> None:
    """Run CMD as a job, print its output as `[rank]<stdout>: text`, and exit with its code (the blamed worker's;
    128+n for signal n). A drop-in for torchrun: `run --local 2 --nproc-per-node 2 -- python train.py`.

    Ctrl-C stops the job, gracefully, and waits for it; again: does not wait. A lost terminal leaves the job running.
    Without --local and without an agent on this machine, one local node is brought up. The tool's own failures are
    120 refused, 121 failed, 122 usage, 123 not found, 124 timed out, 125 no agent.
    """
    with _own_codes(), ExitStack() as stack:
        if local is not None and detach:
            raise CtlError(
                "--detach would leave the job without its nodes: those of --local live as long as this command",
                Exit.USAGE,
                f"bring them up first: nodeagentctl local up --nodes {local}",
            )
        _check_command(asked["command"])
        spec = _spec(local, **asked)
        if local is not None:
            _check_local(local, spec)
        client, private = _agent(ctx, stack, local, spec, detach)
        if private:
            spec = _with_shell(spec)
        session = Session(client, stays=not private)
        with session.signals():
            after = send(client, spec, request_id)
            mention_unsaved(f"job/{after['name']} submit", after)
            session.begin(after)
            if detach:
                echo(f"job/{spec.name}")
                return
            code = session.follow()
    ctx.exit(code)


def _check_command(command: tuple[str, ...]) -> None:
    """Refuse what no node could start, where the reason can be seen from here. Raises ``CtlError``."""
    if shutil.which(command[0]) is not None:
        return
    if len(command) == 1 and " " in command[0]:
        raise CtlError(
            f"{command[0]!r} is one word, and no program has that name",
            Exit.USAGE,
            f"leave out the quotes: -- {command[0]}",
        )
    if command[0].endswith(".py"):
        raise CtlError(
            f"{command[0]} is a script, not a program that can be started",
            Exit.USAGE,
            f"name its interpreter: -- python {shlex.join(command)}",
        )


def _check_local(local: int, spec: JobSpec) -> None:
    """Refuse a local cluster that the job can never fit, or that this machine cannot carry. Raises ``CtlError``."""
    least, most = spec.role.nodes.min, max(LEAST_LOCAL, NODES_PER_CORE * (os.cpu_count() or 1))
    if least > local:
        raise CtlError(
            f"the job needs {least} nodes and --local {local} brings up {local}: it would wait for ever",
            Exit.USAGE,
            f"bring up more (--local {least}), or ask for fewer (--nodes {local})",
        )
    if local > most:
        raise CtlError(
            f"--local {local} starts {local} agents and their workers on this machine, which has {os.cpu_count()} "
            f"cores: at most {most} are useful",
            Exit.USAGE,
            "choose fewer nodes, and more workers on each: --nproc-per-node N",
        )


@contextmanager
def _own_codes() -> Iterator[None]:
    """This tool's failures as 120 to 125."""
    try:
        yield
    except CtlError as error:
        error.code = RUN_CODES.get(Exit(error.code), error.code)
        raise


def _agent(ctx: click.Context, stack: ExitStack, local: int | None, spec: JobSpec, detach: bool) -> tuple[Client, bool]:
    """The agent to ask, and whether it is one brought up for this command alone."""
    if local is not None:
        return _bring_up(stack, local, spec), True
    try:
        return agent_client.find(ctx.obj), False
    except UnreachableError as nobody:
        need = spec.role.nodes.min
        if (ctx.obj or Where()).complete(os.environ).agent or detach:
            raise
        if need > 1:
            raise UnreachableError(
                f"{nobody.message}; the job needs {need} nodes", f"bring them up: run --local {need} ..."
            ) from None
        echo("nodeagentctl: no agent runs on this machine: bringing up one local node for this command", err=True)
        return _bring_up(stack, 1, spec), True


def _with_shell(spec: JobSpec) -> JobSpec:
    """On nodes of this command's own, the workers see the shell's variables, as torchrun's do; --env wins. Elsewhere
    only what a job names goes along: a shared store is no place for a shell's secrets."""
    from nodeagent.spec.errors import CheckError
    from nodeagent.spec.jobvalues import RECORDED, env_name

    def wanted(name: str) -> bool:
        try:
            return env_name(name) not in RECORDED
        except CheckError:
            return False

    shell = {name: value for name, value in os.environ.items() if wanted(name)}
    return spec.model_copy(update={"env": shell | spec.env})


def _bring_up(stack: ExitStack, nodes: int, spec: JobSpec) -> Client:
    from nodeagent.local.layout import LocalError
    from nodeagent.local.session import local_session

    workers = spec.role.workers_per_node
    try:
        socket = stack.enter_context(local_session(nodes, None if workers == "gpu" else workers))
    except LocalError as error:
        raise CtlError(
            f"cannot bring up {nodes} local nodes: {error}", Exit.FAILED, "nodeagentctl local status"
        ) from error
    return Client([str(socket)])


def _spec(
    local: int | None,
    *,
    nodes: str | None,
    nproc: str | None,
    max_restarts: int | None,
    name: str | None,
    env: tuple[str, ...],
    checkpoint_dir: str | None,
    preload: tuple[str, ...],
    no_standby: bool,
    command: tuple[str, ...],
) -> JobSpec:
    from nodeagent.spec.errors import SpecError
    from nodeagent.spec.jobargs import capture_submitter, job_from_args

    modules = preload or (() if no_standby else guess_preload(command))
    try:
        spec = job_from_args(
            name=name or default_name(command),
            command=command,
            submitter=capture_submitter(os.environ, str(Path.cwd())),
            nodes=nodes or str(local or 1),
            nproc=nproc or "gpu",
            max_restarts=max_restarts,
            env=env,
            preload=modules,
            checkpoint_dir=checkpoint_dir,
        )
    except SpecError as error:
        raise CtlError(
            "the job cannot be made",
            Exit.USAGE,
            "nodeagentctl run --help; nothing was submitted",
            str(error).splitlines(),
        ) from None
    return spec.model_copy(update={"standby": False}) if no_standby else spec


def script_of(command: tuple[str, ...]) -> Path | None:
    """SCRIPT of ``python [options] SCRIPT ...``."""
    if not command or not re.fullmatch(r"python(3(\.\d+)?)?", Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word in ("-m", "-c", "-"):
            return None
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return Path(word)
    return None


def default_name(command: tuple[str, ...]) -> str:
    """The script's (or the command's) name, as a job's name, with a few random characters: two runs do not clash."""
    path = script_of(command) or Path(command[0])
    stem = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].strip("-") or "job"
    return f"{stem}-{os.urandom(3).hex()}"


def guess_preload(command: tuple[str, ...]) -> tuple[str, ...]:
    """``torch``, if the command is a Python script that imports it."""
    import ast

    script = script_of(command)
    if script is None:
        return ()
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()  # the worker will say it, better than we could
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        if any(name.partition(".")[0] == "torch" for name in names):
            return ("torch",)
    return ()
