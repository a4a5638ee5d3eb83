"""``nodeagentctl``: the list of commands, and the exit codes of failures.

A command is imported when it is used, so that ``--help`` and completion answer at once. Must never import anything but
click and the standard library at the top.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import click

from nodeagent.ctl.terminal import RUN_CODES, CtlError, Exit, OutputError, echo
from nodeagent.ctl.where import where_options

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run a command as a job, follow its output, exit with its code."),
    "submit": ("submit", "Submit a job file."),
    "validate": ("submit", "Check a job file; report every mistake."),
    "get": ("get", "List jobs, or one job."),
    "describe": ("describe", "Show what a job or node does, and why."),
    "logs": ("logs", "Print what a job's workers wrote."),
    "events": ("events", "Print what happened in the cluster."),
    "top": ("top", "Show what uses the cluster."),
    "usage": ("usage", "Show the GPU and CPU hours of users, queues or jobs."),
    "scale": ("scale", "Change how many nodes a job wants, or places of a role."),
    "scaleout": ("scale", "Give a job more nodes: all of them, or none."),
    "scalein": ("scale", "Take nodes from a job."),
    "pause": ("control", "Stop a job's workers, keep the job."),
    "resume": ("control", "Run a paused job again."),
    "restart": ("control", "Start a job's workers anew, at no cost to its budget."),
    "stop": ("control", "End a job."),
    "delete": ("control", "Remove a job's record (a live job is stopped first)."),
    "nodes": ("nodes", "List nodes, or one node."),
    "cordon": ("nodes", "Give a node no new work."),
    "uncordon": ("nodes", "Let a node take work again."),
    "drain": ("nodes", "Move a node's work away, and give it no more."),
    "forget": ("nodes", "Confirm that a node is permanently down; remove its record."),
    "reserve": ("reserve", "Maintenance windows: nodes that take no work for a time."),
    "queue": ("queue", "How teams share the cluster."),
    "health": ("health", "The rules for faulty hardware; confirm a repair; drills."),
    "diag": ("health", "Have a node check its GPUs by work."),
    "hosts": ("get", "Print the hosts of a job's world, for Horovod or MPI."),
    "doctor": ("doctor", "Show what is wrong, and what to do about it."),
    "local": ("local", "A development cluster of real agents on this machine."),
    "completion": ("options", "Print the completion script of a shell."),
}
"""Command to (module of ``nodeagent.ctl``, short help). The module's attribute has the command's name."""


class Tool(click.Group):
    """A group that loads commands at use, and exits with the contract's codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which users need them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"nodeagent.ctl.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Adds a suggestion for a misspelt command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near or "mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list from the table, without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Never returns: exits with one of the contract's codes."""
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        codes = RUN_CODES if _verb(words) == "run" else {}
        end_as(lambda: super(Tool, self).main(words, *rest, **extra), codes)


def end_as(call: Callable[[], Any], codes: Mapping[int, int] = MappingProxyType({})) -> NoReturn:
    """End the process with the code that the call returns, or with the contract's for its error. ``codes``: what stands
    for them where they differ."""
    _prepare_streams()
    try:
        code = _code_of(call, codes)
    except KeyboardInterrupt:  # one more, while the first was reported
        code = Exit.INTERRUPTED
    except OSError as error:
        with suppress(OSError):  # the output that cannot be written may be this one
            _report(error)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # the interpreter must not fail once more when it flushes
            os.dup2(null, stream.fileno())
        code = codes.get(Exit.FAILED, Exit.FAILED)
    sys.exit(code)


def _report(error: OSError) -> None:
    """But that the reader of our output has gone, which has read enough, unless something is left to do."""
    step = error.next_step if isinstance(error, OutputError) else ""
    if isinstance(error, OutputError) and error.reader_gone and not step:
        return
    echo(f"nodeagentctl: {error}", err=True)
    if step:
        echo(f"  next: {step}", err=True)


def _code_of(call: Callable[[], Any], codes: Mapping[int, int]) -> int:
    try:
        code = call()
    except CtlError as error:
        error.show()
        return codes.get(error.code, error.code)
    except click.ClickException as error:
        error.show()
        return codes.get(error.exit_code, error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        echo("nodeagentctl: interrupted", err=True)
        return Exit.INTERRUPTED
    except SystemExit as end:  # click's: the reader of our output has gone
        code = codes.get(Exit.FAILED, end.code) if end.code == Exit.FAILED else end.code
    return code if isinstance(code, int) else Exit.DONE


def _prepare_streams() -> None:
    """What is printed to a closed stream (``>&-``) goes nowhere; characters that the locale lacks become escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _verb(words: list[str]) -> str:
    after_option = False
    for word in words:
        if after_option:
            after_option = False
        elif word in ("--agent", "--token-file", "--cacert", "--fingerprint"):
            after_option = True
        elif not word.startswith("-"):
            return word
    return ""


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from nodeagent import __version__

        echo(f"nodeagentctl {__version__}")
        ctx.exit()


@click.command(cls=Tool, name="nodeagentctl", context_settings={"help_option_names": ["-h", "--help"]})
@where_options(hidden=False)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
def cli() -> None:
    """Run and manage distributed training jobs.

    Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 timed out, 5 agent or store unreachable, 6 refused, 130
    interrupted. `run` exits with the job's own code; its own failures are 120 to 125.
    """


def main() -> None:
    """The tool, to the end of the process."""
    cli(prog_name="nodeagentctl")


def run_main() -> None:
    """``nodeagent-run``: exits with 2 for a wrong command line, like torchrun."""
    from nodeagent.ctl.run import as_torchrun

    def call() -> Any:
        return as_torchrun.main(prog_name="nodeagent-run", standalone_mode=False)

    end_as(call, {**RUN_CODES, Exit.USAGE: Exit.USAGE})
