"""A job with an active generation: has it failed, finished, or is it to change? Healthy training is never stopped
without a reason. A pending scale is met, timed out, or waited for.

A scale-out is all or nothing: its newcomers join together when all are ready (``placing/placement.py``), or at its
deadline the target goes back to what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nodeagent.model.job import BudgetEntry, JobRecord, Outcome, Scale, ScaleState
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, Generation
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.failure import budget, faults, judgement
from nodeagent.plan.failure.hang import watching
from nodeagent.plan.failure.newcomers import join_fault
from nodeagent.plan.failure.policies import ENDS, answer, ending, roles_on, sentence, task_completed
from nodeagent.plan.failure.runtimes import fails_everywhere, others_answer_until
from nodeagent.plan.job.proposal import awaited, place, propose, propose_or_hold, up_to
from nodeagent.plan.nodes.availability import grace_left
from nodeagent.plan.nodes.candidates import asked
from nodeagent.plan.nodes.health import Sick, drained, remarkable, sick_members
from nodeagent.plan.nodes.members import gone_nodes, more_expected
from nodeagent.plan.nodes.setbacks import grows_at, runtime_failed
from nodeagent.plan.placing.placement import Placement
from nodeagent.plan.queueing.elastic import borrowed, nodes_wanted, stopped_with, transfers
from nodeagent.plan.steps import Decision, End, JudgeFault, Settle


def settle_scale(cluster: Cluster, job: JobRecord) -> Decision | None:
    """The step that ends the job's pending scale; None while there is none, or it goes on."""
    scale, generation = job.control.scale, job.generation
    if scale is None or scale.state != "pending":
        return None
    size = scaled_size(scale, generation)
    if generation is not None and generation.state == "active" and _met(scale, generation, job.spec.role.nodes.auto):
        has = f"runs with {size} places of {scale.role}" if scale.role else f"runs on {size} nodes"
        text = f"{has}; its target is {scale.want} now" if size < scale.want else f"{has} as asked"
        return _settled(job, scale, "met", "JobScaleMet", text, scale.want if scale.role else job.control.target)
    if not scale.deadline or cluster.served < scale.deadline or size >= scale.want:
        return None
    full = up_to(cluster, job, job.sized.nodes.target if scale.role else scale.want)
    auto = not scale.role and job.spec.role.nodes.auto  # what it has on top of its target is borrowed, and stays so
    target = scale.before if auto else max(scale.before, size)
    if not full.fits or (not scale.role and len(full.chosen) < scale.want):
        why = full.short
    elif generation is not None and generation.state == "active":
        why = "its nodes became ready too late"
    else:
        why = f"the job is {job.phase}: {job.reason}"
    what = f"scale of {scale.role}" if scale.role else "scale"
    text = f"{what} to {scale.want} timed out after {scale.timeout:g}s: {why}; went back to {target}"
    return _settled(job, scale, "rolled_back", "JobScaleRolledBack", text, target)


def scaled_size(scale: Scale, generation: Generation | None) -> int:
    """What a scale changes, as it is: nodes, or places of its role; 0 where no generation has any."""
    if generation is None or generation.state == "ended":
        return 0
    return generation.sizes[scale.role] if scale.role else len(generation.members)


def _met(scale: Scale, generation: Generation, auto: bool) -> bool:
    """``auto``: the job may have more than its target."""
    size = scaled_size(scale, generation)
    if scale.deadline:
        return size >= scale.want
    return (auto or size <= scale.want) and generation.members.keys().isdisjoint(scale.leaving)


def _settled(job: JobRecord, scale: Scale, state: ScaleState, event: str, text: str, target: int) -> Decision:
    changes: dict[str, object] = {"target": target, "scale": scale.model_copy(update={"state": state, "reason": text})}
    if scale.role:
        sizes = job.control.sizes | {scale.role: target}
        changes |= {"sizes": sizes, "target": job.spec.of_sizes(sizes).nodes.target}
    control = job.control.model_copy(update=changes)
    return Decision(Settle(control, event, text), (text,))


def completed(cluster: Cluster, job: JobRecord) -> Decision | None:
    """The end of a gang whose workers have all exited 0, or those of a role that says enough; None while they have not.
    Asked first: a node that goes now is not missed any more, and a stop or a pause came too late. But where a policy
    only pauses the job for it, a person's word counts."""
    generation = job.generation
    if generation is None or generation.state != "active":
        return None
    gone = gone_nodes(cluster, job)
    if (done := task_completed(job)) is not None:
        action, text = done
        if job.control.desired == "run" or ENDS[action] != "paused":
            return ending(cluster, job, ENDS[action], Outcome(code=1, text=text), gone)
        return None
    if not faults.all_succeeded(job):
        return None
    role = job.spec.completes
    whose = f"role {role} of " if role else ""
    text = f"every worker of {whose}generation {generation.number} exited 0"
    outcome = Outcome(code=0, text=text)
    return Decision(End("succeeded", text, gone, outcome, planned=bool(role)), (text,))


def decide_running(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision:
    gone = gone_nodes(cluster, job)
    if (over := _ended_before(cluster, job, gone)) is not None:
        return over
    fault = faults.find_fault(cluster, job, wall)
    if fault is not None and fault.cause.kind == "node_lost":
        # Who is cut off together lapses one by one, and comes back one by one. The last to lapse may be the last
        # failsafe member (see nodes/failsafe.silence), and those still to come back may have been lent time and run on.
        wait, end = more_expected(cluster, job)
        if wait:
            return Decision(None, (f"{fault.cause.text}; waits a moment: {wait}",), end)
    if fault is not None:
        if fault.cause.kind == "runtime_failed":
            return _without_runtime(cluster, job, generation, fault, gone)
        return _without_newcomer(cluster, job, fault, gone) or after_fault(cluster, job, fault, gone)
    return _healthy_gang(cluster, job, generation, wall)


def still(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision | None:
    """The decision to let a gang train, if it is one that no passing of time changes. What a scale that is pending
    comes to depends on the time."""
    scale = job.control.scale
    if scale is not None and scale.state == "pending":
        return None
    if faults.find_fault(cluster, job, wall) is not None:
        return None
    if _ended_before(cluster, job, ()) is not None:
        return None
    found = _healthy_gang(cluster, job, generation, wall)
    return replace(found, steady=True) if found.step is None and not found.at else None


def _healthy_gang(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision:
    sick, kept = sick_members(cluster, generation)
    sick = tuple(one for one in sick if not faults.final_report(generation.reports.get(one.node)))  # nothing runs there
    change = _change(cluster, job, generation, sick, wall)
    stalled = watching(generation)
    notes = (*((stalled,) if stalled else ()), *kept)
    if notes and change.step is None:
        return Decision(None, (*notes, *change.why), change.at)
    return change


def _without_newcomer(cluster: Cluster, job: JobRecord, fault: faults.Fault, gone: tuple[str, ...]) -> Decision | None:
    """The gang goes on at once without a node that failed as soon as it had joined; None: it has not, or it cannot."""
    found = join_fault(cluster, job, fault)
    if found is None:
        return None
    placement = place(cluster, job, [found.cause.node])
    if not placement.fits:
        return None
    return propose(cluster, job, found.cause, gone, found.spend, placement, planned=False)


def _without_runtime(
    cluster: Cluster, job: JobRecord, generation: Generation, fault: faults.Fault, gone: tuple[str, ...]
) -> Decision:
    """The gang goes on without nodes whose podman could start no container, waits until they are tried again, or ends
    since no node can. Nothing is spent."""
    if at := others_answer_until(cluster, job, generation):
        return Decision(None, (f"{fault.cause.text}; waits a moment for what happens on the other nodes",), at)
    if text := fails_everywhere(cluster, job, generation):
        return Decision(End("failed", text, gone, fault.outcome, fault.spend), (text,))
    placement = place(cluster, job, runtime_failed(generation))
    if placement.fits:
        return propose(cluster, job, fault.cause, gone, fault.spend, placement, planned=False)
    return Decision(End("holding", fault.cause.text, gone, spend=fault.spend), (fault.cause.text,))


def after_fault(cluster: Cluster, job: JobRecord, fault: faults.Fault, gone: tuple[str, ...]) -> Decision:
    """What a fault leads to: the job's end, a wait, or the next generation."""
    if fault.fail and not fault.awaits:
        return _ended_by(cluster, job, fault, gone)
    if fault.fail:  # a lost node would cost nothing, and not end it
        text = f"{fault.fail}; {judgement.judged_when(fault.awaits)}"
        spend = fault.spend.model_copy(update={"fails": fault.fail, "ends": fault.ends})
        return Decision(End("holding", text, gone, spend=spend), (text,))
    if fault.cause.kind == "crowded":  # which nodes it does without then, its record has to say
        return Decision(End("holding", fault.cause.text, gone, spend=fault.spend), (fault.cause.text,))
    wait = budget.wait_after(cluster, job, fault.spend)
    if wait.delay_ms:
        text = f"{fault.cause.text}; {wait.why}; starts again in {wait.delay_ms / 1000:g} s"
        step = End("holding", text, gone, spend=fault.spend, delay_ms=wait.delay_ms)
        return Decision(step, (text,))
    return propose_or_hold(cluster, job, fault.cause, gone, fault.spend, planned=False)


def _ended_by(cluster: Cluster, job: JobRecord, fault: faults.Fault, gone: tuple[str, ...]) -> Decision:
    """Only where a fault fails the job are the others killed at once: else they save, if they still can."""
    outcome = fault.outcome.model_copy(update={"text": fault.fail})
    if fault.ends == "failed":  # its own sentence stays the outcome's
        return Decision(End("failed", fault.fail, gone, fault.outcome, fault.spend), (fault.fail,))
    return ending(cluster, job, fault.ends, outcome, gone, fault.spend)


def judge_before(cluster: Cluster, job: JobRecord, wall: float) -> Decision | None:
    """The fault that ended the generation before, where only now is known what it was; None if there is nothing to put
    right. Whatever ends this generation comes after it: the record keeps the reports of the last that ended, so nobody
    could judge the one before any more."""
    entry = job.budget.get(str(job.last_number))
    if job.generation is None or job.generation.state != "active" or entry is None or not entry.counts or entry.fails:
        return None
    found = judgement.late_fault(cluster, job, wall)
    if found is None:
        return None
    spend = found.spend.model_copy(update={"fails": found.fail, "ends": found.ends})
    return Decision(JudgeFault(job.last_number, spend), (f"generation {job.last_number} was ended by: {spend.text}",))


def judge_ended(cluster: Cluster, job: JobRecord, wall: float) -> Decision | None:
    """The same of a job that was stopped, or ended otherwise, before its last fault was judged: only whether a lost
    node was the cause, which costs nothing. Nothing else follows from it any more."""
    if not job.silent:
        return None
    found = judgement.late_fault(cluster, job, wall)
    if found is None or found.spend.counts:
        return None
    why = f"generation {job.last_number} was ended by: {found.spend.text}"
    return Decision(JudgeFault(job.last_number, found.spend), (why,))


def _ended_before(cluster: Cluster, job: JobRecord, gone: tuple[str, ...]) -> Decision | None:
    """The job's end by the fault of the generation before, which was judged once this one ran."""
    entry = job.budget.get(str(job.last_number))
    if entry is None or not entry.counts or not entry.fails:
        return None
    code = entry.exit if entry.exit is not None else 1
    outcome = Outcome(code=code, text=entry.fails, error=entry.error)
    return ending(cluster, job, entry.ends, outcome, gone, in_order=entry.ends != "failed")


def _change(cluster: Cluster, job: JobRecord, generation: Generation, sick: Sequence[Sick], wall: float) -> Decision:
    """No worker is at fault: has an operator asked for a change, is hardware unfit, or can the gang grow?"""
    drained = not remarkable(cluster).isdisjoint(generation.members)
    leaving = [m.node for m in generation.ordered() if _draining(cluster, m.node)] if drained else []
    if leaving:
        who, are = ("nodes", "are") if len(leaving) > 1 else ("node", "is")
        text = f"{who} {', '.join(leaving)} {are} {_why_drained(cluster, leaving[0])}"
        if cluster.behind(job):
            return await_nodes(cluster, text)
        grace = grace_left(cluster, job, leaving)
        return _evict(cluster, job, Cause(kind="drain", text=text, node=leaving[0]), leaving, wall, grace)
    if sick:
        text = "; ".join(one.text for one in sick)
        if cluster.behind(job):
            return await_nodes(cluster, text)
        nodes = [one.node for one in sick]
        return _evict(cluster, job, Cause(kind="hardware", text=text, node=sick[0].node), nodes, wall)
    if job.control.restart > job.restart_done:
        text = f"restarted by {job.control.by or 'an operator'}"
        return _propose_or_stay(cluster, job, Cause(kind="restart", text=text), wall)
    if job.spec.several:
        if other := transfers(cluster).stops.get(job.uid):
            return _make_room(cluster, job, cluster.jobs[other], wall)
        return _finishing(generation) or _resize_roles(cluster, job, generation, wall)
    size, target, scale = len(generation.members), nodes_wanted(cluster, job), job.control.scale
    pending = scale if scale is not None and scale.state == "pending" else None
    goes = [m.node for m in generation.ordered() if pending is not None and m.node in pending.leaving]
    who = job.control.by or "an operator"
    grace = pending.grace if pending is not None else None
    others = transfers(cluster)
    back = others.gives.get(job.uid, {})
    if goes:
        cause = Cause(kind="scale", text=f"{', '.join(goes)} scaled in by {who}", node=goes[0])
        scaled = _propose_or_stay(cluster, job, cause, wall, goes, grace)
        if scaled.step is not None or not (back or job.uid in others.stops):
            return scaled  # one that cannot be carried out keeps nobody from getting its nodes
    if job.uid in others.stops:
        return _make_room(cluster, job, cluster.jobs[others.stops[job.uid]], wall)
    if back:
        return _give_back(cluster, job, back, wall)
    if target < size:
        cause = Cause(kind="scale", text=f"scaled from {size} to {target} nodes by {who}")
        return _propose_or_stay(cluster, job, cause, wall, grace=grace)
    if finishing := _finishing(generation):
        return finishing
    if target > size:
        grown = _scale_out(cluster, job, generation, wall) or _grow(cluster, job, generation, wall)
        if grown.step is not None or grown.at:
            return grown
        return _regain(cluster, job, generation, wall) or grown
    kept = _regain(cluster, job, generation, wall)
    if kept is None and (count := borrowed(cluster, job)):
        text = f"{count} of its {size} nodes are borrowed: they go back when a job that is to have them needs them"
        return Decision(None, (text,))
    return kept or Decision(None)


def await_nodes(cluster: Cluster, text: str) -> Decision:
    """No member leaves on a record of its node that may be older than the generation: the next beat brings a newer."""
    at = cluster.served + millis(cluster.timing.heartbeat)
    return Decision(None, (f"{text}, as of a record older than the job's: waits for the next heartbeat",), at)


def _finishing(generation: Generation) -> Decision | None:
    """A gang of which some pods have finished does not grow: the others are about to finish. Nor does it make room
    for others (``queueing/transfers.py``)."""
    if faults.is_finishing(generation):
        return Decision(None, ("some pods have finished; waits for the others",))
    return None


def _resize_roles(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision:
    """A gang of several roles has as many places as are wanted of each, or of an elastic role as many as there is room
    for: both may have changed."""
    has, wants = generation.sizes, {role.name: role.places for role in job.sized.roles}
    others = [name for name in wants if wants[name] != has[name]]
    if not others:
        return Decision(None)
    who, scale, growing = job.control.by or "an operator", job.control.scale, job.control.growing
    placement = place(cluster, job)
    given = Counter(one.role for places in placement.places.values() for one in places)
    short = ", ".join(f"{has[name]} of {wants[name]} places of {name}" for name in others)
    if placement.fits and any(given[name] < min(has[name], wants[name]) for name in wants):
        return Decision(
            None, (f"runs with {short}: its nodes would not do for more",), growing.deadline if growing else 0
        )
    if placement.fits and (given == has or (growing is not None and (cold := _cold(generation, placement)))):
        why = up_to(cluster, job, job.sized.nodes.target).short if given == has else cold
        return Decision(None, (f"runs with {short}: {why}",), growing.deadline if growing else 0)
    shrinks = any(wants[name] < has[name] for name in wants)
    if placement.fits and not shrinks and (growing is None or given[growing.role] < growing.want):
        joins = _join_roles(cluster, job, generation, placement, short)
        if joins is not None:
            return joins
        news = ", ".join(f"{name} from {has[name]} to {given[name]}" for name in wants if given[name] > has[name])
        return _propose_or_stay(cluster, job, Cause(kind="join", text=f"there is room for more places: {news}"), wall)
    to = given if placement.fits else wants
    text = ", ".join(f"{name} from {has[name]} to {to[name]}" for name in wants if to[name] != has[name])
    grace = scale.grace if scale is not None and scale.state == "pending" else None
    cause = Cause(kind="scale", text=f"scaled {text} places by {who}")
    return _propose_or_stay(cluster, job, cause, wall, grace=grace)


def _join_roles(
    cluster: Cluster, job: JobRecord, generation: Generation, placement: Placement, short: str
) -> Decision | None:
    """Elastic roles that could have more places get them after the cool-down: what they wait for meanwhile."""
    newcomers = [c for c in placement.chosen if c.node not in generation.members]
    if at := grows_at(job, cluster.served):
        return Decision(None, (f"runs with {short}; there is room for more, later: {_HELD_UP}",), at)
    if mute := _mute(cluster, generation):
        return Decision(None, (f"runs with {short}; there is room for more, later: {mute}",))
    cool = millis(cluster.timing.cooldown)
    at = max([generation.since + cool] + [c.joined + cool for c in newcomers])
    if cluster.served < at:
        text = f"runs with {short}; there is room for more, after the cool-down of {cluster.timing.cooldown:g} s"
        return Decision(None, (text,), at)
    if cold := _cold(generation, placement):
        return Decision(None, (f"runs with {short}: {cold}",))
    if late := _getting_ready(cluster, job, placement):
        states = asked(cluster)[job.uid]
        until = max(at, min((states[c.node].since for c in newcomers), default=at)) + cool
        if cluster.served < until:
            return Decision(None, (f"runs with {short}; grows together with {late} (still getting ready)",), until)
    return None


def _give_back(cluster: Cluster, job: JobRecord, back: Mapping[str, str], wall: float) -> Decision:
    """``back``: borrowed nodes to the jobs (uids) that are to have them."""
    names = ", ".join(sorted(back, key=natural))
    uids = tuple(dict.fromkeys(back.values()))
    text = f"{names} given back: job {', '.join(cluster.jobs[uid].name for uid in uids)} needs it"
    cause = Cause(kind="share", text=text, node=min(back, key=natural), room_for=uids)
    return _propose_or_stay(cluster, job, cause, wall, back)


def _make_room(cluster: Cluster, job: JobRecord, other: JobRecord, wall: float) -> Decision:
    """The job is stopped as planned, saves, and waits in line again; not before it has run for a while, lest one that
    has just come back is stopped once more (``min_runtime``)."""
    text = f"job {other.name} of queue {queue_of(other.spec.queue)} is entitled to its nodes"
    at, until = stopped_with(cluster, job)
    if until:
        return Decision(None, (f"{text}: makes room when {until}",), at)
    cause = Cause(kind="share", text=text, room_for=(other.uid,))
    step = End("holding", f"made room: {text}", spend=_note(cluster, job, cause, wall), planned=True)
    return Decision(step, (text,))


def _evict(
    cluster: Cluster, job: JobRecord, cause: Cause, nodes: Collection[str], wall: float, grace: float | None = None
) -> Decision:
    """A need: the gang goes on without what has to go from these nodes, or holds. ``grace``: as of ``propose``."""
    roles = roles_on(job, nodes)
    spend = _note(cluster, job, cause, wall).model_copy(update={"roles": roles})
    action = answer(job.spec, roles, "PodEvicted")
    if action is not None and action in ENDS:
        outcome = Outcome(code=1, text=sentence(action, "PodEvicted", cause.text))
        return ending(cluster, job, ENDS[action], outcome, (), spend)
    return propose_or_hold(cluster, job, cause, (), spend, planned=True, grace=grace)


def _scale_out(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision | None:
    """The scale-out that was asked for: at once, when all its newcomers are ready; None while they are not, and the
    gang can only become again what it was before."""
    growing = job.control.growing
    if growing is None:
        return None
    placement = place(cluster, job)
    size = len(generation.members)
    if len(placement.chosen) >= growing.want:
        if cold := _cold(generation, placement):
            return Decision(None, (f"runs on {size} of {growing.want} nodes: {cold}",), growing.deadline)
        text = f"scaled from {size} to {len(placement.chosen)} nodes by {job.control.by or 'an operator'}"
        return _propose_or_stay(cluster, job, Cause(kind="scale", text=text), wall)
    if growing.before > size:
        return None
    short = up_to(cluster, job, growing.want).short
    return Decision(None, (f"runs on {size} of {growing.want} nodes: {short}",), growing.deadline)


def _grow(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision:
    """Below the target: after the cool-down. Never with a node that was scaled in by name: that needs another
    scale."""
    left = job.control.leaving - set(generation.members)
    placement = place(cluster, job, left)
    newcomers = [c for c in placement.chosen if c.node not in generation.members]
    size = len(generation.members)
    wanted = nodes_wanted(cluster, job)
    short = f"runs on {size} of {wanted} nodes"
    if not newcomers or len(placement.chosen) <= size:
        asleep = f"; {', '.join(sorted(left, key=natural))} scaled in by name: scale again to use it" if left else ""
        return Decision(None, (f"{short}: {placement.short}{asleep}",))
    names = ", ".join(c.node for c in newcomers)
    if at := grows_at(job, cluster.served):
        return Decision(None, (f"{short}; {names} joins later: {_HELD_UP}",), at)
    if mute := _mute(cluster, generation):
        return Decision(None, (f"{short}; {names} joins later: {mute}",))
    cool = millis(cluster.timing.cooldown)
    at = max([generation.since + cool] + [c.joined + cool for c in newcomers])
    if cluster.served < at:
        return Decision(None, (f"{short}; {names} joins after the cool-down of {cluster.timing.cooldown:g} s",), at)
    if cold := _cold(generation, placement):
        return Decision(None, (f"{short}: {cold}",))
    if late := _getting_ready(cluster, job, placement):
        states = asked(cluster)[job.uid]
        until = max(at, min(states[c.node].since for c in newcomers)) + cool
        if cluster.served < until:
            return Decision(None, (f"{short}; {names} joins together with {late} (still getting ready)",), until)
    cause = Cause(kind="join", text=f"{names} joined")
    if job.control.target < wanted:
        cause = Cause(kind="share", text=f"{names} borrowed: nobody else needs it")
    return _propose_or_stay(cluster, job, cause, wall, left)


_HELD_UP = "again and again a node was no good"


def _mute(cluster: Cluster, generation: Generation) -> str:
    """Why a gang does not grow now, if a member's agent is silent: it would go on without that one, which trains."""
    mute = [m.node for m in generation.ordered() if (n := cluster.nodes.get(m.node)) is not None and n.mute]
    return f"the agent of {', '.join(mute)} is silent or cut off from the store" if mute else ""


def _regain(cluster: Cluster, job: JobRecord, generation: Generation, wall: float) -> Decision | None:
    """A member that runs on fewer devices than it could, since some were sick when the gang was formed: after the
    cool-down the gang takes them again. None where there is none."""
    role = job.spec.role
    if not role.uneven or role.workers_per_node != "gpu":
        return None  # a node takes part with all that it has, or not at all
    if not any(_healthy(cluster, m.node) > len(m.devices) for m in generation.members.values()):
        return None
    chosen = {c.node: c for c in place(cluster, job, job.control.leaving - set(generation.members)).chosen}
    if not generation.members.keys() <= chosen.keys():
        return None
    more = [m.node for m in generation.ordered() if len(chosen[m.node].devices) > len(m.devices)]
    if not more or any(len(chosen[m.node].devices) < len(m.devices) for m in generation.ordered()):
        return None
    names, at = ", ".join(more), generation.since + millis(cluster.timing.cooldown)
    if cluster.served < at:
        cool = f"the cool-down of {cluster.timing.cooldown:g} s"
        return Decision(None, (f"{names} has more GPUs than are used; they are taken after {cool}",), at)
    return _propose_or_stay(cluster, job, Cause(kind="join", text=f"GPUs of {names} are back"), wall)


def _getting_ready(cluster: Cluster, job: JobRecord, placement: Placement) -> str:
    """Names of nodes that would join as well if the gang waited for them: it stops once for all of them. Waiting is
    bounded by a cool-down."""
    states = asked(cluster).get(job.uid, {})
    late = (n for n in awaited(cluster, job, placement) if n in states and states[n].state == "preparing")
    return ", ".join(sorted(late, key=natural))


def _cold(generation: Generation, placement: Placement) -> str:
    """Newcomers that are not as warm as they will be: who trains goes on until they are. Their shims bound that."""
    names = [c.node for c in placement.chosen if c.warming and c.node not in generation.members]
    return f"{', '.join(names)} is still warming up its workers" if names else ""


def _healthy(cluster: Cluster, node: str) -> int:
    record = cluster.nodes.get(node)
    return 0 if record is None else sum(gpu.healthy for gpu in record.facts.gpus)


def _propose_or_stay(
    cluster: Cluster,
    job: JobRecord,
    cause: Cause,
    wall: float,
    without: Collection[str] = (),
    grace: float | None = None,
) -> Decision:
    """Wanted, not needed: healthy training goes on where it cannot be met (a member is cordoned or its GPU sick)."""
    placement = place(cluster, job, without)
    if not placement.fits:
        return Decision(None, (f"not yet {cause.text}: {placement.missing}",))
    return propose(cluster, job, cause, (), _note(cluster, job, cause, wall), placement, planned=True, grace=grace)


def _note(cluster: Cluster, job: JobRecord, cause: Cause, wall: float) -> BudgetEntry:
    """A line in the job's history, at no cost: what ended the generation before."""
    text, node = cause.text, cause.node
    return BudgetEntry(
        at=cluster.served, wall=round(wall, 3), kind=cause.kind, counts=False, node=node, text=text,
        room_for=cause.room_for, alone=budget.alone_times(job.generation),
    )  # fmt: skip


def _why_drained(cluster: Cluster, node: str) -> str:
    window, notice = cluster.nodes[node].window, cluster.nodes[node].facts.notice
    if notice is not None:
        return notice.text
    return window.text if window is not None and window.leaves else "being drained"


def _draining(cluster: Cluster, node: str) -> bool:
    record = cluster.nodes.get(node)
    return record is not None and drained(record)
