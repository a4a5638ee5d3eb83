"""``nodeagent``: the daemon's command line. Puts the parts together, handles signals, says what went wrong; decides
nothing."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nodeagent import __version__

if TYPE_CHECKING:
    from nodeagent.agent.clock import Clock
    from nodeagent.agent.identity import Identity
    from nodeagent.agent.loop import Agent
    from nodeagent.agent.metrics import Metrics
    from nodeagent.agent.notify import Notifier
    from nodeagent.agent.standin import Split
    from nodeagent.api.https import Https
    from nodeagent.api.server import ApiServer
    from nodeagent.spec.agentconfig import AgentConfig
    from nodeagent.store.base import Store

LEAVE_MARGIN = 10.0
"""Seconds beyond every bound of an orderly end, until systemd may lose its patience."""
EXIT_CONFIG = 78
"""sysexits' EX_CONFIG: systemd's RestartPreventExitStatus, since starting again would not help."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nodeagent")
def main() -> None:
    """The daemon of a node: watches its GPUs and training processes and, with its peers, keeps jobs alive."""


@main.command("check-config")
@click.argument("file", type=click.Path(path_type=Path))
def check_config(file: Path) -> None:
    """Check a config FILE, and the tokens and certificates it names: every mistake at once, each as file:line:col."""
    from nodeagent.api.checkfiles import check_files

    problems = check_files(_load(file).api)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(EXIT_CONFIG)
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
    from nodeagent.diag.command import diag as check

    sys.exit(check(_load(file), gpus, busy, verify, as_json))


@main.command("run")
@click.option("--config", "file", type=click.Path(path_type=Path), help="The config [/etc/nodeagent/nodeagent.yaml].")
def run(file: Path | None) -> None:
    """Run the daemon in the foreground.

    SIGTERM: be back soon. A stand-in looks after the workers until the next start (for `stand_in` at most; then it
    stops them and leaves); without anything to look after, leave at once. SIGTERM of `systemctl stop` or a shutdown:
    have the work moved away (for `drain` at most) and leave. SIGINT: stop the workers and leave. SIGHUP: read the
    config again, whole or not at all.
    """
    gc.disable()  # until all is imported: that stays, and looking through it again and again costs a fifth of the start
    # Before anything else is imported: structlog would load it for tracebacks (3 MB, 60 ms).
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    from nodeagent.workers.linux import prefer

    prefer()  # what comes next takes a quarter of a second of CPU time, and running workers wait for its end
    from nodeagent.agent.standin import Split
    from nodeagent.spec.configfile import load_config

    config = _load(file)
    code = 0
    try:
        split = Split()
        code = split.run(_serve(config, lambda: load_config(file, os.environ), split))
    except* _hopeless() as group:
        for error in _leaves(group):
            click.echo(f"nodeagent: {error}", err=True)
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
    """What starting again cannot mend; each says what to do."""
    from nodeagent.agent.identity import IdentityError
    from nodeagent.agent.lease import IdTakenError
    from nodeagent.api.server import ListenError
    from nodeagent.spec.errors import CheckError
    from nodeagent.store.base import StoreRefusedError
    from nodeagent.store.door import AccessError
    from nodeagent.trust.key import KeyFileError

    return (AccessError, IdentityError, IdTakenError, KeyFileError, ListenError, StoreRefusedError, CheckError)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    out: list[BaseException] = []
    for error in group.exceptions:
        out += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return out


async def _serve(config: AgentConfig, again: Callable[[], AgentConfig], split: Split) -> int:
    """Everything from the first lock to the last signal; ``again`` reads the config anew."""
    import structlog

    from nodeagent.agent.care import Care
    from nodeagent.agent.clock import SystemClock
    from nodeagent.agent.diagnosis import Diagnosis
    from nodeagent.agent.gpus import find_gpus
    from nodeagent.agent.identity import Identity
    from nodeagent.agent.kept import FileDisk
    from nodeagent.agent.logs import setup_logging
    from nodeagent.agent.loop import Agent
    from nodeagent.agent.machine import find_address, node_facts
    from nodeagent.agent.metrics import Metrics
    from nodeagent.agent.notify import Notifier
    from nodeagent.agent.peers import UdpPeers
    from nodeagent.agent.preflight import preflight
    from nodeagent.agent.reload import reload
    from nodeagent.agent.systemd import this_unit
    from nodeagent.agent.usage import Meter
    from nodeagent.spec.agentconfig import node_id
    from nodeagent.store.client import RedisStore
    from nodeagent.trust.key import ClusterKey
    from nodeagent.trust.ledger import FileLedger
    from nodeagent.workers.host import ShimHost
    from nodeagent.workers.linux import boot_id

    setup_logging(config.log)
    key = ClusterKey.load(config.cluster_key)
    node = node_id(config, socket.gethostname())
    log = structlog.get_logger("agent").bind(node=node)
    clock = SystemClock()
    identity = Identity(config.dirs.run, boot_id())
    identity.queue()
    gpus, problem = await find_gpus(config, boot_id(), os.environ)
    if problem:
        log.warning("GPUs", why=problem)
    address = find_address(config, os.environ)
    peers = UdpPeers(key.derive("peers"))
    facts = node_facts(config, address, gpus, clock.wall(), await peers.listen(address, config.ports.rendezvous))
    logs = config.jobs.logs
    host = ShimHost(
        node, config.dirs.run, config.dirs.state, config.dirs.logs, address, config.ports.rendezvous,
        logs.max_bytes, logs.keep, config.jobs.allow_root, unit=(unit := this_unit()),
    )  # fmt: skip
    store = RedisStore(config.redis, config.cluster, config.timing.store_timeout)
    gc.freeze()
    gc.enable()
    await _until_it_is_our_turn(store, identity, clock, config.timing.heartbeat)
    notifier = Notifier(os.environ)
    metrics = Metrics()
    incarnation = identity.take()  # from here on a stand-in is dead, and what it wrote is there to be read
    care = None

    def changed() -> None:
        agent.tell_health()

    diagnosis = Diagnosis(config, os.environ, clock, changed)
    facts = facts.model_copy(update={"figures": diagnosis.figures})
    if config.health is not None:
        care = Care(config, config.health, facts, os.environ, clock, host.status, changed, node, metrics.repaired)
        facts = facts.model_copy(update=care.facts())
    agent = Agent(
        config, node, facts, key=key, ledger=FileLedger(config.dirs.state / "trust.json"),
        disk=FileDisk(config.dirs.state / "jobs.kept"), store=store, host=host, clock=clock, identity=identity,
        incarnation=incarnation, metrics=metrics, peers=peers,
        progress=notifier.alive, meter=Meter().measure, care=care, diagnosis=diagnosis,
        checked=preflight(config, node, diagnosis, clock),
    )  # fmt: skip

    def take(new: AgentConfig) -> None:
        agent.reconfigure(new)
        host.reconfigure(new.jobs)

    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, lambda: notifier.status(reload(again, agent.config, take))
    )
    try:
        await _until_ended(agent, identity, split, clock, notifier, metrics, address, unit)
    finally:
        peers.close()
        await host.close()
        await store.close()
        identity.release()
    log.info("ended")
    return 0


async def _until_ended(
    agent: Agent, identity: Identity, split: Split, clock: Clock, notifier: Notifier, metrics: Metrics, address: str,
    unit: str,
) -> None:  # fmt: skip
    """The agent and its helpers, until a signal ends them in order."""
    import structlog

    from nodeagent.agent import goodbye
    from nodeagent.agent.standin import end_as_planned
    from nodeagent.agent.systemd import comes_back

    stop, end, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    loop.add_signal_handler(signal.SIGINT, leave.set)

    async def make_stand_in() -> int:
        pid = await split(identity.hand_to)
        for number in (signal.SIGTERM, signal.SIGINT):  # whoever tells a stand-in to end means it
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, leave.set)
        return pid

    async def end_in_order() -> None:
        await end.wait()
        if not await comes_back(unit):
            patience = agent.config.drain + agent.config.timing.stuck + agent.config.timing.kill + LEAVE_MARGIN
            notifier.stopping(patience)
            await goodbye.drain(agent, clock)
            leave.set()
            return
        notifier.stopping()
        notifier.hush()
        for task in helpers:
            task.cancel()
        await asyncio.wait(helpers)
        await end_as_planned(
            agent, split=make_stand_in, awaited=lambda: identity.awaited, hold_off=identity.hold_off, clock=clock
        )
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(agent.run(stop))
        helpers = [
            tasks.create_task(_say_ready(agent, notifier, agent.node)),
            tasks.create_task(_serve_api(agent, metrics, address)),
            tasks.create_task(_watch_health(agent)),
            tasks.create_task(goodbye.come_back(agent)),
        ]
        endings = [tasks.create_task(_leave(agent, leave, stop)), tasks.create_task(end_in_order())]
        structlog.get_logger("agent").bind(node=agent.node).info(
            "started", pid=os.getpid(), address=address, version=__version__
        )
        await running
        notifier.stopping()
        for task in helpers + endings:
            task.cancel()


async def _until_it_is_our_turn(store: Store, identity: Identity, clock: Clock, pause: float) -> None:
    """While a stand-in is there: a start that cannot join would take the workers' time away from them, and one that
    comes too early what the stand-in alone knows."""
    import structlog

    from nodeagent.store.base import StoreUnavailableError

    told = False
    while identity.stood_in_for:
        try:
            await store.request("")
        except StoreUnavailableError as error:
            if not told:
                structlog.get_logger("agent").warning("waits for the store, while a stand-in goes on", why=str(error))
            told = True
        else:
            if clock.now() >= identity.held_off:
                return
        await asyncio.sleep(pause / 2)


async def _serve_api(agent: Agent, metrics: Metrics, address: str) -> None:
    """The API, until cancelled. Imported after the first beat, and in a thread: running workers wait for the lease,
    people can wait."""

    def load() -> tuple[type[ApiServer], type[Https]]:
        from nodeagent.api.https import Https
        from nodeagent.api.server import ApiServer

        return ApiServer, Https

    await agent.tried.wait()
    server_type, https_type = await asyncio.to_thread(load)
    async with server_type(agent, metrics) as server:
        agent.advert.http(server.http_url)
        _settle_memory()
        await https_type(agent, metrics, address, agent.advert.https).run()
        await asyncio.Event().wait()


async def _watch_health(agent: Agent) -> None:
    """Until cancelled; not before the lease is safe."""
    await agent.joined.wait()
    care = agent.care
    if care is None:
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(care.monitor.run())
        if care.mender is not None:
            tasks.create_task(care.mender.run(agent))


async def _say_ready(agent: Agent, notifier: Notifier, node: str) -> None:
    await agent.joined.wait()
    notifier.ready()
    notifier.status(f"node {node} has joined")


async def _leave(agent: Agent, leave: asyncio.Event, stop: asyncio.Event) -> None:
    await leave.wait()
    await agent.leave()
    stop.set()


def _settle_memory() -> None:
    """Give back what importing left behind, where the C library is glibc."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main()
