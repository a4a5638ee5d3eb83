"""Whether a node repairs itself now, and how far it may go: which verdict, when it is its turn, what is in the way.

Pure. Each node decides for itself, from what all see: a repair never stops a run that cannot go on elsewhere, never
touches what somebody uses or a person has taken in hand, and of the nodes no more than the breaker's share are away for
repairs at once. Who asks writes that down first, and looks again once the store has it: of two that begin at once at
least one sees the other, and steps back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.model.health import LABEL, Attempt, Claim, ClaimPhase, Kind, Verdict
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.job.proposal import place
from nodeagent.plan.nodes.health import ONE_IN, breaker

DAY = 86_400.0
AWAY = 3600.0
"""Seconds that a node which does not come back from its repair keeps others from theirs."""
BUSY_LIMIT = 600.0
"""Seconds that hardware is set aside while something still uses it; then it is the next one's turn."""
_HEAVY: tuple[Kind, ...] = ("reboot", "reset_gpu")
"""The heavier first: a reboot repairs what a reset would."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the config allows."""

    whole: Mapping[Kind, bool]
    """The repairs that are commands; true: it needs the node to itself."""
    per_day: int


@dataclass(frozen=True, slots=True)
class HardwareUse:
    """What uses the node's hardware, as its own agent sees it."""

    pods: Collection[str] = ()
    """Uids of jobs of which something still runs here."""
    stuck: Collection[str] = ()
    """Uids of jobs with processes here that cannot even be killed: nobody knows what they hold."""
    processes: Mapping[str, Sequence[int]] | None = None
    """Pids on each GPU, as the driver tells; a GPU that it tells nothing of is missing."""
    strangers: frozenset[int] = frozenset()
    """Those of them that are none of our jobs'."""
    expected: Collection[str] = ()
    """The node's own devices, with those that are missing now: nothing else can be repaired."""


@dataclass(frozen=True, slots=True)
class Next:
    """What becomes of a claim: its next phase, or None for taking it back. ``why``: what it waits for."""

    phase: ClaimPhase | None
    why: str = ""


def wanted_claim(
    cluster: Cluster, node: str, verdicts: Iterable[Verdict], means: Means, past: Iterable[Attempt], use: HardwareUse,
    wall: float,
) -> tuple[Claim | None, str]:  # fmt: skip
    """The claim to make now; else why nothing is begun though a configured repair is asked for (empty: none is)."""
    wanted = _wanted(verdicts, means, use.expected)
    why = ""
    for verdict, kind in wanted:
        claim = Claim(
            kind=kind, rule=verdict.rule, device=verdict.device, whole=means.whole[kind], phase="asks",
            since=round(wall, 3),
        )  # fmt: skip
        reason = obstacle(cluster, node, claim, verdicts, means, past, use, wall)
        if not reason:
            return claim, ""
        why = why or reason
    return None, why


def obstacle(
    cluster: Cluster, node: str, claim: Claim, verdicts: Iterable[Verdict], means: Means, past: Iterable[Attempt],
    use: HardwareUse, wall: float,
) -> str:  # fmt: skip
    """Why this repair must not begin at all, apart from others' repairs; empty if it may."""
    me = cluster.nodes.get(node)
    if me is None or not cluster.live(node):
        return "this node has not joined"
    if me.cordon is not None:
        return f"the node is in the hands of {me.cordon.by}: {me.cordon.reason}"
    verdict = next((v for v in verdicts if (v.rule, v.device) == (claim.rule, claim.device)), None)
    if verdict is None or verdict.stage != "active" or verdict.action != claim.kind:
        return "nothing asks for it any more"
    if held := breaker(cluster, me.facts):
        return f"the breaker is {held}"
    done = sorted(a.at for a in past if a.kind != "service" and wall - a.at < DAY)
    if len(done) >= means.per_day:
        hours = max(0.0, done[-means.per_day] + DAY - wall) / 3600
        return f"{len(done)} repairs in 24 h are as many as are allowed; the next in {hours:.1f} h"
    if verdict.severity != "fatal":
        busy = users(cluster, node, claim, use)
        return f"it is no reason to stop what runs: {busy}" if busy else ""
    strangers = _pids(claim, use) & use.strangers
    if strangers:
        return f"somebody else uses it: {_named(strangers)}"
    return _needed(cluster, node) if claim.whole else ""


def onward(
    cluster: Cluster, node: str, claim: Claim, verdicts: Iterable[Verdict], means: Means, past: Iterable[Attempt],
    use: HardwareUse, wall: float,
) -> Next:  # fmt: skip
    """How a claim goes on that the store has as it is here. Only for ``asks`` and ``holds``."""
    if claim.phase == "asks":
        reason = obstacle(cluster, node, claim, verdicts, means, past, use, wall)
        if reason:
            return Next(None, reason)
        full = _full(cluster, node, claim, wall)
        return Next("asks", full) if full else Next("holds")
    me = cluster.nodes.get(node)
    if me is None or not cluster.live(node) or me.cordon is not None:
        return Next(None, "the node was cordoned" if me is not None and me.cordon is not None else "it has left")
    if full := _full(cluster, node, claim, wall):
        return Next("asks", full)
    verdict = next((v for v in verdicts if (v.rule, v.device) == (claim.rule, claim.device)), None)
    if verdict is None or verdict.stage != "active" or verdict.action != claim.kind:
        return Next(None, "nothing asks for it any more")
    busy = users(cluster, node, claim, use)
    if busy and verdict.severity != "fatal":
        return Next(None, f"it is no reason to stop what runs: {busy}")
    if busy and wall - claim.since > BUSY_LIMIT:
        return Next(None, f"given up for now, since it did not come free: {busy}")
    return Next("holds", f"waits until it is free: {busy}") if busy else Next("runs")


def call(verdicts: Iterable[Verdict], means: Means, past: Collection[Attempt]) -> Verdict | None:
    """The verdict that service is to be called for: once for each."""
    if "service" not in means.whole:
        return None
    called = {(a.rule, a.device): a.at for a in past if a.kind == "service"}
    return next(
        (
            v
            for v in verdicts
            if v.action == "service" and v.stage == "active" and _acted(v)
            and called.get((v.rule, v.device), 0.0) < v.since
        ),
        None,
    )  # fmt: skip


def users(cluster: Cluster, node: str, claim: Claim, use: HardwareUse) -> str:
    """Who uses the hardware that the repair needs; empty if nobody does."""
    jobs = []
    for job in cluster.jobs.values():
        generation = job.generation
        if generation is None:
            continue
        devices: set[str] = set()
        member, holder = generation.members.get(node), generation.holders.get(node)
        if member is not None and generation.state != "ended":
            devices.update(member.devices)
        if holder is not None:
            devices.update(holder.devices)
        here = job.uid in use.pods and (claim.whole or job.uid in use.stuck)
        if here or (devices and (claim.whole or claim.device in devices)):
            jobs.append(f"job {job.name}")
    unknown = {*use.pods, *use.stuck} if claim.whole else set(use.stuck)
    jobs += [f"job {uid}" for uid in sorted(unknown - set(cluster.jobs))]
    if pids := _pids(claim, use):
        jobs.append(_named(pids))
    return ", ".join(jobs)


def _pids(claim: Claim, use: HardwareUse) -> set[int]:
    """Processes on the hardware that the repair needs."""
    reported = use.processes or {}
    return {pid for gpu, some in reported.items() if claim.whole or gpu == claim.device for pid in some}


def _named(pids: Iterable[int]) -> str:
    return f"process {', '.join(map(str, sorted(pids)[:8]))}"


def _wanted(verdicts: Iterable[Verdict], means: Means, expected: Collection[str]) -> list[tuple[Verdict, Kind]]:
    """Verdicts with a repair that is configured: the heavier repair, then the worse verdict first. A device that is
    none of the node's (a bus id of the kernel's log, a switch's for one) has none."""
    found = [(v, k) for v in verdicts for k in _HEAVY if v.action == k and k in means.whole]
    found = [(v, k) for v, k in found if v.device in expected or (not v.device and means.whole[k])]
    found = [(v, k) for v, k in found if v.stage == "active" and _acted(v)]
    return sorted(found, key=lambda one: (one[0].severity != "fatal", _HEAVY.index(one[1]), one[0].since, one[0].rule))


def _acted(verdict: Verdict) -> bool:
    return verdict.severity in ("fatal", "degraded") and not verdict.dry_run


def _needed(cluster: Cluster, node: str) -> str:
    """A run that would stop without this node."""
    for job in sorted(cluster.jobs.values(), key=lambda j: j.order):
        generation = job.generation
        if generation is None or generation.state == "ended" or node not in generation.members:
            continue
        placement = place(cluster, job, {node})
        if not placement.fits:
            return f"job {job.name} would stop without this node ({placement.missing})"
    return ""


def _full(cluster: Cluster, node: str, mine: Claim, wall: float) -> str:
    """Who is away for a repair already, or asked before, if there is no room for one more. Who asked first only
    decides fairness, so clocks may differ: the limit itself is kept by looking again in phase ``holds``."""
    away, before, size = [], [], 0
    first = (mine.since, natural(node))
    for record in cluster.nodes.values():
        live = cluster.live(record.id)
        claim = record.facts.repair_state.claim if record.facts.repair_state is not None else None
        counts = claim is not None and claim.bars and (live or abs(wall - claim.since) < AWAY)
        size += live or counts
        if record.id == node or claim is None:
            continue
        if counts:
            away.append(record.id)
        elif live and not record.mute and claim.phase == "asks" and (claim.since, natural(record.id)) < first:
            before.append(record.id)
    limit = max(1, size // ONE_IN)
    others = sorted(away, key=natural) + (sorted(before, key=natural) if mine.phase == "asks" else [])
    if len(others) < limit:
        return ""
    return f"waits for {', '.join(others[:8])}: no more than {limit} of {size} nodes are repaired at once"


def described(record: NodeRecord) -> str:
    """One phrase on what the node's agent repairs; empty if nothing."""
    repair_state = record.facts.repair_state
    if repair_state is None or (repair_state.claim is None and not repair_state.why):
        return ""
    claim = repair_state.claim
    if claim is None:
        return f"not repaired by itself: {repair_state.why}"
    words = {"asks": "is to come", "holds": "makes room", "runs": "under way", "verifies": "being verified"}
    where = "" if claim.whole or not claim.device else _gpu(record, claim.device) + ": "
    return f"{where}{LABEL[claim.kind]} {words[claim.phase]}" + (f": {claim.why}" if claim.why else "")


def _gpu(record: NodeRecord, device: str) -> str:
    return next((f"GPU {g.index}" for g in record.facts.gpus if g.uuid == device), device)
