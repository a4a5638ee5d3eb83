"""torchrun's command line: the meaning of each of its options here, and parsing in all of their spellings.

``tests/unit/ctl/test_torchline_flags.py`` compares it with the parser of the torch that is installed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from nodeagent.ctl.terminal import CtlError, Exit


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of torchrun."""

    name: str
    """The long form, with ``-`` (``_`` in its place means the same)."""
    there: str
    """What torchrun does with the option."""
    here: str
    """What the option means here; for an option without effect, why it is not needed."""
    value: str = ""
    """The form of its value; empty for an option without a value."""
    short: str = ""
    needed: bool = True
    """The option has an effect here; otherwise it is accepted, and a message names it."""
    environ: bool = True
    """torchrun reads ``PET_NAME`` in its place."""
    also: tuple[str, ...] = ()
    """Variables that torchrun reads after that one."""

    @property
    def variable(self) -> str:
        """The environment variable of the option; the command line wins over it."""
        return "PET_" + self.name.removeprefix("--").replace("-", "_").upper()


def _unneeded(name: str, there: str, here: str, *, value: str = "", environ: bool = True) -> Flag:
    return Flag(name, there, here, value, needed=False, environ=environ)


_MEETING = "the agents know each other: the nodes, rank 0's address and its port are chosen for each generation"
_RANK = "the line is given once, on one machine; ranks are chosen for each generation"

FLAGS: tuple[Flag, ...] = (
    Flag("--nnodes", "nodes of the job, on each of which torchrun is started by hand",
         "nodes of the job, on which the agents start it; `--nodes` is the same", "N|MIN:MAX"),
    Flag("--nproc-per-node", "workers per node; `auto`: one per accelerator, else per core",
         "the same; `gpu` is one per GPU of each node (one on a node without), `cpu` one per core of the machine where "
         "the line is given, `auto` the first if a node has GPUs, else the second", "N|gpu|cpu|auto"),
    Flag("--standalone", "one node, with a rendezvous of its own",
         "one node (or all of `--nnodes`) is brought up on this machine for the command, as by `--local`"),
    Flag("--max-restarts", "failures of workers after which all are started again",
         "the same, of the last hour (most: 60); nodes lost, drained or added cost nothing", "N"),
    Flag("--role", "the role's name: `ROLE_NAME` of the workers, and the beginning of the prefix of `-t`",
         "the same (a-z, 0-9 and `-`)", "NAME"),
    Flag("--module", "the script is a module's name, as for `python -m`", "the same", short="-m"),
    Flag("--no-python", "the script is a program, not a Python file", "the same"),
    Flag("--run-path", "the script is run by `runpy` in the worker's interpreter", "`python -u SCRIPT`"),
    Flag("--log-dir", "folder for the files of `-r` and `-t`, one below it for each node",
         "the same layout, written where the line is given: `JOB_NODE_*/attempt_N/LOCAL_RANK/stdout.log`; N counts "
         "generations", "DIR"),
    Flag("--redirects", "1 (stdout), 2 (stderr) or 3 (both) to files, not to the console; `0:1,1:2` by local rank",
         "the same", "STD", "-r"),
    Flag("--tee", "the same to files and to the console, there with a prefix `[role0]:`",
         "the same; `nodeagent-run` has the rank in it (or what `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE` says), "
         "`nodeagentctl run` always a prefix of its own", "STD", "-t"),
    Flag("--local-ranks-filter", "local ranks that the console shows", "the same", "N,N"),
    Flag("--duplicate-stdout-filters", "lines of `-t` with one of these words to `filtered_stdout.log` too",
         "the same", "WORD,WORD"),
    Flag("--duplicate-stderr-filters", "lines of `-t` with one of these words to `filtered_stderr.log` too",
         "the same", "WORD,WORD"),
    Flag("--signals-to-handle", "signals that torchrun passes on to the workers before it ends",
         "signals that stop the job with its grace, which begins with SIGTERM; SIGHUP (a lost terminal) leaves a job "
         "of a cluster running", "SIG,SIG"),
    Flag("--shutdown-timeout", "seconds from the first signal to SIGKILL; else `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, else "
         "30", "the same: the job's grace", "SECONDS", also=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",)),
    Flag("--virtual-local-rank", "`LOCAL_RANK` is 0 for all, `CUDA_VISIBLE_DEVICES` holds the worker's own GPU",
         "the same"),
    Flag("--numa-binding", "binds each worker to the cores of its GPU's NUMA node or socket, or to a part of them",
         "the same, without `numactl`; `exclusive` divides among all GPUs of the NUMA node, those of other jobs too; a "
         "worker that cannot be bound says so and runs", "node|socket|exclusive|core-complex", environ=False),
    _unneeded("--rdzv-backend", "how the nodes find each other", _MEETING, value="NAME"),
    _unneeded("--rdzv-endpoint", "where the nodes find each other", _MEETING, value="HOST:PORT"),
    _unneeded("--rdzv-id", "a name that the nodes share", "`--name` names the job; `TORCHELASTIC_RUN_ID` is its uid",
              value="ID"),
    _unneeded("--rdzv-conf", "more about how the nodes find each other", _MEETING, value="K=V,K=V"),
    _unneeded("--node-rank", "this node's rank", _RANK, value="N"),
    _unneeded("--master-addr", "rank 0's address", _MEETING, value="HOST"),
    _unneeded("--master-port", "rank 0's port", _MEETING, value="PORT"),
    _unneeded("--local-addr", "this node's address", "`address` in the agent's configuration", value="HOST"),
    _unneeded("--monitor-interval", "seconds between two looks at the workers", "an end is seen when it happens",
              value="SECONDS"),
    _unneeded("--start-method", "how `multiprocessing` starts functions", "workers are commands",
              value="spawn|fork|forkserver"),
    _unneeded("--event-log-handler", "where torchrun's events go", "`nodeagentctl events` has ours", value="NAME"),
    _unneeded("--logs-specs", "a plug-in that writes the logs", "`nodeagentctl logs` reads ours", value="NAME",
              environ=False),
)  # fmt: skip


F = TypeVar("F", bound=Callable[..., Any])

UNNEEDED = "nodeagent.ctl.unneeded"
"""The key of ``ctx.meta`` for the options that were given without an effect."""
_NUMBERS = ("--max-restarts", "--shutdown-timeout")
_CHOICES = {"--numa-binding": click.Choice(("node", "socket", "exclusive", "core-complex"))}
_ALSO = {"--nnodes": ("--nodes", "nodes"), "--nproc-per-node": ("nproc",), "--standalone": ("standalone",)}
"""Other spellings, and the parameter's name if it is not the option's."""
_NODES = "Nodes to train on [default: 1, or all N of --local]."
_HELP = {
    "--nnodes": _NODES,
    "--nproc-per-node": "Workers per node [default: gpu; nodeagent-run: 1].",
    "--standalone": "One node, or all of --nnodes, is brought up here for this command.",
    "--max-restarts": "The restart budget [default: 10; nodeagent-run: 0].",
    "--run-path": "The script is run as python -u SCRIPT.",
    "--tee": "The same to files and to the console, there with a prefix.",
    "--signals-to-handle": "Signals that stop the job with its grace.",
}
"""The help of options that do here something else than torchrun's, or whose default is ours."""


class TorchLine(click.Command):
    """A command that parses options like torchrun: with ``_`` for ``-``, and by any unique beginning. Everything after
    the script belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises click.NoSuchOption, with a suggestion."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        takes = {name: not (p.is_flag or p.count) for p in options for name in p.opts}
        return super().parse_args(ctx, spelled(args, takes, ctx))


def spelled(args: Sequence[str], takes: Mapping[str, bool], ctx: click.Context | None = None) -> list[str]:
    """The words with each option before the script in its full spelling. ``takes``: option to whether it has a value.

    Raises click.NoSuchOption.
    """
    out: list[str] = []
    left = list(args)
    while left and left[0] != "--" and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = full_name(name, takes, ctx)
            out.append(name + equals + value)
            alone = not equals
        else:
            name, alone = word[:2], len(word) == 2
            out.append(word)
        if alone and takes.get(name) and left:
            out.append(left.pop(0))
    return out + left


def full_name(word: str, known: Collection[str], ctx: click.Context | None = None) -> str:
    """The option with this unique beginning. Raises click.NoSuchOption."""
    name = word.replace("_", "-")
    if name in known:
        return name
    begun = sorted(option for option in known if option.startswith(name))
    if len(begun) == 1:
        return begun[0]
    long = [option for option in known if option.startswith("--")]
    raise click.NoSuchOption(word, possibilities=begun or get_close_matches(name, long, n=1), ctx=ctx)


def torch_options(command: F) -> F:
    """Adds every option of torchrun; the parameters have its names (``nodes`` and ``nproc`` for the first two)."""
    for flag in reversed(FLAGS):
        command = _option(flag)(command)
    return command


def _option(flag: Flag) -> Callable[[F], F]:
    words = [flag.name, *([flag.short] if flag.short else []), *_ALSO.get(flag.name, ())]
    common: dict[str, Any] = {"envvar": [flag.variable, *flag.also] if flag.environ else None}
    if flag.value:
        common["metavar"] = flag.value
        common["type"] = click.IntRange(min=0) if flag.name in _NUMBERS else _CHOICES.get(flag.name, str)
    else:
        common["is_flag"] = True
    if not flag.needed:
        return click.option(*words, expose_value=False, hidden=True, callback=_note, **common)
    text = _HELP.get(flag.name) or flag.there.replace("`", "")
    return click.option(*words, help=text[0].upper() + text[1:].rstrip(".") + ".", **common)


def _note(ctx: click.Context, param: click.Parameter, _value: object) -> None:
    assert param.name is not None
    if ctx.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
        ctx.meta.setdefault(UNNEEDED, []).append(param.opts[0])


def unneeded_line(ctx: click.Context) -> str:
    """One line on the options that were given and change nothing here; empty if there are none."""
    names = set(ctx.meta.get(UNNEEDED, ()))
    given = [flag for flag in FLAGS if flag.name in names]
    if not given:
        return ""
    why = dict.fromkeys(flag.here for flag in given)
    return f"not needed here: {', '.join(flag.name for flag in given)} ({'; '.join(why)})"


def command_of(
    words: tuple[str, ...], *, module: bool, no_python: bool, run_path: bool, always_script: bool
) -> tuple[str, ...]:
    """The command for a script and its arguments. ``always_script``: the first word is a script, whatever its name;
    otherwise it is one only if it ends with .py and cannot be started. Raises ``CtlError``."""
    if run_path:
        return (interpreter(os.environ), "-u", *words)
    if module and no_python:
        raise CtlError("--module and --no-python exclude each other", Exit.USAGE, "leave out one")
    if module:
        return (interpreter(os.environ), "-u", "-m", *words)
    if no_python or not (always_script or _is_script(words[0])):
        return words
    return (interpreter(os.environ), "-u", *words)


def _is_script(word: str) -> bool:
    """Returns whether the word is a script's name; false for a whole command line in quotes, which may end with .py
    too."""
    return word.endswith(".py") and shutil.which(word) is None and (" " not in word or Path(word).exists())


def interpreter(environ: Mapping[str, str]) -> str:
    """The Python of the workers: PYTHON_EXEC, else ours if it has torch (torchrun's always has it), else the
    shell's."""
    from importlib.util import find_spec

    if named := environ.get("PYTHON_EXEC"):
        return named
    if find_spec("torch") is not None:
        return sys.executable
    return next((name for name in ("python", "python3") if shutil.which(name)), sys.executable)


def workers(text: str, with_gpus: Callable[[], bool]) -> str:
    """``--nproc-per-node`` in a job's form: N or ``gpu``. ``auto`` checks whether there are GPUs; cores are those that
    this process may use. Raises ``CtlError``."""
    if text == "auto":
        text = "gpu" if with_gpus() else "cpu"
    if text == "cpu":
        return str(len(os.sched_getaffinity(0)))
    if text == "xpu":
        raise CtlError("--nproc-per-node xpu: nodeagent counts no Intel GPUs", Exit.USAGE, "write how many workers")
    return text
