"""``run``: turns a command into a job; its output and its exit code are the same as if the command had run here."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nodeagent import hardware_missing
from nodeagent.ctl import client as agent_client
from nodeagent.ctl.client import UNKNOWN_OUTCOME, Client
from nodeagent.ctl.logs import PlainPrinter, Printer
from nodeagent.ctl.options import agent_option, request_id_option
from nodeagent.ctl.output import count
from nodeagent.ctl.outputs import LogFiles, Outputs, Places, Regular, Rules, Streams, local_ranks, log_base, words_of
from nodeagent.ctl.preloads import guess_preload, module_of, script_of
from nodeagent.ctl.session import STOP_ON, Session
from nodeagent.ctl.submit import readable_shell, send, this_submitter
from nodeagent.ctl.terminal import CtlError, Exit, NoAgentError, OutputError, echo
from nodeagent.ctl.torchline import TorchLine, command_of, torch_options, unneeded_line, workers
from nodeagent.ctl.waiting import mention_unsaved
from nodeagent.ctl.where import Where

if TYPE_CHECKING:
    from nodeagent.model.jobspec import JobSpec

Json = dict[str, Any]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
DEFAULT_ROLE = "worker"
SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
NODES_PER_CORE, LEAST_LOCAL = 4, 8
"""The most local nodes for each core of this machine, and the number that is allowed on any machine."""


def _options(command: F) -> F:
    """Adds the options of ``run``, our own first."""
    for option in reversed(
        (
            click.option(
                "--local", type=click.IntRange(min=1), metavar="N", help="On N nodes brought up here for this command."
            ),
            torch_options,
            click.option("--name", metavar="NAME", help="The job's name [default: from the command]."),
            click.option("--queue", metavar="NAME", help="The queue that the job waits in [default: the user's]."),
            click.option("--env", multiple=True, metavar="K=V", help="A variable for the workers; may be repeated."),
            click.option(
                "--checkpoint-dir",
                metavar="DIR",
                help="A shared folder; the workers find it in NODEAGENT_CHECKPOINT_DIR.",
            ),
            click.option(
                "--preload", multiple=True, metavar="MOD", help="A module to import ahead of time; may be repeated."
            ),
            click.option(
                "--no-fork-server", is_flag=True, help="Keep no interpreter ready; each worker starts from nothing."
            ),
            click.option("--detach", is_flag=True, help="Submit and return; print the job's name."),
            request_id_option,
            agent_option,
        )
    ):
        command = option(command)
    return command


@click.command(
    cls=TorchLine,
    short_help="Run a command as a job, follow its output, exit with its code.",
    context_settings=SETTINGS,
)
@_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...|SCRIPT.py ...")
@click.pass_context
def run(ctx: click.Context, /, **asked: Any) -> None:
    """Run CMD as a job, print its output as `[rank]<stdout>: text`, and exit with its code (the blamed worker's;
    128+n for signal n). A drop-in for torchrun, whose options it takes: `run --local 2 --nproc-per-node 2 train.py`.

    Ctrl-C stops the job, gracefully, and waits for it; again: does not wait. A lost terminal leaves the job running.
    Without --local and without an agent on this machine, one local node is brought up. The tool's own failures are
    120 refused, 121 failed, 122 usage, 123 not found, 124 timed out, 125 no agent.
    """
    ctx.exit(_run(ctx, OURS, asked))


@click.command(cls=TorchLine, context_settings=SETTINGS)
@_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT ...")
@click.pass_context
def as_torchrun(ctx: click.Context, /, **asked: Any) -> None:
    """Run SCRIPT as a job, with torchrun's command line, defaults and output; exit with the script's own code.

    With an agent on this machine the job runs on its cluster, without one (or with --standalone or --local) on nodes
    brought up here. 2 is a wrong command line; other failures of this tool are 120 to 125.
    """
    ctx.exit(_run(ctx, TORCHRUNS, asked))


@dataclass(frozen=True, slots=True)
class Manner:
    """The differences between the two commands."""

    nproc: str
    max_restarts: int | None
    role: str
    script: bool
    """The first word is a Python script, whatever its name."""
    early: bool
    """A failure right after the first start is restarted like any other."""
    plain: bool
    """Only teed output has a prefix."""


OURS = Manner(nproc="gpu", max_restarts=None, role=DEFAULT_ROLE, script=False, early=False, plain=False)
TORCHRUNS = Manner(nproc="1", max_restarts=0, role="default", script=True, early=True, plain=True)


def _run(ctx: click.Context, manner: Manner, asked: dict[str, Any]) -> int:
    """Runs the job and returns the exit code. Raises ``CtlError``."""
    with ExitStack() as stack:
        if line := unneeded_line(ctx):
            echo(f"nodeagentctl: {line}", err=True)
        rules, stop_on = _rules(asked), _signals(asked["signals_to_handle"])
        local, detach = _local(asked), asked["detach"]
        if local is not None and detach:
            raise CtlError(
                "--detach would leave the job without its nodes: those of --local live as long as this command",
                Exit.USAGE,
                f"bring them up first: nodeagentctl local up --nodes {local}",
            )
        if detach and rules.files:
            raise CtlError(
                "--redirects and --tee write files while this command runs, and --detach ends it",
                Exit.USAGE,
                "leave them out, and read the output later: nodeagentctl logs JOB",
            )
        command = command_of(
            asked["command"],
            always_script=manner.script,
            **{key: asked[key] for key in ("module", "no_python", "run_path")},
        )
        _check_command(command)
        spec = _spec(ctx, manner, local, command, asked)
        if local is not None:
            _check_local(local, spec)
        client, private = _agent(ctx, stack, local, spec, detach)
        if private:
            spec = _with_shell(spec)
        after = _submitted(client, spec, asked["request_id"])
        if not private:
            stack.enter_context(_outlived(spec.name))
        mention_unsaved(f"job/{spec.name} submit", after)
        if detach:
            echo(f"job/{spec.name}")
            return 0
        (job,) = after["jobs"]
        outputs = _outputs(stack, rules, asked["log_dir"], spec, client, job["uid"])
        if manner.plain:
            printer: Printer = PlainPrinter(spec.role.name, os.environ.get(PREFIX_TEMPLATE), outputs=outputs)
        else:
            printer = Printer(outputs=outputs)
        session = Session(client, stays=not private, stop_on=stop_on)
        session.begin(job, printer)
        return session.follow()


@contextmanager
def _outlived(job: str) -> Iterator[None]:
    """What is printed of this job may not be written: that is not its end."""
    try:
        yield
    except OutputError as error:
        error.next_step = (
            f"this does not end job/{job}; follow it: nodeagentctl logs {job} -f; or stop it: nodeagentctl stop {job}"
        )
        raise


def _submitted(client: Client, spec: JobSpec, request_id: str | None) -> Json:
    from nodeagent.model.jobspec import Submission

    try:
        return send(client, [Submission(spec)], request_id)
    except CtlError as error:
        if error.kind == UNKNOWN_OUTCOME and request_id is None:  # asked again, the job would have another name
            error.next_step = (
                f"see whether it is there: nodeagentctl describe {spec.name}; nodeagentctl stop {spec.name}"
            )
        raise


def _local(asked: Mapping[str, Any]) -> int | None:
    """The number of nodes to start for this command; None: use the nodes of a cluster."""
    local: int | None = asked["local"]
    if local is None and asked["standalone"]:
        most = str(asked["nodes"] or 1).rpartition(":")[2].strip()
        return int(most) if most.isdigit() else 1  # a value that is no number is reported where the job is made
    return local


def _rules(asked: Mapping[str, Any]) -> Rules:
    """The rules for the output. Raises ``CtlError``."""

    def read(option: str, reader: Callable[[str], R]) -> R:
        try:
            return reader(asked[option])
        except ValueError as error:
            raise CtlError(f"--{option.replace('_', '-')}: {error}", Exit.USAGE, "see docs/torchrun.md") from None

    kept = ("stdout", "stderr")
    return Rules(
        redirects=read("redirects", Streams.read) if asked["redirects"] else Streams(),
        tee=read("tee", Streams.read) if asked["tee"] else Streams(),
        local_ranks=read("local_ranks_filter", local_ranks) if asked["local_ranks_filter"] else None,
        duplicates={stream: words_of(asked[f"duplicate_{stream}_filters"] or "") for stream in kept},
    )


def _signals(text: str | None) -> Collection[int]:
    """Signals that stop the job. Raises ``CtlError``."""
    if text is None:
        return STOP_ON
    found = []
    for name in text.split(","):
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            raise CtlError(
                f"--signals-to-handle: {name.strip()!r} is not a signal that can be handled",
                Exit.USAGE,
                "write for instance SIGTERM,SIGUSR1",
            )
        found.append(number)
    return found


def _outputs(
    stack: ExitStack, rules: Rules, log_dir: str | None, spec: JobSpec, client: Client, uid: str
) -> Outputs | None:
    """The outputs; None if everything goes to the console."""
    if not rules.any:
        return None
    try:
        base = log_base(log_dir) if rules.files else None
    except OSError as error:
        raise CtlError(str(error), Exit.USAGE, "name a folder") from None
    files = stack.enter_context(LogFiles(base, spec.name)) if base is not None else None
    if files is not None and not log_dir:
        echo(f"nodeagentctl: log files: {base}", err=True)
    each = spec.role.workers_per_node
    return Outputs(rules, Places(client.twin(), uid).local if each == "gpu" else Regular(each).local, files)


def _check_command(command: tuple[str, ...]) -> None:
    """Refuses a command that no node could start, if that can be seen here. Raises ``CtlError``."""
    if shutil.which(command[0]) is not None:
        return
    if len(command) == 1 and " " in command[0]:
        raise CtlError(
            f"{command[0]!r} is one word, and no program has that name",
            Exit.USAGE,
            f"leave out the quotes: -- {command[0]}",
        )


def _check_local(local: int, spec: JobSpec) -> None:
    """Refuses a local cluster that can never fit the job, or that this machine cannot carry. Raises ``CtlError``."""
    least, most = spec.nodes.min, max(LEAST_LOCAL, NODES_PER_CORE * (os.cpu_count() or 1))
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


def _agent(ctx: click.Context, stack: ExitStack, local: int | None, spec: JobSpec, detach: bool) -> tuple[Client, bool]:
    """The agent to ask, and whether it was started for this command alone."""
    if local is not None:
        return _bring_up(stack, local, spec), True
    try:
        return agent_client.find(ctx.obj), False
    except NoAgentError as nobody:
        need = spec.nodes.min
        if (ctx.obj or Where()).complete(os.environ).agent or detach:
            raise
        if need > 1:
            raise NoAgentError(
                f"{nobody.message}; the job needs {need} nodes", f"bring them up: run --local {need} ..."
            ) from None
        echo("nodeagentctl: no agent runs on this machine: bringing up one local node for this command", err=True)
        return _bring_up(stack, 1, spec), True


def _with_shell(spec: JobSpec) -> JobSpec:
    """On nodes of this command's own, the workers get the shell's variables, like torchrun's; --env wins. On a cluster
    they get only variables that the job names: a shared store is no place for a shell's secrets."""
    from nodeagent.spec.errors import CheckError
    from nodeagent.spec.jobvalues import RECORDED, env_name

    def wanted(name: str) -> bool:
        try:
            return env_name(name) not in RECORDED
        except CheckError:
            return False

    return spec.model_copy(update={"env": readable_shell(wanted) | spec.env})


def _bring_up(stack: ExitStack, nodes: int, spec: JobSpec) -> Client:
    from nodeagent.local.layout import LocalError
    from nodeagent.local.session import local_session

    workers = spec.role.workers_per_node
    try:
        socket = stack.enter_context(local_session(nodes, None if workers == "gpu" else workers))
    except LocalError as error:
        what = f"cannot bring up {count(nodes, 'local node')}: {error}"
        raise CtlError(what, Exit.FAILED, error.next_step, error.words) from error
    return Client([str(socket)])


def _spec(
    ctx: click.Context, manner: Manner, local: int | None, command: tuple[str, ...], asked: Mapping[str, Any]
) -> JobSpec:
    from nodeagent.model.jobspec import Policy
    from nodeagent.spec.errors import SpecError
    from nodeagent.spec.jobargs import job_from_args

    no_fork_server = asked["no_fork_server"]
    try:
        spec = job_from_args(
            name=asked["name"] or default_name(command),
            command=command,
            submitter=this_submitter(),
            nodes=asked["nodes"] or str(local or 1),
            nproc=workers(asked["nproc"] or manner.nproc, lambda: _see_gpus(ctx, local)),
            max_restarts=_restarts(manner.max_restarts if asked["max_restarts"] is None else asked["max_restarts"]),
            env=asked["env"],
            preload=asked["preload"],
            guessed=() if no_fork_server or asked["preload"] else guess_preload(command),
            checkpoint_dir=asked["checkpoint_dir"],
            role=asked["role"] or manner.role,
            grace=asked["shutdown_timeout"],
            virtual_local_rank=asked["virtual_local_rank"],
            numa_binding=asked["numa_binding"],
            queue=asked["queue"],
        )
    except SpecError as error:
        raise CtlError(
            "the job cannot be made",
            Exit.USAGE,
            f"{ctx.command_path} --help; nothing was submitted",
            str(error).splitlines(),
        ) from None
    if manner.early:
        spec = spec.model_copy(update={"policies": (Policy(on=("WorkerFailed",), do="RestartJob"),)})
    return spec.model_copy(update={"fork_server": False}) if no_fork_server else spec


def _restarts(asked: int | None) -> int | None:
    """The restart budget of the job: torchrun's has no limit, ours covers the last hour."""
    from nodeagent.model.jobspec import MOST_RESTARTS

    if asked is not None and asked > MOST_RESTARTS:
        echo(f"nodeagentctl: --max-restarts {asked}: {MOST_RESTARTS} within an hour is the most here", err=True)
        return MOST_RESTARTS
    return asked


def _see_gpus(ctx: click.Context, local: int | None) -> bool:
    """Returns whether the nodes on which the job will run have GPUs."""
    if local is None:
        with suppress(NoAgentError):
            return any(node["gpus"] for node in agent_client.find(ctx.obj).pages("/v1/nodes")["items"])
    if hardware_missing():
        return False
    from nodeagent.hardware.discovery import installed_gpus

    return bool(installed_gpus()[0])


def default_name(command: tuple[str, ...]) -> str:
    """A job name from the script's (or the command's) name, with a few random characters: two runs do not clash."""
    path = script_of(command) or module_of(command) or Path(command[0])
    path = path.parent if path.name == "__main__.py" else path
    stem = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].strip("-") or "job"
    return f"{stem}-{os.urandom(3).hex()}"
