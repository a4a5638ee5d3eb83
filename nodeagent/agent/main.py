"""``nodeagent``: the daemon's command line. Reads the config and says what is wrong with it, by an exit code
as well; what a running agent is made of is ``serve.py``'s.

Must never load what its command does not need.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nodeagent import __version__, hardware_missing

if TYPE_CHECKING:
    from nodeagent.spec.agentconfig import AgentConfig

EXIT_CONFIG = 78
"""sysexits' EX_CONFIG: systemd's RestartPreventExitStatus, since starting again would not help."""
EXIT_HELD = 75
"""sysexits' EX_TEMPFAIL: another agent is this node still, here or elsewhere, or the run folder is full. systemd starts
this one again: it is this node when the other one has ended, or there is room."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nodeagent")
def main() -> None:
    """The daemon of a node: watches its GPUs and training processes and, with its peers, keeps jobs alive."""


@main.command("check-config")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--store", is_flag=True, help="Ask the store as well: whether it lets an agent with this config in.")
def check_config(file: Path, store: bool) -> None:
    """Check a config FILE, and the tokens and certificates it names: every mistake at once, each as file:line:col.

    The exit code is 78 for a mistake, and 1 where the store cannot be used.
    """
    from nodeagent.api.remote import check_files

    config = _load(file)
    problems = check_files(config.api)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(EXIT_CONFIG)
    if store:
        import asyncio

        from nodeagent.doctor.cluster import store_problem

        if why := asyncio.run(store_problem(config)):
            click.echo(f"{file}: the store cannot be used: {why}", err=True)
            sys.exit(1)
    click.echo(f"{file}: ok")


@main.command("keygen")
@click.argument("file", type=click.Path(path_type=Path))
def keygen(file: Path) -> None:
    """Write a new cluster key to FILE, which must not exist. Every node of a cluster needs the same one."""
    from nodeagent.trust.key import KeyFileError, make

    try:
        make(file)
    except KeyFileError as error:
        click.echo(f"nodeagent: {error}", err=True)
        sys.exit(1)
    click.echo(f"{file}: a new key. Copy it to every node of the cluster (mode 0600, the agent's user)")


@main.command("diag")
@click.option("--config", "file", type=click.Path(path_type=Path), help="The config [/etc/nodeagent/nodeagent.yaml].")
@click.option("--gpu", "gpus", metavar="UUID", multiple=True, help="This GPU only (may be repeated).")
@click.option("--busy", is_flag=True, help="Check GPUs that somebody uses, too.")
@click.option("--verify", is_flag=True, help="After a repair: leave out GPUs that somebody uses.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def diag(file: Path | None, gpus: tuple[str, ...], busy: bool, verify: bool, as_json: bool) -> None:
    """Check this machine's GPUs by work (without any, its CPU): matrix product, memory, copies, a collective.

    The exit code is 0 when all passed, 1 when a check failed, 2 when nothing could be checked.
    """
    if missing := hardware_missing():
        click.echo(f"nodeagent: nothing can be checked: {missing}", err=True)
        sys.exit(2)
    from nodeagent.diag.command import diag as check

    sys.exit(check(_load(file), gpus, busy, verify, as_json))


@main.command("run")
@click.option("--config", "file", type=click.Path(path_type=Path), help="The config [/etc/nodeagent/nodeagent.yaml].")
def run(file: Path | None) -> None:
    """Run the daemon in the foreground.

    SIGTERM: be back soon. The lease process lets the workers go on until the next start (for `without_agent` at most;
    then it stops them and leaves); without anything to look after, leave at once. SIGTERM of `systemctl stop` or a
    shutdown: have the work moved away (for `drain` at most) and leave. SIGINT: stop the workers and leave. SIGHUP: read
    the config again, whole or not at all.
    """
    from nodeagent.osutil.linux import prefer

    prefer()
    import asyncio

    from nodeagent.agent.identity import IdentityNotSavedError, LockHeldError
    from nodeagent.agent.membership import IdTakenError
    from nodeagent.agent.serve import serve
    from nodeagent.osutil.stderr import lossy_stderr
    from nodeagent.spec.configfile import load_config

    config = _load(file)
    sys.stderr = lossy_stderr()
    code = 0
    try:
        asyncio.run(serve(config, lambda: load_config(file, os.environ)))
    except* (LockHeldError, IdentityNotSavedError, IdTakenError) as group:
        _echo(group)
        code = EXIT_HELD
    except* _hopeless() as group:
        _echo(group)
        code = EXIT_CONFIG
    sys.exit(code)


def _load(file: Path | None) -> AgentConfig:
    from nodeagent.spec.configfile import load_config
    from nodeagent.spec.errors import SpecError

    try:
        return load_config(file, os.environ)
    except SpecError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)


def _hopeless() -> tuple[type[Exception], ...]:
    """What starting again cannot repair; each says what to do."""
    from nodeagent.agent.identity import IdentityError
    from nodeagent.api.server import ListenError
    from nodeagent.spec.errors import CheckError
    from nodeagent.store.base import StoreRefusedError
    from nodeagent.store.endpoint import AccessError
    from nodeagent.trust.key import KeyFileError

    return (AccessError, IdentityError, KeyFileError, ListenError, StoreRefusedError, CheckError)


def _echo(group: BaseExceptionGroup[BaseException]) -> None:
    for error in _leaves(group):
        click.echo(f"nodeagent: {error}", err=True)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    out: list[BaseException] = []
    for error in group.exceptions:
        out += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return out


if __name__ == "__main__":
    main()
