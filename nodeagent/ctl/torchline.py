"""Reading torchrun's command line: its options as click's, in all of its spellings, and the command that its script
stands for. What each option means is ``torchflags``'s; must never import torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from nodeagent.ctl.errors import CtlError, Exit
from nodeagent.ctl.torchflags import FLAGS, Flag

F = TypeVar("F", bound=Callable[..., Any])

UNNEEDED = "nodeagent.ctl.unneeded"
"""The key of ``ctx.meta`` under which the options stand that were given and are not needed."""
_NUMBERS = ("--max-restarts", "--shutdown-timeout")
_CHOICES = {"--numa-binding": click.Choice(("node", "socket", "exclusive", "core-complex"))}
_ALSO = {"--nnodes": ("--nodes", "nodes"), "--nproc-per-node": ("nproc",), "--standalone": ("standalone",)}
"""Other spellings and the parameter's name, where it is not the option's."""
_NODES = "Nodes to train on [default: 1, or all N of --local]."
_HELP = {"--nnodes": _NODES, "--nproc-per-node": "Workers per node.", "--max-restarts": "The restart budget."}


class TorchLine(click.Command):
    """A command that takes its options as torchrun does: with ``_`` for ``-``, and by any beginning that only one has.
    Everything after the script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises click.NoSuchOption, with what was meant."""
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
    """The option that is meant. Raises click.NoSuchOption."""
    name = word.replace("_", "-")
    if name in known:
        return name
    begun = sorted(option for option in known if option.startswith(name))
    if len(begun) == 1:
        return begun[0]
    long = [option for option in known if option.startswith("--")]
    raise click.NoSuchOption(word, possibilities=begun or get_close_matches(name, long, n=1), ctx=ctx)


def torch_options(command: F) -> F:
    """Every option of torchrun's; the parameters have its names (``nodes`` and ``nproc`` for the first two)."""
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
    """The command that a script and its arguments stand for. ``always_script``: the first word is a script, whatever
    it looks like; otherwise it is one only if it ends with .py and cannot be started. Raises ``CtlError``."""
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
    """No program has this name; a whole line in quotes, which may end with .py too, is not meant."""
    return word.endswith(".py") and shutil.which(word) is None and (" " not in word or Path(word).exists())


def interpreter(environ: Mapping[str, str]) -> str:
    """The Python of the workers: PYTHON_EXEC, else ours if it has torch (torchrun's always has), else the shell's."""
    from importlib.util import find_spec

    if named := environ.get("PYTHON_EXEC"):
        return named
    if find_spec("torch") is not None:
        return sys.executable
    return next((name for name in ("python", "python3") if shutil.which(name)), sys.executable)


def workers(text: str, with_gpus: Callable[[], bool]) -> str:
    """``--nproc-per-node`` as a job has it: N or ``gpu``. ``auto`` asks whether there are GPUs; cores are those that
    this process may use. Raises ``CtlError``."""
    if text == "auto":
        text = "gpu" if with_gpus() else "cpu"
    if text == "cpu":
        return str(len(os.sched_getaffinity(0)))
    if text == "xpu":
        raise CtlError("--nproc-per-node xpu: nodeagent finds NVIDIA GPUs only", Exit.USAGE, "write how many workers")
    return text
