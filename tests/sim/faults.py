"""Random faults and operators: what a simulation injects, drawn from the run's own generator so that a seed replays
it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from nodeagent.api.intents import Verb
from nodeagent.model.health import Severity, Verdict
from nodeagent.model.job import TERMINAL
from nodeagent.model.node import Cordon
from nodeagent.store import codec
from nodeagent.store.base import StoreRefusedError
from tests.inprocess.data import Expiring, SortedSet
from tests.sim.cluster import Node, SimCluster

GARBAGE = ("", "{", "x", "\x00\x7f", "[]")
"""What somebody writes into a field by hand, and nobody can read there."""
TEXTS = {*codec.JOB_TEXT, *(f"generation_{name}" for name in codec.GENERATION_TEXT), "active_id"}
"""Fields of a job in which these can be read."""
NOTICED = 15.0
"""Seconds in which damage is found that some agent would find."""
Fault = Callable[[SimCluster], Awaitable[None]]


def _any(cluster: SimCluster) -> Node:
    return cluster.rng.choice(list(cluster.nodes.values()))


async def kill_worker(cluster: SimCluster) -> None:
    node = _any(cluster)
    pods = [p for p in node.machine.pods.values() if p.alive]
    if pods and not node.machine.frozen.closed:
        pod = cluster.rng.choice(pods)
        local = cluster.rng.choice(sorted(pod.alive))
        code, signal = cluster.rng.choice([(None, 9), (None, 11), (1, None), (101, None)])
        node.machine.worker_ends(pod.uid, local, code=code, signal=signal)


async def leave_group(cluster: SimCluster) -> None:
    """Workers start processes that leave their groups and sessions."""
    machine = _any(cluster).machine
    for uid, pod in machine.pods.items():
        for local in sorted(pod.alive)[:1]:
            machine.leave_group(uid, local)


async def kill_shim(cluster: SimCluster) -> None:
    node = _any(cluster)
    if node.machine.pods and not node.machine.frozen.closed:
        node.machine.kill_shim(cluster.rng.choice(sorted(node.machine.pods)))


async def hang_shim(cluster: SimCluster) -> None:
    """It carries out nothing and says nothing, but its watchdog fences its workers; in the end its host kills it."""
    machine = _any(cluster).machine
    if machine.pods and not machine.frozen.closed:
        machine.hang_shim(cluster.rng.choice(sorted(machine.pods)))


async def restart_agent(cluster: SimCluster) -> None:
    node = _any(cluster)
    await node.kill_agent()
    await asyncio.sleep(cluster.rng.choice([0.1, 1.0, 2.0, 5.0, 12.0, 40.0]))
    node.thaw()
    node.start_agent()


async def restart_agent_as_planned(cluster: SimCluster) -> None:
    """The next start may come too late."""
    node = _any(cluster)
    node.end_agent()
    await asyncio.sleep(cluster.rng.choice([0.1, 2.0, 12.0, 25.0, 45.0]))
    node.thaw()
    await node.ended()
    node.start_agent()


async def kill_lease(cluster: SimCluster) -> None:
    """The lease process, once or several times; or for longer than a fence."""
    node = _any(cluster)
    for _ in range(cluster.rng.choice([1, 1, 5])):
        node.lease.kill()
        await asyncio.sleep(cluster.rng.uniform(0.05, 0.5))
    if cluster.rng.random() < 0.2:
        node.lease.end()
        await asyncio.sleep(cluster.rng.choice([1.0, 3.0, 6.0]))
        node.lease.start()


async def freeze_lease(cluster: SimCluster) -> None:
    node = _any(cluster)
    node.lease.gate.close()
    await asyncio.sleep(cluster.rng.choice([0.3, 2.0, 3.5]))
    if not node.machine.frozen.closed:
        node.lease.gate.open()


async def cut_power(cluster: SimCluster) -> None:
    node = _any(cluster)
    await node.power_cut(disk_lost=cluster.rng.random() < 0.3)
    await asyncio.sleep(cluster.rng.choice([0.5, 2.0, 10.0]))
    node.power_on()


async def freeze_agent(cluster: SimCluster) -> None:
    node = _any(cluster)
    node.freeze_agent()
    await asyncio.sleep(cluster.rng.choice([0.3, 2.0, 3.5, 12.0]))
    node.thaw()


async def freeze_machine(cluster: SimCluster) -> None:
    node = _any(cluster)
    node.freeze_machine()
    await asyncio.sleep(cluster.rng.choice([0.3, 2.0, 3.5, 12.0]))
    node.thaw()


async def cut_link(cluster: SimCluster) -> None:
    link = _any(cluster).link
    setattr(link, cluster.rng.choice(["cut", "cut_replies"]), True)
    await asyncio.sleep(cluster.rng.choice([0.4, 2.0, 4.0, 15.0]))
    link.cut = link.cut_replies = False


async def cut_store(cluster: SimCluster) -> None:
    """The store is away: for everybody, or for a part of the cluster."""
    nodes = list(cluster.nodes.values())
    some = nodes if cluster.rng.random() < 0.4 else cluster.rng.sample(nodes, cluster.rng.randint(1, len(nodes)))
    for node in some:
        node.link.cut = True
    await asyncio.sleep(cluster.rng.choice([1.0, 2.5, 6.0, 20.0]))
    cluster.rng.shuffle(some)
    for node in some:
        node.link.cut = False
        await asyncio.sleep(cluster.rng.choice([0.0, 0.0, 0.3, 2.0]))


async def away_and_killed(cluster: SimCluster) -> None:
    """The store is away for all, and meanwhile agents and lease processes are killed, and come back sooner or later."""
    nodes = list(cluster.nodes.values())
    for node in nodes:
        node.link.cut = True
    await asyncio.sleep(cluster.rng.choice([0.0, 1.0, 3.0]))
    some = cluster.rng.sample(nodes, cluster.rng.randint(1, len(nodes)))
    for node in some:
        if cluster.rng.random() < 0.6:
            await node.kill_agent()
        if cluster.rng.random() < 0.6:
            node.lease.kill()
    await asyncio.sleep(cluster.rng.choice([0.1, 2.0, 6.0]))
    cluster.rng.shuffle(nodes)
    for node in nodes:
        node.link.cut = False
        if node in some:
            node.thaw()
            node.start_agent()
        await asyncio.sleep(cluster.rng.choice([0.0, 0.0, 0.3]))


async def cut_peers(cluster: SimCluster) -> None:
    """Some agents cannot hear some others, both ways or one way."""
    names = list(cluster.nodes)
    pairs = [(cluster.rng.choice(names), cluster.rng.choice(names)) for _ in range(cluster.rng.randint(1, len(names)))]
    if cluster.rng.random() < 0.5:
        pairs += [(b, a) for a, b in pairs]
    cluster.net.cut.update(pairs)
    cluster.net.loss = cluster.rng.choice([0.0, 0.3])
    await asyncio.sleep(cluster.rng.uniform(1, 15))
    cluster.net.cut.difference_update(pairs)
    cluster.net.loss = 0.0


async def bad_link(cluster: SimCluster) -> None:
    """Requests or replies are lost, slow, up to ten leases late, or take effect twice."""
    link = _any(cluster).link
    bad = [(0.3, 0.0, 0.0), (0.0, 0.2, 0.0), (0.1, 0.1, 0.1), (0.0, 10.0, 0.0), (0.0, 0.0, 0.3)]
    link.loss, link.slow, link.twice = cluster.rng.choice(bad)
    await asyncio.sleep(cluster.rng.uniform(1, 10))
    link.loss = link.slow = link.twice = 0.0


async def cut_workers(cluster: SimCluster) -> None:
    """The workers of two nodes lose each other, and nobody else does: both report a failed collective."""
    jobs = [j for j in cluster.server.state.jobs.values() if j.phase == "running" and j.generation is not None]
    if not jobs:
        return
    job = cluster.rng.choice(jobs)
    members = sorted(job.generation.members) if job.generation is not None else []
    for name in cluster.rng.sample(members, min(2, len(members))):
        machine = cluster.nodes[name].machine
        if not machine.frozen.closed:
            machine.worker_ends(job.uid, 0, code=1, error="RuntimeError: Connection closed by peer [10.0.0.9]:4242")


async def freeze_store(cluster: SimCluster) -> None:
    cluster.frozen.close()
    await asyncio.sleep(cluster.rng.choice([0.3, 1.2, 2.5, 8.0]))
    cluster.frozen.open()


async def overload_store(cluster: SimCluster) -> None:
    """Its one thread has more to do than it can, whoever asks."""
    cluster.thread.cost = cluster.rng.choice([0.01, 0.05, 0.2])
    await asyncio.sleep(cluster.rng.choice([0.5, 3.0, 12.0]))
    cluster.thread.cost = 0.0


async def restart_store(cluster: SimCluster) -> None:
    cluster.server.restart()


async def empty_store(cluster: SimCluster) -> None:
    await cluster.empty_store()


async def roll_back_store(cluster: SimCluster) -> None:
    """As a failover does, to a machine with another clock. Within the assumption of ADR 36: of those who have read of a
    generation that it has lost, and are there, one reaches it in time."""
    seconds = cluster.rng.choice([0.01, 0.3, 1.0, 5.0])
    step = cluster.rng.choice([0.0, 0.0, -30.0, -0.1, 0.8, 30.0])
    lost = await cluster.roll_back_store(seconds, same_process=cluster.rng.random() < 0.3)
    cluster.clock_step += step
    await _reached_by_a_reader(cluster, lost)


async def damage_store(cluster: SimCluster) -> None:
    """Some of its keys are removed by hand."""
    if (there := _damageable(cluster)) and cluster.settled():
        chosen = cluster.rng.sample(there, min(len(there), cluster.rng.choice([1, 1, 2, 4])))
        await _reached_by_a_reader(cluster, await cluster.damage_store(dict.fromkeys(chosen)), NOTICED)


async def overwrite_store(cluster: SimCluster) -> None:
    """One of its keys is written over by hand: by another type, by a field that nobody can read, by what the key held a
    while ago, or by what another record holds."""
    if not (there := _damageable(cluster)):
        return
    key, way = cluster.rng.choice(there), cluster.rng.choice(["type", "garbage", "older", "other"])
    value = cluster.server.value(key)
    if way == "type":
        value = cluster.rng.choice([Expiring("x", None), SortedSet() if isinstance(value, dict) else {"x": "x"}])
    elif way == "garbage" and isinstance(value, dict):
        value[cluster.rng.choice(sorted(value.keys() - TEXTS))] = cluster.rng.choice(GARBAGE)
    elif way == "other" and key.startswith(("job:", "node:")):
        records = [f"job:{uid}" for uid in cluster.server.state.jobs] + [f"node:{name}" for name in cluster.nodes]
        value = cluster.server.value(cluster.rng.choice(sorted({*records} - {key})))
    elif way == "older" and key != "lease":  # what it says of the ends of leases is believed (docs/protocol.md)
        await asyncio.sleep(cluster.rng.choice([0.3, 1.0, 5.0, 20.0]))
    else:
        return
    if value is not None and cluster.settled() and cluster.server.value(key) not in (None, value):
        await _reached_by_a_reader(cluster, await cluster.damage_store({key: value}), NOTICED)


def _damageable(cluster: SimCluster) -> list[str]:
    """Keys of which somebody makes something else, by hand: of one job, of one node, and of all."""
    if not cluster.server.state.jobs:
        return []
    node, job = _any(cluster).name, cluster.rng.choice(sorted(cluster.server.state.jobs))
    keys = [f"job:{job}", f"node:{node}", f"alloc:{node}", "names", "highest", "lease", "changes"]
    return [key for key in keys if cluster.server.value(key) is not None]


async def _reached_by_a_reader(cluster: SimCluster, lost: Mapping[str, int], seconds: float = 0.0) -> None:
    """Until the store has recovered, and for so many seconds: one of those who have read of these generations, and are
    there, reaches it."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not cluster.settled() or loop.time() < end:
        for uid, number in lost.items():
            job = cluster.server.state.jobs.get(uid)
            if job is not None and job.generation is not None and job.generation.number >= number:
                continue
            known = any(node.agent and uid in node.agent.cluster().jobs for node in cluster.nodes.values())
            if job is None and not known and cluster.settled():
                cluster.checker.forgotten.add(uid)  # damaged by hand, and who had read it died before it was noticed
            readers = [node for node in cluster.nodes.values() if node.has_read(uid, number)]
            if readers and all(node.link.cut or node.link.cut_replies for node in readers):
                cluster.rng.choice(readers).link.restore()
        await asyncio.sleep(0.05)


async def one_address_for_two(cluster: SimCluster) -> None:
    """A node is reached at the address of another, which answers in its place."""
    ends = cluster.net.ends
    own = sorted(name for name, end in ends.items() if end.name == name)
    if len(own) < 2:
        return
    one, other = cluster.rng.sample(own, 2)
    before = ends[one]
    ends[one] = ends[other]
    await asyncio.sleep(cluster.rng.uniform(1, 20))
    ends[one] = before


async def step_store_clock(cluster: SimCluster) -> None:
    cluster.clock_step += cluster.rng.choice([-3600.0, -1.0, -0.2, 0.4, 1.2, 3.0, 3600.0])


async def late_guard(cluster: SimCluster) -> None:
    """Within assumption A2: a shim acts up to 0.2 s after its deadline. So busy, it is late to start something, too."""
    machine = _any(cluster).machine
    machine.guard_late = cluster.rng.uniform(0, 0.2)
    machine.start_late = 5 * machine.guard_late


async def scale(cluster: SimCluster) -> None:
    """By number, by count and by name, with deadlines that may be too short and graces of any length."""
    jobs = [j for j in cluster.server.state.jobs.values() if j.phase not in TERMINAL]
    if not jobs:
        return
    job = cluster.rng.choice(jobs)
    size, timeout = job.spec.nodes, cluster.rng.choice([None, 0.5, 5.0, 20.0])
    if job.spec.several:
        role = cluster.rng.choice(job.spec.roles)
        most = 20.0 if timeout is None else timeout  # there may never be room
        await cluster.scale(
            job.name, "scale", timeout=most, role=role.name, target=cluster.rng.randint(1, role.places + 1)
        )
        return
    gang = sorted(job.generation.members) if job.generation is not None else ["n1"]
    asked: list[tuple[Verb, dict[str, object]]] = [
        ("scale", {"target": cluster.rng.randint(size.min, size.max)}),
        ("scaleout", {"count": cluster.rng.randint(1, 3)}),
        ("scalein", {"count": cluster.rng.randint(1, 2)}),
        ("scalein", {"nodes": cluster.rng.sample(gang, 1)}),
    ]
    verb, body = cluster.rng.choice(asked)
    await cluster.scale(job.name, verb, timeout=timeout, **body)


async def pause_and_resume(cluster: SimCluster) -> None:
    await _operate(cluster, desired="pause")
    await asyncio.sleep(cluster.rng.uniform(0, 10))
    await _operate(cluster, desired="run")


async def restart_job(cluster: SimCluster) -> None:
    await _operate(cluster, restart=cluster.rng.randrange(1, 1000))


async def cordon(cluster: SimCluster) -> None:
    name = _any(cluster).name
    await cluster.cordon(name, Cordon(reason="test", by="test", at=0.0, drain=cluster.rng.random() < 0.5))
    await asyncio.sleep(cluster.rng.uniform(1, 20))
    await cluster.cordon(name, None)


def unfit(severity: Severity = "fatal") -> Verdict:
    """A verdict on a whole node, that came about now."""
    now = 1.7e9 + asyncio.get_running_loop().time()
    return Verdict(rule="x", severity=severity, action="reboot", text="is sick", since=now, seen=now)


async def sicken(cluster: SimCluster) -> None:
    """One node, or so many at about the same time that the breaker opens."""
    nodes = list(cluster.nodes.values())
    many = 1 if cluster.rng.random() < 0.7 else cluster.rng.randint(2, len(nodes))
    some = cluster.rng.sample(nodes, many)
    for node in some:
        node.find(unfit(cluster.rng.choice(["fatal", "fatal", "degraded", "app"])))
        await asyncio.sleep(cluster.rng.choice([0.0, 0.0, 0.2, 2.0]))
    await asyncio.sleep(cluster.rng.uniform(0.5, 15))
    for node in some:
        node.find()


async def _operate(cluster: SimCluster, **changes: object) -> None:
    jobs = [j for j in cluster.server.state.jobs.values() if j.phase not in TERMINAL]
    if not jobs:
        return
    job = cluster.rng.choice(jobs)
    try:
        await cluster.operate(job.name, **changes)
    except StoreRefusedError:
        return  # it ended in between


FAULTS: tuple[Fault, ...] = (
    kill_worker, kill_worker, leave_group, leave_group, kill_shim, hang_shim, restart_agent, restart_agent,
    restart_agent_as_planned, kill_lease, kill_lease, freeze_lease, cut_power, freeze_agent, freeze_machine,
    cut_link, cut_link,
    cut_store, cut_store, away_and_killed, away_and_killed, cut_peers, cut_peers, bad_link, bad_link, cut_workers,
    freeze_store, overload_store, restart_store, empty_store,
    roll_back_store, damage_store, overwrite_store, one_address_for_two, step_store_clock, late_guard, scale,
    pause_and_resume, restart_job, cordon, sicken, sicken,
)  # fmt: skip
