"""The next step of one job, from what all agents see alike: form, re-form, hold, pause, end, or wait, and why.

Every agent computes the same decision; ``nodes/members.py`` says who takes it first; the store's
compare-and-set picks one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nodeagent.model.job import TERMINAL, JobRecord, Outcome
from nodeagent.model.world import Cause, Generation
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.failure import judgement, timeouts
from nodeagent.plan.failure.policies import BY, GO_ON, STOPPED_CODE
from nodeagent.plan.job.proposal import propose_or_hold, why_portless
from nodeagent.plan.job.running import (
    after_fault,
    await_nodes,
    completed,
    decide_running,
    judge_before,
    judge_ended,
    settle_scale,
    still,
)
from nodeagent.plan.job.waiting import decide_waiting
from nodeagent.plan.nodes.candidates import strays
from nodeagent.plan.nodes.failsafe import silence
from nodeagent.plan.nodes.health import sick_members
from nodeagent.plan.nodes.members import gone_nodes, holding_nodes
from nodeagent.plan.nodes.setbacks import remembered
from nodeagent.plan.queueing import dependencies
from nodeagent.plan.queueing.queue import queue, to_come
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.steps import Activate, Decision, End, Propose, Remove


def decide(cluster: Cluster, job: JobRecord, wall: float) -> Decision:
    """The next step of a job. ``wall`` is Unix time and ends up only in texts for people."""
    found = _decide(cluster, job, wall)
    step = found.step
    if not isinstance(step, Propose | End):
        return found
    stay, cause = (step.members, step.cause) if isinstance(step, Propose) else ((), None)
    setbacks = remembered(cluster, job, stay, cause, step.spend)
    return found if setbacks is None else replace(found, step=replace(step, setbacks=setbacks))


def _decide(cluster: Cluster, job: JobRecord, wall: float) -> Decision:
    if job.phase in TERMINAL:
        return _ended(cluster, job, wall)
    refusal = cluster.refused.get(job.uid)
    if refusal is not None and not (refusal.controlled and job.control.desired == "stop"):
        return Decision(None, (refusal.text,), steady=True)
    if refusal is None and (judged := judge_before(cluster, job, wall)) is not None:
        return judged
    if refusal is None and (done := completed(cluster, job)) is not None:
        return done
    if job.control.desired == "stop":
        return _stop(cluster, job)
    if (noted := dependencies.after_others(cluster, job)) is not None:
        return noted
    due = timeouts.next_due(job)
    over = timeouts.over_time(cluster, job) or timeouts.overdue(cluster, job, due)
    return over or timeouts.until_time_is_over(job, timeouts.until_due(_decide_live(cluster, job, wall), due))


def _decide_live(cluster: Cluster, job: JobRecord, wall: float) -> Decision:
    if job.generation is not None and job.generation.state == "active":
        # Of time it depends on what is reserved for others now, on the order of those that wait, and on whose time to
        # begin has come.
        of = job, queue(cluster), reserved(cluster), to_come(cluster)
        calm = cluster.once(f"calm:{job.uid}", lambda _before: _calm(cluster, job, wall), *of)
        if calm is not None:
            return calm
    settled = settle_scale(cluster, job)
    if settled is not None:
        return settled
    if job.control.desired == "pause":
        return _pause(cluster, job)
    silent = silence(cluster, job)
    if silent:
        return Decision(None, (silent,))
    generation = job.generation
    if generation is not None and generation.state == "forming":
        return _forming(cluster, job, generation, wall)
    if generation is not None and generation.state == "active":
        return decide_running(cluster, job, generation, wall)
    return decide_waiting(cluster, job, wall)


def _calm(cluster: Cluster, job: JobRecord, wall: float) -> Decision | None:
    """What is decided of most jobs most of the time: nothing, for as long as the view stays the same."""
    generation = job.generation
    if generation is None or generation.state != "active" or job.control.desired != "run" or silence(cluster, job):
        return None
    return still(cluster, job, generation, wall)


# --- ended, stopping, pausing -------------------------------------------------------------------


def _ended(cluster: Cluster, job: JobRecord, wall: float) -> Decision:
    if (judged := judge_ended(cluster, job, wall)) is not None:
        return judged
    still = holding_nodes(cluster, job)
    if still:
        return Decision(None, (f"its last workers are being stopped on {', '.join(still)}",), steady=True)
    if job.control.delete and not dependencies.is_awaited(cluster, job):
        if job.failsafe_members:
            names = ", ".join(sorted(job.failsafe_members, key=natural))
            why = silence(cluster, job) or f"waits for one of {names} to let go of the last generation"
            return Decision(None, (why,), steady=True)
        return Decision(Remove(), ("it has ended and its deletion was asked for",))
    return Decision(None, steady=True)


def _stop(cluster: Cluster, job: JobRecord) -> Decision:
    who = job.control.by or "an operator"
    text = f"stopped by {who}"
    outcome = Outcome(code=STOPPED_CODE, text=text)
    return Decision(End("stopped", text, gone_nodes(cluster, job), outcome, planned=True), (text,))


def _pause(cluster: Cluster, job: JobRecord) -> Decision:
    who = job.control.by or "an operator"
    text = f"paused by {who}{GO_ON}{job.name}"
    if job.phase == "pausing" and who == BY:
        text = job.reason  # says which policy, and of what
    if job.phase == "paused":
        scale = job.control.scale
        return Decision(None, (text,), steady=scale is None or scale.state != "pending")
    gone = gone_nodes(cluster, job)
    running = job.generation is not None and job.generation.state == "active"
    if job.phase == "pausing":
        still = holding_nodes(cluster, job)
        if still:
            return Decision(None, (f"waits for the workers on {', '.join(still)} to end",))
        return Decision(End("paused", text, gone), (text,))
    if running or holding_nodes(cluster, job):
        return Decision(End("pausing", text, gone, planned=True), (text,))
    return Decision(End("paused", text, gone), (text,))


# --- forming ------------------------------------------------------------------------------------


def _forming(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision:
    gone = gone_nodes(cluster, job)
    found = judgement.late_fault(cluster, job, wall)
    if found is not None:
        return after_fault(cluster, job, found, gone)
    if gone:
        return _form_again(cluster, job, generation, gone, {})
    sick, _ = sick_members(cluster, generation)
    if sick and cluster.behind(job):
        return await_nodes(cluster, sick[0].text)
    if sick:  # nothing runs yet: the placement avoids what is sick, on the same nodes where that will do
        return _form_again(cluster, job, generation, (), {}, "; ".join(one.text for one in sick))
    lacks = cluster.once(
        f"lacks:{job.uid}", lambda _before: _lacks(cluster, job, generation), job, size=len(generation.members)
    )
    silent, stopping = lacks.silent, lacks.stopping
    if mute := {n: f"the agent of {n} is silent or cut off from the store" for n in silent if cluster.nodes[n].mute}:
        if cluster.behind(job):
            return await_nodes(cluster, "; ".join(mute.values()))
        return _form_again(cluster, job, generation, (), mute)
    if lacks.unfit or lacks.portless:
        return _form_again(cluster, job, generation, (), lacks.unfit, lacks.portless)
    if job.failsafe_members and not generation.released and not silent and not stopping:
        names = ", ".join(sorted(job.failsafe_members, key=natural))
        return Decision(None, (f"waits for one of {names} to let go of the generation before",))
    if not silent and not stopping:
        return Decision(Activate(generation.token), ("every member acknowledged",))
    if cluster.served >= generation.deadline and silent:
        drop = {n: f"{n} did not acknowledge in time" for n in silent if n not in generation.holders}
        return _form_again(cluster, job, generation, (), drop)
    why = []
    if silent:
        why.append(f"waits for {', '.join(silent)} to acknowledge generation {generation.number}")
    if set(stopping) - set(silent):
        why.append(f"waits for {', '.join(n for n in stopping if n not in silent)} to stop older workers")
    return Decision(None, tuple(why), generation.deadline)


@dataclass(frozen=True, slots=True)
class _Lacks:
    """What a forming generation still waits for."""

    silent: tuple[str, ...]
    """Members that have not acknowledged it, by rank."""
    stopping: tuple[str, ...]
    """Nodes that may still run an older one, in natural order."""
    unfit: Mapping[str, str]
    """Those of the silent that cannot take part after all: node to why."""
    portless: str = ""
    """Why the first of them cannot lead the others, if another may; then ``unfit`` is empty."""


def _lacks(cluster: Cluster, job: JobRecord, generation: Generation) -> _Lacks:
    silent = tuple(m.node for m in generation.ordered() if m.node in generation.missing)
    ready = {n: cluster.nodes[n].readiness.get(job.uid) for n in silent}
    unfit = {
        n: f"{n} cannot run it: {r.reason}"
        for n, r in ready.items()
        if r is not None and r.state == "unfit" and (job.spec.several or not r.portless)
    }
    astray = strays(cluster, job)
    unfit |= {n: astray[n] for n in silent if n in astray}
    lead = next((n for n in silent if generation.members[n].group_rank == 0), "")
    why = why_portless(cluster, job, lead)
    portless = f"{lead} cannot lead it: {why}" if why and not unfit else ""
    return _Lacks(silent, tuple(sorted(generation.holders, key=natural)), unfit, portless)


def _form_again(
    cluster: Cluster,
    job: JobRecord,
    generation: Generation,
    gone: tuple[str, ...],
    drop: Mapping[str, str],
    why: str = "",
) -> Decision:
    """The forming generation cannot become whole as it is: propose it anew without those gone, and without those to
    ``drop`` (node to why)."""
    members_gone = [n for n in gone if n in generation.members]
    news = why or "; ".join(drop.values()) or (f"then node {', '.join(members_gone)} lost" if members_gone else "")
    cause = generation.cause
    if news and news not in cause.text:  # two nodes may take turns in having no port
        cause = cause.model_copy(update={"text": f"{cause.text}; {news}"})
    if generation.planned and (left := [n for n in gone if n in generation.holders]):
        # Its workers were to leave with the others, who need not wait for it (see blame.leaves_broken).
        text = f"node {', '.join(left)} lost, while workers left since {generation.cause.text}"
        cause = Cause(kind="node_lost", text=text, node=left[0])
    return propose_or_hold(cluster, job, cause, gone, None, generation.planned, without=drop, grace=generation.grace)
