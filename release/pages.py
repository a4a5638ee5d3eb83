"""Manual pages and completion scripts, drawn from the commands themselves: ``python -m release.pages FOLDER``. Must
never hold a word of its own. A process of its own, since click-man leaves its mark on the commands that it reads."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from click_man.core import write_man_pages

from nodeagent import __version__
from nodeagent.agent.main import main as nodeagent
from nodeagent.ctl.main import cli as nodeagentctl
from nodeagent.ctl.options import VARIABLE
from nodeagent.ctl.run import as_torchrun as nodeagent_run


def write_man(out: Path) -> None:
    """``nodeagent*.1`` into the folder ``out``."""
    out.mkdir(parents=True)
    commands = (("nodeagent", nodeagent), ("nodeagentctl", _eager(nodeagentctl)), ("nodeagent-run", nodeagent_run))
    with warnings.catch_warnings():  # click-man 0.6 uses what click 9 will not have; we stay below 9
        warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
        for name, command in commands:
            write_man_pages(name, command, version=__version__, target_dir=str(out))


def _eager(group: click.Group) -> click.Group:
    """A group that loads its commands on use, as one that has them."""
    context = click.Context(group)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    known = {name: command for name, command in commands.items() if command is not None}
    return click.Group(group.name, known, help=group.help, params=group.params)


def write_completion(out: Path) -> None:
    """``bash`` and ``zsh`` into the folder ``out``."""
    out.mkdir(parents=True)
    for shell in ("bash", "zsh"):
        maker = get_completion_class(shell)
        assert maker is not None
        (out / shell).write_text(maker(nodeagentctl, {}, "nodeagentctl", VARIABLE).source())


if __name__ == "__main__":
    write_man(Path(sys.argv[1]) / "man")
    write_completion(Path(sys.argv[1]) / "completion")
