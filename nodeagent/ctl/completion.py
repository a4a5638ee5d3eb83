"""``completion``: the script that makes a shell complete commands, options, jobs and nodes."""

from __future__ import annotations

import click

VARIABLE = "_NODEAGENTCTL_COMPLETE"


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(("bash", "zsh")))
def completion(shell: str) -> None:
    """Print the completion script of SHELL. For this session: `source <(nodeagentctl completion bash)`."""
    from click.shell_completion import get_completion_class

    from nodeagent.ctl.main import cli

    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(cli, {}, "nodeagentctl", VARIABLE).source())
