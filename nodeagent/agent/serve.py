"""The agent as a whole, from its first lock to its last signal: puts the parts together, runs them, hears signals.

Owns the order in which an agent comes and goes, and which keys of its config it takes over while it runs; decides
nothing. Must never start anything anew for another config: what needs that is logged, and a restart costs training
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from pydantic import BaseModel
from structlog.typing import EventDict, WrappedLogger

from nodeagent import __version__, hardware_missing
from nodeagent.agent import systemd
from nodeagent.agent.address import AddressWatch, Take, look_again
from nodeagent.agent.context import AgentContext
from nodeagent.agent.diagnosis import Diagnosis, preflight
from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.identity import Identity, IdentityNotSavedError, LockHeldError, claim
from nodeagent.agent.leaseprocess import LocalLeaseProcess
from nodeagent.agent.loop import Agent, OnDisk, OwnMachine, Trust
from nodeagent.agent.machine import Meter, find_address, is_named, node_facts
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.notice import NoticeWatch
from nodeagent.agent.published import unchecked
from nodeagent.agent.questions import UdpPeers
from nodeagent.agent.retention import Retention
from nodeagent.agent.savedview import FileDisk, Writing
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.systemd import Notifier, comes_back, this_unit
from nodeagent.agent.undecided import Undecided
from nodeagent.lease.order import LeasePort
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Gpu
from nodeagent.osutil.clock import Clock, SystemClock
from nodeagent.osutil.lingering import end_lingering
from nodeagent.osutil.linux import boot_id, can_refuse_descriptors
from nodeagent.osutil.threads import DaemonPool, in_daemon
from nodeagent.plan.queueing.dependencies import believed
from nodeagent.pods.host import ShimHost, ShimStart
from nodeagent.pods.login import find_login
from nodeagent.spec.agentconfig import AgentConfig, LogConfig, other_name
from nodeagent.spec.errors import SpecError
from nodeagent.store.base import KeyMark
from nodeagent.store.client import connect
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.ledger import FileLedger
from nodeagent.trust.seal import Seal

if TYPE_CHECKING:  # its import is left for later
    from nodeagent.api.https import HttpsServer
    from nodeagent.api.server import ApiServer

_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
LOGS_LIMIT = 1.0
"""Seconds for a look at the folder of logs, until the agent starts without having seen it: running workers need none of
it, and the lease process looks after them for ``without_agent`` only."""
HELD_LIMIT = 5.0
"""Seconds for another agent of this node to end, or for room in the run folder. Also the pause between two starts while
neither comes: systemd waits for a tenth of a second only."""
HELD_LOOK = 0.1
"""Seconds between two tries to take its place."""
LEAVE_MARGIN = 10.0
"""Seconds beyond every bound of an orderly end, until systemd may lose its patience."""


def _end_lingering() -> None:
    """Where descriptors of others cannot be refused."""
    log = structlog.get_logger("agent")
    if can_refuse_descriptors():
        return
    try:
        end_lingering(lambda: log.warning("somebody passes descriptors to this agent that take long to close"))
    except OSError as error:
        log.warning("a descriptor that somebody passes to this agent may stop it: use Linux 6.16", why=str(error))


async def serve(config: AgentConfig, again: Callable[[], AgentConfig]) -> None:
    """Until a signal ends it in order; ``again`` reads the config anew. Raises what the parts raise at their start."""
    setup_logging(config.log)
    asyncio.get_running_loop().set_default_executor(DaemonPool())
    key = ClusterKey.load(config.cluster_key)
    clock, metrics, notifier = SystemClock(), Metrics(), Notifier(os.environ)
    async with AsyncExitStack() as closing:
        claim(config.dirs.state)
        logs = await claim_logs(config.dirs.logs)
        identity = Identity(config.dirs.run, boot_id(), config.node.id, socket.gethostname())
        closing.callback(identity.release)
        await take_in_turn(identity)
        node = identity.node
        log = structlog.get_logger("agent").bind(node=node)
        if identity.before:
            log.warning(
                "what runs here is another node's, and is stopped before this one joins", before=identity.before
            )
        elif other := other_name(config.node.id, socket.gethostname(), node):
            log.warning("this machine has another name now: the node keeps its own until the next boot", machine=other)
        _end_lingering()
        gpus, problem = await _gpus(config, first=identity.incarnation.start == 1)
        if problem:
            log.warning("GPUs", why=problem)
        address = find_address(config, os.environ)
        seal = Seal(key, config.cluster)
        mark = KeyMark(seal.digest, str(config.cluster_key))
        store = connect(config.redis, config.cluster, config.timing.store_timeout, mark)
        closing.push_async_callback(store.close)
        unit = this_unit()
        door = LeasePort(address, config.ports.rendezvous, key.derive(f"peers {config.cluster}").hex())
        process = LocalLeaseProcess(config, node, store, unit, door)
        host = ShimHost(
            node, config.dirs, config.jobs, address, config.ports.rendezvous, ShimStart(unit=unit), find_login,
            granted=process.wake,
        )  # fmt: skip
        closing.push_async_callback(host.close)
        peers = UdpPeers(door)
        closing.callback(peers.close)
        await peers.listen()
        facts = node_facts(config, address, gpus, clock.wall(), process.address())

        def changed() -> None:
            agent.publish_health()

        node_health = None
        diagnosis = Diagnosis(config, os.environ, clock, changed)
        facts = facts.model_copy(update={"figures": diagnosis.figures})
        if config.health is not None and (missing := hardware_missing()):
            log.warning("the hardware is not watched", why=missing)
        elif config.health is not None:
            from nodeagent.agent.health import NodeHealth, PodWork

            node_health = NodeHealth(
                config, node, facts, os.environ, clock, PodWork(host.status), changed=changed, counted=metrics.repaired
            )
            facts = facts.model_copy(update=node_health.facts())
        context = AgentContext(
            node, config.timing, store, host, clock, random_id=lambda: secrets.token_hex(8), process=process,
            snapshot=Snapshot(config.timing), metrics=metrics, undecided=Undecided(node, metrics.left_undecided),
        )  # fmt: skip
        trust = Trust(key, seal, Writing(key, config.cluster))
        state = config.dirs.state
        disk = OnDisk(FileDisk(state / "view.saved"), FileLedger(state / "trust.json"), state / "restarts.json")
        checks = preflight(config, node, diagnosis, clock)
        machine = OwnMachine(
            notifier.alive, Meter().measure, checks.amend if checks is not None else unchecked, diagnosis, node_health
        )
        agent = Agent(config, context, identity, facts, trust=trust, disk=disk, peers=peers, machine=machine)
        _watch_reloads(agent, host, process, notifier, again)
        watch = AddressWatch(address, None if is_named(config, os.environ) else look_again)
        helpers = (process.run, lambda: watch.run(_movers(agent, host, process, peers)))
        await _until_ended(agent, helpers, clock, notifier, MetricsPage(metrics), watch, unit, logs)
    structlog.get_logger("agent").bind(node=node).info("ended")


async def claim_logs(path: Path, how: Callable[[Path], None] = claim) -> asyncio.Future[str]:
    """The look whether the folder of logs is this agent's own: over, or under way if its disk does not answer. Its
    result is why the folder cannot be used. Raises IdentityError, now or when the look is over."""

    def why_not() -> str:
        try:
            how(path)
        except OSError as error:
            return str(error)
        return ""

    look = in_daemon(why_not, "claim")
    await asyncio.wait([look], timeout=LOGS_LIMIT)
    if not look.done():
        look.add_done_callback(_report_late)
    if why := look.result() if look.done() else f"its disk has not answered for {LOGS_LIMIT:g} s":
        structlog.get_logger("agent").error(
            "started without the folder of logs: no pod can start here until it can be used", why=why, folder=str(path)
        )
    return look


async def take_in_turn(identity: Identity) -> None:
    """Takes the identity, from an agent that ends just now if there is one. Raises LockHeldError if that does not end
    in time, IdentityNotSavedError if it could not be saved for so long, and what else ``take`` raises."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HELD_LIMIT
    while True:
        try:
            identity.take()
            return
        except (LockHeldError, IdentityNotSavedError):
            if loop.time() > until:
                raise
        await asyncio.sleep(HELD_LOOK)


async def _gpus(config: AgentConfig, *, first: bool) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs this node offers, and a sentence if they could not be read. ``first``: as of ``find_gpus``."""
    if config.node.gpus in ("none", ()):
        return (), ""
    if missing := hardware_missing():
        return (), f"{missing}: no GPU is offered"
    from nodeagent.hardware.discovery import find_gpus

    return await find_gpus(config, boot_id(), os.environ, first=first)


LIVE = ("drain", "jobs", "limits", "without_agent")
"""Keys, and sections with all that is in them, that are looked up each time they are used."""


_NO_MORE_THIS_NODE = "a restarted agent is not this node any more, and what trains here is stopped: drain it before"
NOT_FOR_A_RESTART = {
    "timing": "an agent with another timing than the cluster's is refused, and what trains on its node is stopped: "
    "take the change back (for all nodes: docs/operations.md, Another timing)",
    "cluster_key": "an agent with another key is refused, and what trains on its node is stopped: take the change back "
    "(for all nodes: docs/operations.md, Another key of the cluster)",
    "cluster": _NO_MORE_THIS_NODE,
    "dirs.run": _NO_MORE_THIS_NODE,
    "node.id": _NO_MORE_THIS_NODE,
    "redis.url": "systemctl restart nodeagent, but only if it leads to the same Redis: agents of one cluster that are "
    "with two of them run each job twice (docs/operations.md, Another Redis)",
}
"""Keys, and sections with all that is in them, of which another value is no matter of a restart alone: what to do."""
RESTART = "systemctl restart nodeagent: training goes on"


def differing(old: BaseModel, new: BaseModel, prefix: str = "") -> list[str]:
    """The keys, written as ``jobs.standbys``, whose values are not the same."""
    found: list[str] = []
    for name in type(old).model_fields:
        one, other = getattr(old, name), getattr(new, name)
        if one != other:
            if isinstance(one, BaseModel) and isinstance(other, BaseModel):
                found += differing(one, other, f"{prefix}{name}.")
            else:
                found.append(prefix + name)
    return found


def reload(load: Callable[[], AgentConfig], old: AgentConfig, take: Callable[[AgentConfig], None]) -> str:
    """Read the config anew and ``take`` it if it is right and every change can be made now. What became of it, in one
    line; logged as well."""
    log = structlog.get_logger("reload")
    try:
        new = load()
    except SpecError as error:
        log.error("config not reloaded: it is wrong", why=str(error))
        return "config not reloaded: it is wrong, see the log"
    changed = differing(old, new)
    stuck = [key for key in changed if key.partition(".")[0] not in LIVE]
    if stuck:
        advice = _advice(stuck)
        text = f"config not reloaded: {', '.join(stuck)} needs {'more than a restart' if advice else 'a restart'}"
        log.error(text, fix=advice or RESTART)
        return text
    take(new)
    log.info("config reloaded", changed=changed)
    return f"config reloaded: {', '.join(changed) or 'nothing changed'}"


def _advice(keys: Iterable[str]) -> str:
    """What to do about these keys that others have to agree on; empty if a restart does."""
    names = (name for key in keys for name in (key, key.partition(".")[0]))
    return "; ".join(dict.fromkeys(NOT_FOR_A_RESTART[name] for name in names if name in NOT_FOR_A_RESTART))


def _watch_reloads(
    agent: Agent, host: ShimHost, process: LocalLeaseProcess, notifier: Notifier, again: Callable[[], AgentConfig]
) -> None:
    """SIGHUP."""

    def take(new: AgentConfig) -> None:
        agent.reconfigure(new)
        host.reconfigure(new.jobs)
        process.config = new

    def reload_asked() -> None:
        notifier.status(reload(again, agent.config, take))

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_asked)


def _movers(agent: Agent, host: ShimHost, process: LocalLeaseProcess, peers: UdpPeers) -> Take:
    """All that has to know where the node is reached, but for https, which waits for the move by itself."""

    async def take(address: str, gloo: str | None) -> None:
        await peers.relocate(address)
        process.relocate(address)
        host.relocate(address)
        agent.advert.address(address, gloo)

    return take


async def _until_ended(
    agent: Agent,
    others: Iterable[Callable[[], Coroutine[None, None, None]]],
    clock: Clock,
    notifier: Notifier,
    metrics: MetricsPage,
    address: AddressWatch,
    unit: str,
    logs: asyncio.Future[str],
) -> None:
    """The agent and its helpers, ``others`` among them, until a signal ends them in order, or ``logs`` says that they
    are another user's."""
    stop, end, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    loop.add_signal_handler(signal.SIGINT, leave.set)

    async def end_in_order() -> None:
        await end.wait()
        if not await comes_back(unit):
            patience = agent.config.drain + agent.config.timing.stuck + agent.config.timing.kill + LEAVE_MARGIN
            notifier.stopping(patience)
            await systemd.drain(agent, clock)
            leave.set()
            return
        notifier.stopping(agent.config.without_agent + LEAVE_MARGIN)
        await systemd.restart(agent, clock)
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(agent.run(stop))
        helpers = [
            *(tasks.create_task(other()) for other in others),
            tasks.create_task(_log_joined(agent, notifier)),
            tasks.create_task(_serve_api(agent, metrics, address, notifier.ready)),
            tasks.create_task(_watch_health(agent)),
            tasks.create_task(systemd.come_back(agent)),
            tasks.create_task(_watch_notice(agent, clock)),
            tasks.create_task(_retention(agent, clock).run()),
            tasks.create_task(_claimed(logs)),
        ]
        endings = [tasks.create_task(_leave(agent, leave, stop)), tasks.create_task(end_in_order())]
        structlog.get_logger("agent").bind(node=agent.node).info(
            "started", pid=os.getpid(), address=address.address, version=__version__
        )
        await running
        notifier.stopping()
        for task in helpers + endings:
            task.cancel()


async def _claimed(logs: asyncio.Future[str]) -> None:
    """Raises IdentityError if they are another user's."""
    await asyncio.shield(logs)


def _report_late(look: asyncio.Future[str]) -> None:
    if look.cancelled() or look.exception() is not None:
        return  # ``_claimed`` has that
    log = structlog.get_logger("agent")
    if why := look.result():
        log.error("the folder of logs cannot be used: no pod can start here", why=why)
    else:
        log.info("the folder of logs answers")


def _retention(agent: Agent, clock: Clock) -> Retention:
    def view() -> tuple[Mapping[str, JobRecord], Collection[str], float] | None:
        if not agent.certain:
            return None
        cluster = agent.cluster()
        return cluster.jobs, {*agent.pods(), *cluster.unread}, believed(cluster, clock.wall())

    return Retention(agent.config.dirs, lambda: agent.config.jobs.retention, view)


async def _serve_api(agent: Agent, metrics: MetricsPage, address: AddressWatch, ready: Callable[[], None]) -> None:
    """The API, until cancelled; ``ready`` is called when it answers. Imported after the first beat, and in a thread:
    running workers wait for the lease, people can wait."""

    def load() -> tuple[type[ApiServer], type[HttpsServer]]:
        from nodeagent.api.https import HttpsServer
        from nodeagent.api.server import ApiServer

        return ApiServer, HttpsServer

    await agent.tried.wait()
    server_type, https_type = await asyncio.to_thread(load)
    async with server_type(agent, metrics, notify=agent.advert.http) as server:
        ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run())
            while True:
                https = https_type(agent, metrics, address.address, agent.advert.https, throttle=server.throttle)
                serving = tasks.create_task(https.run())
                await address.moves()
                serving.cancel()
                await asyncio.wait({serving})


async def _watch_health(agent: Agent) -> None:
    """Until cancelled; not before the lease is safe."""
    await agent.joined.wait()
    node_health = agent.node_health
    if node_health is None:
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node_health.monitor.run())
        if node_health.repairer is not None:
            tasks.create_task(node_health.repairer.run(agent))


async def _watch_notice(agent: Agent, clock: Clock) -> None:
    """Until cancelled."""
    if (config := agent.config.node.notice) is not None:
        await agent.joined.wait()
        await NoticeWatch(config, os.environ, clock.wall, agent.advert.notice).run()


async def _log_joined(agent: Agent, notifier: Notifier) -> None:
    """What ``systemctl status`` shows until the node has joined: why not. The unit is ready before that, as soon as the
    agent can be asked: a start that waited for a store with another password would hang without a word."""
    await agent.tried.wait()
    while not agent.joined.is_set():
        notifier.status(f"node {agent.node} has not joined its cluster: {agent.health().reason}")
        await asyncio.sleep(agent.config.timing.heartbeat)
    notifier.status(f"node {agent.node} has joined")


async def _leave(agent: Agent, leave: asyncio.Event, stop: asyncio.Event) -> None:
    await leave.wait()
    await agent.leave()
    stop.set()


def setup_logging(config: LogConfig) -> None:
    """Configure structlog for this process, once: lines on standard error, for machines as JSON."""
    console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
        if console
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        last,
    ]
    if "JOURNAL_STREAM" in os.environ and not console:
        processors.append(_journal_priority)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _journal_priority(_logger: WrappedLogger, method: str, line: EventDict) -> str:
    """journald reads a leading <N> as the line's priority."""
    return f"<{_PRIORITY.get(method, 6)}>{line}"
