"""What is wrong with the cluster and between its nodes, judged from the snapshot and from what peers answered.

Pure. Each finding comes with its place: ``node/NAME``, ``job/NAME`` or ``cluster``.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from nodeagent.model.base import Record
from nodeagent.model.facts import Finding, FindingSeverity
from nodeagent.model.health import Verdict
from nodeagent.model.job import TERMINAL, Filled, JobRecord, Owned, Quota, Setback
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster, some
from nodeagent.plan.failure.blame import Cut, describe_cut
from nodeagent.plan.fairshare.queues import overbooked
from nodeagent.plan.nodes.failing import failing_nodes
from nodeagent.plan.nodes.failsafe import silence
from nodeagent.plan.nodes.health import breaker, next_step
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.nodes.setbacks import in_words, left_out

Placed = tuple[str, Finding]
"""(where, what)"""
NEARLY = 0.9
"""Share of what a user, or all of them, may take from which it is a warning."""
SHOWN = 8
"""Most names in one sentence."""
LARGEST = 3
"""Users who are named because their jobs take most."""


class AgentStanding(Record):
    """How the agent that is asked stands with the cluster. Times are seconds."""

    node: str
    joined: bool
    reason: str = ""
    lease_left: float = 0.0
    lent: int = 0
    """Jobs of which workers here run on failsafe time."""
    store_away: float | None = None
    """For how long the store has not answered; None while it does."""
    store_unusable: str = ""
    """Why it counts as away although it answers."""
    unread: dict[str, str] = {}
    """Records in the store that cannot be read, by key: why."""
    beyond: tuple[str, ...] = ()
    """Kinds of records of which the store has more than it reads."""
    most: tuple[str, ...] = ()
    """Whose jobs take most of what it reads, and how much."""
    undecided: dict[str, str] = {}
    """Jobs that it leaves as they are, since a decision about them failed, by name: where in the code."""
    loop_lag: float = 0.0
    unsaved: str = ""
    """Why the jobs cannot be saved on its disk."""
    loopback: str = ""
    """Why it serves no health and metrics on loopback; empty if it does."""
    https_missing: bool = False
    """It is to serve others over https, and does not."""


class PeerAnswer(Record):
    """What came back from a node's address."""

    node: str
    address: str
    outcome: Literal["accepted", "refused", "timeout", "unreachable", "unresolved", "unknown"]
    """``refused`` means that the machine answered: nothing listens on that port just now, as it should be."""
    detail: str = ""

    @property
    def reached(self) -> bool:
        """The machine answered."""
        return self.outcome in ("accepted", "refused")


MOST_UNREAD = 5
"""Damaged records, and jobs that cannot be decided, named at once."""
LATE = 1.0
"""Seconds that an agent's loop may be late."""


def judge_agent(agent: AgentStanding) -> tuple[Finding, ...]:
    """Of the agent that is asked."""
    log = "journalctl -u nodeagent -n 50"
    found = []
    if not agent.joined:
        found.append(_error(f"has not joined its cluster: {agent.reason or 'it has only just started'}", log))
    elif agent.store_away is None and agent.lease_left <= 0:
        but = f", but for those that run on failsafe time (jobs: {agent.lent})" if agent.lent else ""
        found.append(
            _error(
                f"its lease has run out, since its lease process does not renew it: its workers were stopped{but}",
                "journalctl -u nodeagent-lease -n 50",
            )
        )
    away = agent.store_away is not None and agent.lease_left <= 0 and not agent.lent
    stopped = ", and nothing runs on this node, which has no lease" if away else ""
    if agent.store_unusable:
        since = "" if agent.store_away is None else f" for {agent.store_away:.0f} s"
        found.append(
            _error(
                f"its agent cannot use the store{since}, and goes on as if it were away{stopped}: "
                f"{agent.store_unusable}",
                "do what that says; what somebody changed in Redis has to be put back (docs/security.md, The store); "
                "the agent then goes on by itself",
            )
        )
    elif agent.store_away is not None:
        found.append(
            _error(
                f"its agent has had no answer from the store for {agent.store_away:.0f} s{stopped}",
                "see that Redis runs and that this node reaches it (redis.url in the agent's config)",
            )
        )
    for key, why in sorted(agent.unread.items())[:MOST_UNREAD]:
        found.append(
            _error(
                f"the record {key} in the store cannot be read ({why}): somebody damaged it, or an agent of another "
                "version wrote it",
                "run one version on all nodes; if they do, nodeagentctl delete the job, or redis-cli DEL the key "
                f"(na:{{CLUSTER}}:{key}): nodes that know it give it back",
            )
        )
    found += (_beyond(kind, agent.most) for kind in agent.beyond)
    for job, place in sorted(agent.undecided.items())[:MOST_UNREAD]:
        found.append(
            _error(
                f"its agent cannot decide about job {job}, and leaves it as it is ({place}): a defect of nodeagent",
                "report it with the traceback: journalctl -u nodeagent -g 'decision failed'; what runs of "
                "the job goes on",
            )
        )
    if agent.loop_lag > LATE:
        found.append(
            _warning(f"its agent's loop is {agent.loop_lag:.1f} s late: the machine is overloaded or was frozen", "top")
        )
    if agent.unsaved:
        found.append(
            _error(
                f"it cannot keep the jobs on its disk ({agent.unsaved}): no command is acknowledged by it",
                "df -h and mount, for the folder dirs.state of its config",
            )
        )
    if agent.loopback:
        found.append(
            _warning(
                f"it serves no health and metrics here: {agent.loopback}; what answers there is another program",
                "see what has it (ss -tanp), and have that end, or set another ports.api (0: any free port)",
            )
        )
    if agent.https_missing:
        found.append(
            _warning(
                "it serves nobody over https: other nodes cannot show its part of a job's output",
                f"see why: {log}; then correct the section api of its config (listen: off, if that is meant)",
            )
        )
    return tuple(found)


def _beyond(kind: str, most: tuple[str, ...]) -> Finding:
    """Of a kind of records there are more than the agent reads. ``most``: of jobs, who has most of those it reads."""
    if kind == "jobs":
        return _error(
            "the store has more jobs than an agent reads, and until some are gone nothing is decided; of those that it "
            f"reads most belong to {', '.join(most) or 'nobody'}",
            "have an operator delete jobs of theirs that are not needed (nodeagentctl stop JOB, nodeagentctl delete "
            "JOB), then restart the agents: work goes on meanwhile. If nobody submitted them, see who can write to "
            "Redis (docs/security.md, The store), and delete what is no job of yours there (na:{CLUSTER}:job:*)",
        )
    one, key = ("day of use", "usage") if kind == "days" else (kind[:-1], kind[:-1])
    many = "days of use" if kind == "days" else kind
    return _error(
        f"the store has more {many} than any cluster, and its agent reads only as many as one may have: somebody has "
        "written them",
        f"see who can write to Redis (docs/security.md, The store), delete what is no {one} of yours there "
        f"(na:{{CLUSTER}}:{key}:*), and restart the agents: work goes on meanwhile",
    )


def largest(filled: Mapping[str, Filled], room: Filled) -> list[str]:
    """The users whose jobs take most of this room, with what they take: the first few."""

    def share(name: str) -> float:
        return max(filled[name].jobs / room.jobs, filled[name].bytes / room.bytes)

    first = sorted(filled, key=lambda name: (-share(name), name))[:LARGEST]
    return [f"{name} ({_jobs_of(filled[name].jobs)} of {filled[name].bytes} bytes)" for name in first]


def _jobs_of(count: int) -> str:
    return f"{count} job" if count == 1 else f"{count} jobs"


def judge_room(filled: Mapping[str, Filled], room: Filled) -> tuple[Placed, ...]:
    """``filled``: what each user's jobs take, by name; ``room``: what they may take together."""
    jobs, size = sum(have.jobs for have in filled.values()), sum(have.bytes for have in filled.values())
    if jobs < NEARLY * room.jobs and size < NEARLY * room.bytes:
        return ()
    what = (
        f"all users together have {_jobs_of(jobs)} of {size} bytes, and may fill {room.jobs} jobs or "
        f"{room.bytes} bytes: then who has more than a few is refused. Most have {', '.join(largest(filled, room))}"
    )
    fix = "delete jobs of theirs that are not needed (nodeagentctl delete JOB); or lower limits.jobs, limits.job_bytes"
    return (("cluster", _warning(what, fix)),)


def judge_recovery(waits: str) -> tuple[Placed, ...]:
    """Of a store that has lost writes. ``waits``: for whom it waits, empty if for nobody."""
    fix = "start the agents of those nodes, if you can: what runs goes on, all else waits for them"
    return (("store", _warning(waits, fix)),) if waits else ()


def judge_users(
    node: str, owned: Mapping[str, Owned], quota: Quota, refused: Mapping[str, tuple[str, ...]]
) -> tuple[Placed, ...]:
    """``owned``: what the jobs of those who have limits use, by name; ``quota``: what each may have;
    ``refused``: who asked this node's agent for too much lately, and the keys of ``limits`` that refused."""
    found: list[Placed] = []
    for owner, have in sorted(owned.items()):
        fix = f"stop or delete jobs of {owner} that are not needed, or raise limits.{{}} in the agents' configs"
        if have.jobs >= quota.jobs:
            what = f"{owner} has {have.jobs} live jobs, and limits.jobs is {quota.jobs}: only operators may submit more"
            found.append((f"user/{owner}", _warning(what, fix.format("jobs"))))
        if have.bytes >= NEARLY * quota.bytes:
            what = f"the jobs of {owner} take {have.bytes} bytes of the {quota.bytes} that limits.job_bytes allows"
            found.append((f"user/{owner}", _warning(what, fix.format("job_bytes"))))
    for owner in sorted(refused):
        keys = ", ".join(f"limits.{key}" for key in sorted(refused[owner]))
        what = f"{owner} was refused by the agent of node {node} in the last 5 min: {keys}"
        found.append((f"user/{owner}", _warning(what, f"ask {owner} what asks so often, or raise it in the config")))
    return tuple(found)


def judge_cluster(
    cluster: Cluster, states: Mapping[str, tuple[str, str]], why: Mapping[str, tuple[str, ...]]
) -> tuple[Placed, ...]:
    """``states``: node to (state, reason); ``why``: uid of each job that is queued or
    holds to what it waits for."""
    parts = (
        _nodes(cluster, states),
        _sick(cluster),
        _kernel_logs(cluster),
        _gpus(cluster),
        _held(cluster),
        _failing(cluster),
        _jobs(cluster, why),
        _versions(cluster),
        _addresses(cluster),
        queue_findings(cluster),
        _topology(cluster),
    )
    return tuple(found for part in parts for found in part)


def _nodes(cluster: Cluster, states: Mapping[str, tuple[str, str]]) -> Iterator[Placed]:
    for name in sorted(states):
        (state, reason), host = states[name], cluster.nodes[name].facts.hostname
        fix = _LOOK.format(host=host)
        if state in ("silent", "lost"):
            yield f"node/{name}", _error(f"{state}: {reason}", fix)
        elif state == "mute":
            yield f"node/{name}", _warning(f"mute: {reason}", fix)
        elif state in ("cordoned", "draining", "drained"):
            yield f"node/{name}", _warning(f"{state}: {reason}", f"nodeagentctl uncordon {name}")
        elif state == "maintenance":
            yield f"node/{name}", Finding(severity="info", what=reason, fix="see nodeagentctl reserve list")
        elif state == "leaving":
            fix = "none: its work moves to other nodes"
            yield f"node/{name}", Finding(severity="info", what=f"leaving: {reason}", fix=fix)
        elif state == "restarting":
            fix = (
                f"on {host}: systemctl start nodeagent; if it will not be back: nodeagentctl drain {name} --reason TEXT"
            )
            yield f"node/{name}", Finding(severity="info", what=reason, fix=fix)
        elif state == "left":
            yield f"node/{name}", Finding(severity="info", what=reason, fix=f"on {host}: systemctl start nodeagent")


def _sick(cluster: Cluster) -> Iterator[Placed]:
    """What the nodes' agents found on their hardware, each with the step that repairs it."""
    for name, node in sorted(_live(cluster).items()):
        for verdict in node.facts.health:
            if verdict.severity in ("fatal", "degraded", "unknown"):
                yield f"node/{name}", _verdict(node, verdict)
        if held := breaker(cluster, node.facts):
            drain = f"nodeagentctl drain {name} --reason TEXT"
            fix = f"who believes the verdicts: {drain}; else see what the nodes have in common"
            yield f"node/{name}", _warning(f"the breaker is {held}", fix)


def _unknown(node: NodeRecord) -> bool:
    """Of none of its GPUs it is known whether they are sound, which has a finding of its own."""
    return any(verdict.unknown and not verdict.device for verdict in node.facts.health)


def _kernel_logs(cluster: Cluster) -> Iterator[Placed]:
    """One sentence for all nodes: in containers it is the same everywhere."""
    blind = [n for n, node in _live(cluster).items() if any(v.rule == "probe.kernel_log" for v in node.facts.health)]
    if blind:
        yield "cluster", _warning(
            f"the kernel's log cannot be read on {some(sorted(blind), SHOWN)}: faults of GPUs are seen there by the "
            "driver's word alone, those of disks, memory and CPUs are not",
            "give the agent /dev/kmsg: run it as root (a container with --device /dev/kmsg --cap-add SYSLOG); "
            "or do without: health.ignore: [probe.kernel_log] in its config",
        )  # fmt: skip


def _verdict(node: NodeRecord, verdict: Verdict) -> Finding:
    index = next((str(g.index) for g in node.facts.gpus if g.uuid == verdict.device), verdict.device)
    what = f"{f'GPU {index}' if verdict.device else 'the node'} is {verdict.severity}: {verdict.text} ({verdict.rule})"
    if verdict.dry_run or verdict.stage != "active":
        note = "dry run" if verdict.dry_run else verdict.stage
        return Finding(severity="info", what=f"{what}, {note}", fix=next_step(verdict, node))
    return (_error if verdict.severity == "fatal" else _warning)(what, next_step(verdict, node))


def _gpus(cluster: Cluster) -> Iterator[Placed]:
    """Those that are left out for another reason than a verdict."""
    for name, node in sorted(_live(cluster).items()):
        known = {verdict.device for verdict in node.facts.health if verdict.bars or verdict.unknown}
        for gpu in node.facts.gpus:
            if not gpu.healthy and gpu.uuid not in known and not _unknown(node):
                what = f"GPU {gpu.index} ({gpu.uuid}) is left out: {gpu.why or 'it is not healthy'}"
                yield f"node/{name}", _warning(what, f"on {node.facts.hostname}: nvidia-smi -q -i {gpu.uuid}")


def _held(cluster: Cluster) -> Iterator[Placed]:
    """Devices that processes have which do not end."""
    for name, node in sorted(_live(cluster).items()):
        for uid, devices in sorted(node.facts.held_by.items()):
            job, ready = cluster.jobs.get(uid), node.readiness.get(uid)
            why = f" ({ready.reason})" if ready is not None and ready.reason else ""
            whose, host = job.name if job is not None else uid, node.facts.hostname
            what = (
                f"processes of job {whose} do not end{why}; nobody is given what they may have: {some(devices, SHOWN)}"
            )
            drain = f"nodeagentctl drain {name} --reason TEXT"
            fix = f"on {host}: ps -eo pid,stat,wchan:30,cmd; if it lasts: {drain}, then reboot it"
            yield f"node/{name}", _warning(what, fix)


def _failing(cluster: Cluster) -> Iterator[Placed]:
    """Nodes on which job after job failed, and where none has been running for a while by now."""
    early = millis(cluster.timing.early)
    for name, jobs in failing_nodes(cluster).items():
        gangs = [job.generation for job in cluster.jobs.values() if job.phase == "running" and job.generation]
        well = any(name in gang.members and cluster.served - gang.since > early for gang in gangs)
        if cluster.live(name) and not well:
            last = jobs[-1].name
            what = (
                f"the last {len(jobs)} jobs here failed within {cluster.timing.early:g} s of their start: "
                f"{', '.join(job.name for job in jobs)}; it is taken last"
            )
            fix = f"nodeagentctl describe {last}; nodeagentctl cordon {name} --reason TEXT; nodeagentctl diag {name}"
            yield f"node/{name}", _warning(what, fix)


_LOOK = "on {host}: systemctl status nodeagent; journalctl -u nodeagent -n 50"


def _jobs(cluster: Cluster, why: Mapping[str, tuple[str, ...]]) -> Iterator[Placed]:
    unfit: dict[str, list[tuple[str, Readiness]]] = defaultdict(list)
    for name, node in sorted(_live(cluster).items()):
        for uid, ready in node.readiness.items():
            if ready.state == "unfit":
                unfit[uid].append((name, ready))
    for job in sorted(cluster.jobs.values(), key=lambda j: j.order):
        if job.phase in TERMINAL:
            continue
        fix = f"nodeagentctl describe {job.name}"
        waits = "; ".join(why.get(job.uid, ())) or job.reason
        if refusal := cluster.refused.get(job.uid):
            yield f"job/{job.name}", _error(f"is not run: {refusal.text}", fix)
        elif job.phase == "holding" and cluster.served < job.not_before:
            left = (job.not_before - cluster.served) / 1000
            yield f"job/{job.name}", _warning(f"backs off, and starts again in {left:.0f} s: {waits}", fix)
        elif job.phase == "holding":
            yield f"job/{job.name}", _error(f"holds, nothing of it trains: {waits}", fix)
        elif job.phase == "queued":
            yield f"job/{job.name}", _warning(f"waits to start: {waits}", fix)
        elif silent := silence(cluster, job):
            yield f"job/{job.name}", _error(silent, fix)
        for name, (late, until) in sorted(left_out(job, cluster.nodes, cluster.served).items()):
            if cluster.live(name):
                left = (until - cluster.served) / 1000
                what = f"{in_words(job, late)}: job {job.name} goes on without it, and tries it again in {left:.0f} s"
                yield f"node/{name}", _warning(what, _after_setback(cluster.nodes[name], job, late))
        for name, ready in unfit.get(job.uid, ()):
            what = "lead" if ready.portless and not job.spec.several else "run"
            yield f"node/{name}", _warning(f"cannot {what} job {job.name}: {ready.reason}", fix)


def _after_setback(node: NodeRecord, job: JobRecord, setback: Setback) -> str:
    """What a person does about a node that was no good to a job."""
    if setback.kind == "failed":
        cordon = f"nodeagentctl cordon {node.id} --reason TEXT; nodeagentctl diag {node.id}"
        return f"nodeagentctl describe {job.name} has its last lines; {cordon}"
    if setback.kind == "crowded":
        return f"on {node.facts.hostname}: free -h; ps -eo rss,user,args --sort -rss | head"
    if setback.kind == "runtime":
        return f"nodeagentctl describe {job.name} has podman's last words; on {node.facts.hostname}: podman info"
    look = _LOOK.format(host=node.facts.hostname)
    return f"see whether {node.facts.hostname} is there, and stays; {look}"


def _versions(cluster: Cluster) -> Iterator[Placed]:
    by_version: dict[str, list[str]] = defaultdict(list)
    for name, node in sorted(_live(cluster).items()):
        by_version[node.facts.agent_version].append(name)
    if len(by_version) > 1:
        text = "; ".join(f"{version} on {some(nodes, SHOWN)}" for version, nodes in sorted(by_version.items()))
        yield (
            "cluster",
            _warning(f"agents differ in version: {text}", "install the same version on all of them"),
        )


def _addresses(cluster: Cluster) -> Iterator[Placed]:
    """Nodes of one machine may share an address; those of different machines never."""
    live = _live(cluster)
    boots = {node.facts.boot_id for node in live.values()}
    by_address: dict[str, list[str]] = defaultdict(list)
    fix = "set node.address in its agent's config to an address that the other nodes reach"
    for name, node in sorted(live.items()):
        if len(boots) > 1 and _loopback(node.facts.address):
            what = f"its address is {node.facts.address}: no other machine can reach its workers"
            yield f"node/{name}", _error(what, fix)
        else:
            by_address[node.facts.address].append(name)
    for address, nodes in by_address.items():
        if len({live[n].facts.boot_id for n in nodes}) > 1:
            yield "cluster", _error(f"{some(nodes, SHOWN)} are different machines with the same address {address}", fix)


def _topology(cluster: Cluster) -> Iterator[Placed]:
    """Gangs are placed by what most nodes say: all should say the same, and where they stand."""
    levels = tree(cluster).levels
    for name, node in sorted(_live(cluster).items()):
        if node.facts.topology != levels:
            own = ", ".join(node.facts.topology) or "none"
            what = f"its topology is {own}, while most nodes have {', '.join(levels) or 'none'}"
            yield f"node/{name}", _warning(what, "set topology in its agent's config as on the others")
        elif lacks := [level for level in levels if not node.facts.labels.get(level)]:
            what = f"it has no label {', '.join(lacks)}: gangs that are kept together do not use it"
            yield f"node/{name}", _warning(what, "set node.labels in its agent's config")


def judge_peers(asked_by: str, answers: Iterable[PeerAnswer]) -> tuple[Placed, ...]:
    """What could not be reached from ``asked_by``."""
    return tuple((f"node/{a.node}", _peer(asked_by, a)) for a in answers if not a.reached)


def _peer(by: str, peer: PeerAnswer) -> Finding:
    at = f"{peer.address} of {peer.node}"
    match peer.outcome:
        case "unresolved":
            fix = f"make the name known on {by} (/etc/hosts or DNS), or set node.address of {peer.node} to a number"
            return _error(f"{by} cannot resolve {at}: {peer.detail}", fix)
        case "timeout":
            fix = f"is {peer.node} up (ping {peer.address})? Then open its ports.rendezvous to {by} in the firewalls"
            return _error(f"{at} does not answer {by} within {peer.detail}", fix)
        case "unreachable":
            return _error(f"{by} cannot reach {at}: {peer.detail}", f"on {by}: ip route get {peer.address}")
    return _warning(f"unknown: whether {by} reaches {at}: {peer.detail}", "")


def judge_cuts(cuts: Mapping[str, tuple[Cut, ...]], now: float) -> tuple[Placed, ...]:
    """``cuts``: job to the members and failsafe members of its gang that cannot reach each other; ``now``: Unix
    time."""
    found: list[Placed] = []
    for job, pairs in sorted(cuts.items()):
        for cut in pairs[:SHOWN]:
            whom = cut.address.rpartition(":")[0].strip("[]") or cut.other
            hurts = "its workers may wait for each other"
            fix = f"on {cut.node}: ping -c 3 {whom}; let both firewalls pass the agents' UDP and the ports of workers"
            if cut.outside:
                hurts = "without its answer the job's workers stop when the store does not answer for a few seconds"
                fix = (
                    f"on {cut.node}: ping -c 3 {whom}; let both firewalls pass the agents' UDP, and see that "
                    f"{cut.other} has the cluster's key; until then nodeagentctl cordon {cut.other}: others replace it"
                )
            what = describe_cut(cut, now) + (f"; {hurts}" if cut.known else "")
            found.append((f"job/{job}", _warning(what, fix)))
        if (more := len(pairs) - SHOWN) > 0:
            what = f"{more} more pairs of its nodes cannot reach each other"
            found.append((f"job/{job}", _warning(what, f"nodeagentctl describe {job}")))
    return tuple(found)


def ranked(found: Iterable[Placed]) -> list[Placed]:
    """Errors first, otherwise in the order found."""
    order: tuple[FindingSeverity, ...] = ("error", "warning", "info")
    return sorted(found, key=lambda placed: order.index(placed[1].severity))


def _live(cluster: Cluster) -> dict[str, NodeRecord]:
    return {name: node for name, node in cluster.nodes.items() if cluster.live(name)}


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _error(what: str, fix: str) -> Finding:
    return Finding(severity="error", what=what, fix=fix)


def _warning(what: str, fix: str) -> Finding:
    return Finding(severity="warning", what=what, fix=fix)


def queue_findings(cluster: Cluster) -> Iterator[tuple[str, Finding]]:
    """(where, what), as findings have them."""
    tree = cluster.queues
    if not tree.queues and not cluster.queues_rev and not any(job.spec.queue for job in cluster.jobs.values()):
        return
    if cluster.queues_rev != tree.rev:
        what = "the queues in the store were changed past the agents, which act on those that were signed last"
        fix = "write them anew: nodeagentctl queue apply -f FILE; and see who can write to Redis"
        yield "cluster", Finding(severity="error", what=what, fix=fix)
    for job in sorted(cluster.jobs.values(), key=lambda job: job.order):
        name = queue_of(job.spec.queue)
        if job.phase not in TERMINAL and name not in tree.by_name:
            what = f"its queue {name} does not exist any more: it gets no nodes that it does not have"
            fix = f"nodeagentctl queue create {name}; or: nodeagentctl stop {job.name}"
            yield f"job/{job.name}", Finding(severity="error", what=what, fix=fix)
    for what in overbooked(cluster, tree):
        fix = "bring the nodes back, or lower guarantees: nodeagentctl queue set QUEUE guarantee.NAME=N"
        yield "cluster", Finding(severity="warning", what=what, fix=fix)
