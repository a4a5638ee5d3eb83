"""``local``: a development cluster of real agents on this machine. Uses its supervisor, not an agent: these commands
switch power, not work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nodeagent.ctl.options import NODE, Duration, output_option
from nodeagent.ctl.output import Column, dump, fold, show, terminal_width
from nodeagent.ctl.terminal import echo, local_failures

if TYPE_CHECKING:
    from nodeagent.local.registry import LocalCluster

Json = dict[str, Any]


def _starts(node: Json) -> str:
    """How often its agent was started; apart from it, how often that was impossible."""
    return f"{node['starts']}" + (f" ({node['unstarted']} failed)" if node["unstarted"] else "")


COLUMNS = (
    Column("NAME", lambda n: n["name"]),
    Column("POWER", lambda n: n["power"]),
    Column("STATE", lambda n: n["state"]),
    Column("AGENT", lambda n: n["agent_pid"]),
    Column("STARTS", _starts),
    Column("LAST-END", lambda n: n["last_end"], text=True),
    Column("GPUS", lambda n: len(n["gpus"]), wide=True),
    Column("SOCKET", lambda n: n["socket"], wide=True),
    Column("LOG", lambda n: n["log"], wide=True),
)

name_option = click.option("--name", metavar="NAME", help="The cluster, where there are several.")


def _cluster(name: str | None) -> LocalCluster:
    from nodeagent.local.layout import LocalFolders
    from nodeagent.local.registry import cluster

    return cluster(LocalFolders.of_user(), name)


def _ask(name: str | None, do: str, **more: object) -> Json:
    from nodeagent.local.control import ask

    return ask(_cluster(name).layout.control, {"do": do, **more})


@click.group(short_help="A development cluster of real agents on this machine.")
def local() -> None:
    """A development cluster on this machine: a private Redis and real agents, each a node of its own, supervised as
    systemd would. Other commands find it by themselves."""


@local.command(short_help="Bring a cluster up.")
@click.option("--nodes", "count", type=click.IntRange(1, 64), required=True, metavar="N", help="How many nodes.")
@click.option("--name", default="default", show_default=True, help="The cluster's name.")
def up(count: int, name: str) -> None:
    """Bring up a cluster of N nodes that stays until `local down`; return when all have joined."""
    from nodeagent.local.session import up as bring_up

    with local_failures():
        cluster = bring_up(count, name)
    for node in cluster.nodes():
        echo(f"node/{node}")
    echo(
        f"cluster {name} is up; its logs are in {cluster.data}\n"
        f"  next: nodeagentctl nodes; nodeagentctl submit FILE; nodeagentctl local kill {cluster.nodes()[-1]}; "
        f"nodeagentctl local down",
        err=True,
    )


@local.command(short_help="Add a node.")
@name_option
def add(name: str | None) -> None:
    """Add a node to the cluster; return when it has joined."""
    with local_failures():
        node = _ask(name, "add")["node"]
        _await(name, node)
    echo(f"node/{node}")


@local.command(short_help="Cut a node's power.")
@click.argument("node", type=NODE, metavar="NODE")
@name_option
def kill(node: str, name: str | None) -> None:
    """Cut the power of NODE: its agent, shims and workers are killed at once, and it stays down until `local start`."""
    with local_failures():
        reply = _ask(name, "kill", node=node)
    echo(
        f"node/{reply['node']} " + (f"killed ({reply['killed']} processes)" if reply["changed"] else "was down already")
    )


@local.command(short_help="Switch a node's power on again.")
@click.argument("node", type=NODE, metavar="NODE")
@name_option
def start(node: str, name: str | None) -> None:
    """Switch the power of NODE on again, as after a reboot; return when it has joined."""
    with local_failures():
        reply = _ask(name, "start", node=node)
        _await(name, reply["node"])
    echo(f"node/{reply['node']} " + ("started" if reply["changed"] else "was on already"))


@local.command(short_help="Restart a node's agent, as planned.")
@click.argument("node", type=NODE, metavar="NODE")
@click.option("--away", type=Duration(), default="0s", metavar="DURATION", help="Start it again only after this long.")
@name_option
def restart(node: str, away: float, name: str | None) -> None:
    """Restart the agent of NODE as `systemctl restart` or an upgrade does: it is asked to end (SIGTERM), and started
    again. Its workers train on meanwhile (for 30 s at most). Does not wait."""
    with local_failures():
        reply = _ask(name, "restart", node=node, away=away)
    echo(f"node/{reply['node']} restarting (agent {reply['agent_pid']} was asked to end)")


@local.command(short_help="Show the cluster's processes.")
@name_option
@output_option
def status(name: str | None, fmt: str) -> None:
    """Show the nodes of the cluster: power, agent, how often it was started (and how often that failed: no process),
    how it last ended."""
    from nodeagent.local.control import agent_ready

    with local_failures():
        found = _ask(name, "status")
    for node in found["nodes"]:
        if node["power"] == "off" or node["failed"]:
            node["state"] = "failed" if node["failed"] else "down"
        else:
            node["state"] = "ready" if agent_ready(Path(node["socket"]))[0] else "starting"
    if fmt in ("json", "yaml"):
        dump({"apiVersion": "nodeagent/v1"} | {k: v for k, v in found.items() if k != "ok"}, fmt)
        return
    if fmt != "name":
        redis = found["redis"]
        line = (
            f"cluster {found['name']}, supervisor {found['pid']}, redis {redis['pid'] or 'starting'} "
            f"({redis['url']}), logs in {found['data']}"
        )
        for piece in fold(line, terminal_width(), 2):
            echo(piece, err=True)
    show({"items": found["nodes"]}, fmt, "node", COLUMNS)


@local.command(short_help="End the cluster.")
@name_option
@click.option("--keep-logs", is_flag=True, help="Keep the folder with the logs.")
def down(name: str | None, keep_logs: bool) -> None:
    """End the cluster and whatever runs on it: no process, socket or folder of it is left."""
    from nodeagent.local.session import down as take_down

    with local_failures():
        cluster = _cluster(name)
        take_down(cluster, keep_logs=keep_logs)
    echo(f"cluster {cluster.name} is down" + (f"; its logs are in {cluster.data}" if keep_logs else ""))


def _await(name: str | None, node: str) -> None:
    from nodeagent.local.session import JOIN_TIMEOUT, wait_joined

    wait_joined(_cluster(name), JOIN_TIMEOUT, {node})
