"""From looks and events to verdicts, and from a verdict back to health. Pure: time comes in, a new memory comes out.

A verdict lives through ``active``, then ``repaired`` (its repair was done, or what made it fire has gone), then
``probation`` (a check passed), and then it is forgotten; one that is not fatal is forgotten at once. One that fires
again on the way is active again, and after a repair that did not last the next heavier one is asked for. Must never
take silence for health: a rule that could not be looked at stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nodeagent.hardware.judging.eventrules import EVENT_RULES, XIDS, Fired, judge_events, remember, xid_rule
from nodeagent.hardware.judging.rules import FOREIGN, READING_RULES, SHARED, TAKEN, DeviceLook, Rule, looks
from nodeagent.hardware.readings import DeviceEvent, GpuReading, Readings
from nodeagent.model.health import ORDER, Action, Verdict
from nodeagent.model.node import Gpu

PROBATION = 600.0
"""Seconds a device is watched after its repair before it is trusted again."""
QUIET = 3600.0
"""Seconds without a new event after which a verdict that heals by quiet is forgotten."""
WEEK = 7 * 86_400.0
LONGEST_LOOK = 10.0
"""Seconds that one look speaks for at most: what was between two that are further apart nobody saw."""
MOST_DOUBLED = 10
"""How often a probation is doubled at most."""
_NEXT: Mapping[Action, Action] = {"reset_gpu": "reboot", "reboot": "service", "diagnose": "service"}
"""The next heavier repair, after one that did not last a week."""
MOST_PUBLISHED = 32
"""Verdicts that are published; the harmless ones go first."""
RAW = 200
"""Characters of the line that made one fire."""
HOUR = 3600.0
SHOWS_NEWEST = frozenset({FOREIGN.id, SHARED.id})
"""Rules that show the newest reading, not the first: who uses the GPU now."""
VerdictKey = tuple[str, str]
"""Rule and device."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A repair that was done: the next verdict of the device asks for more after it."""

    device: str
    rule: str
    action: Action
    at: float


Tally = tuple[tuple[int, float, int], ...]
"""Of each minute of the window: which it is, for how many seconds the rule held in it, and how often it began to."""


@dataclass(frozen=True, slots=True)
class JudgeMemory:
    """All that must outlive the agent, so that its restart forgets no broken GPU."""

    verdicts: tuple[Verdict, ...] = ()
    past: tuple[DeviceEvent, ...] = ()
    repairs: tuple[Repair, ...] = ()
    at: float = 0.0
    """When it was judged last."""
    holding: Mapping[VerdictKey, float] = field(default_factory=dict)
    """Rules that fire but have not held for long enough: since when."""
    tallies: Mapping[VerdictKey, Tally] = field(default_factory=dict)
    """Of rules with a window, how much of it they held."""


@dataclass(frozen=True, slots=True)
class JudgePolicy:
    """What the config says about the rules."""

    probation: float = PROBATION
    dry_run: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()
    declared: Mapping[str, Rule] = field(default_factory=dict)
    """Rules of plug-ins and of the site's checks, by id."""


def rules() -> tuple[Rule, ...]:
    """The whole table, as the tool shows it."""
    return (*READING_RULES, *EVENT_RULES, *(xid_rule(code) for code in sorted(XIDS)))


def judge(
    memory: JudgeMemory,
    now: Readings,
    before: Readings | None,
    at: float,
    elapsed: float,
    ours: frozenset[int] = frozenset(),
    policy: JudgePolicy = JudgePolicy(),
) -> JudgeMemory:
    """Take in new readings at Unix time ``at``, ``elapsed`` seconds after ``before``; ``ours`` are our workers' pids.
    Bus ids of events become UUIDs."""
    names = {g.pci: g.uuid for g in now.gpus or () if g.pci}
    events = tuple(replace(e, device=names.get(e.device, e.device)) for e in now.events)
    past = remember(memory.past, events, memory.at, at)
    seen = _combined(looks(now, before, elapsed, ours, policy.declared))
    bad_links = frozenset(device for (rule, device), look in seen.items() if rule == "nvlink.down" and look.fires)
    fired = _worst(judge_events(past, events, memory.at, at, bad_links, _clean(now), policy.declared))
    fired = {key: one for key, one in fired.items() if one.rule.id not in policy.off}
    holding: dict[VerdictKey, float] = {}
    tallies = dict(memory.tallies)
    for key, look in seen.items():
        if look.rule.id in policy.off or not look.fires:
            continue
        since = memory.holding.get(key, at)
        if look.rule.window:
            begins = 0 if key in memory.holding else 1
            tallies[key] = _tallied(memory.tallies.get(key, ()), at, at - memory.at, begins, look.rule.window)
            held = _enough(tallies[key], look.rule)
        else:
            held = at - since >= look.rule.after
        if held:
            fired[key] = Fired(look.rule, look.device, look.raw)
        holding[key] = since
    fine = frozenset(key for key, look in seen.items() if not look.fires)
    verdicts = {(v.rule, v.device): v for v in memory.verdicts}
    repairs = tuple(r for r in memory.repairs if at - r.at < WEEK)
    for key, verdict in list(verdicts.items()):
        if key not in fired:
            onward = _onward(verdict, key in fine, at, now.boot, policy)
            if onward is None:
                del verdicts[key]
            else:
                verdicts[key] = onward
                if onward.stage == "repaired" != verdict.stage:
                    repairs = (*repairs, Repair(verdict.device, verdict.rule, verdict.action, at))
    for key, one in fired.items():
        verdicts[key] = _fire(verdicts.get(key), one, at, now.boot, repairs, policy)
    for key in memory.holding.keys() & tallies.keys() - seen.keys():  # not seen to have ended
        holding[key] = memory.holding[key]
    ordered = tuple(sorted(verdicts.values(), key=lambda v: (v.device, v.rule)))
    return JudgeMemory(ordered, past, repairs, at, holding, tallies)


def _tallied(tally: Tally, at: float, seconds: float, begins: int, window: float) -> Tally:
    """With what was just seen: it held for these seconds, in which it was looked at last."""
    now = int(at // 60)
    kept = [one for one in tally if 0 <= now - one[0] < window / 60]
    minute, held, often = kept.pop() if kept and kept[-1][0] == now else (now, 0.0, 0)
    return (*kept, (minute, held + max(0.0, min(seconds, LONGEST_LOOK)), often + begins))


def _enough(tally: Tally, rule: Rule) -> bool:
    return sum(held for _, held, _ in tally) >= rule.after and sum(often for _, _, often in tally) >= rule.times


def repaired(memory: JudgeMemory, device: str, action: Action, at: float) -> JudgeMemory:
    """The device (empty: the node) had this repair: what it can heal waits to be verified now."""
    done = [v for v in memory.verdicts if v.stage == "active" and v.device == device and v.action == action]
    keys = {(v.rule, v.device) for v in done}
    verdicts = tuple(
        v.model_copy(update={"stage": "repaired"}) if (v.rule, v.device) in keys else v for v in memory.verdicts
    )
    repairs = tuple(Repair(v.device, v.rule, v.action, at) for v in done)
    return replace(memory, verdicts=verdicts, repairs=(*memory.repairs, *repairs))


def verified(
    memory: JudgeMemory, devices: Collection[str], at: float, policy: JudgePolicy = JudgePolicy()
) -> JudgeMemory:
    """A check of these devices passed: what waits for it is on probation from now."""
    verdicts = tuple(
        _on_probation(v, at, policy, _relapses(memory, v)) if v.stage == "repaired" and v.device in devices else v
        for v in memory.verdicts
    )
    return replace(memory, verdicts=verdicts)


def escalated(memory: JudgeMemory, keys: Collection[VerdictKey], at: float, raw: str) -> JudgeMemory:
    """The repair of these verdicts did not help (``raw`` says how): each holds, and asks for the next heavier one."""
    meant = [v for v in memory.verdicts if (v.rule, v.device) in keys]
    done = {(r.device, r.rule): r.action for r in memory.repairs}  # the newest of each
    unreported = [v for v in meant if done.get((v.device, v.rule)) != v.action]
    repairs = tuple(Repair(v.device, v.rule, v.action, at) for v in unreported)
    verdicts = tuple(
        v.model_copy(update={"stage": "active", "until": None, "raw": raw, "action": _NEXT.get(v.action, v.action)})
        if v in meant else v
        for v in memory.verdicts
    )  # fmt: skip
    return replace(memory, verdicts=verdicts, repairs=(*memory.repairs, *repairs))


def acknowledged(
    memory: JudgeMemory, device: str, rule: str | None, at: float, policy: JudgePolicy = JudgePolicy()
) -> JudgeMemory:
    """An operator's word that it is repaired (None: everything about the device): probation begins."""
    verdicts = tuple(
        _on_probation(v, at, policy) if v.device == device and rule in (None, v.rule) else v for v in memory.verdicts
    )
    return replace(memory, verdicts=verdicts)


def forgotten(memory: JudgeMemory, devices: Collection[str]) -> JudgeMemory:
    """These devices are the node's no longer: nothing is held against them, and nothing counted."""
    return replace(
        memory,
        verdicts=tuple(v for v in memory.verdicts if v.device not in devices),
        holding={key: since for key, since in memory.holding.items() if key[1] not in devices},
        tallies={key: tally for key, tally in memory.tallies.items() if key[1] not in devices},
    )


def _clean(now: Readings) -> frozenset[str]:
    """GPUs that the driver reads without a fault; and the node (empty), if they are all that there should be."""
    gpus = now.gpus or ()
    clean = {g.uuid for g in gpus if not g.error and g.recovery in (None, "none") and g.fabric in (None, "completed")}
    whole = bool(gpus) and clean.issuperset(now.expected) and len(clean) == len(gpus)
    return frozenset(clean | {""}) if whole else frozenset(clean)


def _worst(found: Iterable[Fired]) -> dict[VerdictKey, Fired]:
    """One for each rule and device: of several (a suspicion, and what confirms it) the worst."""
    out: dict[VerdictKey, Fired] = {}
    for one in found:
        key = (one.rule.id, one.device)
        if key not in out or ORDER[one.rule.severity] >= ORDER[out[key].rule.severity]:
            out[key] = one
    return out


def _combined(seen: Iterable[DeviceLook]) -> dict[VerdictKey, DeviceLook]:
    """One look for each rule and device: of several (two probes, say) one that fires."""
    out: dict[VerdictKey, DeviceLook] = {}
    for look in seen:
        key = (look.rule.id, look.device)
        if key not in out or look.fires:
            out[key] = look
    return out


def _relapses(memory: JudgeMemory, verdict: Verdict) -> int:
    """How often the verdict's repair in the last week was not the last."""
    return sum((r.rule, r.device) == (verdict.rule, verdict.device) for r in memory.repairs) - 1


def _on_probation(verdict: Verdict, at: float, policy: JudgePolicy, relapses: int = 0) -> Verdict:
    """Each relapse within a week doubles it."""
    length = min(policy.probation * 2 ** max(0, min(relapses, MOST_DOUBLED)), max(WEEK, policy.probation))
    return verdict.model_copy(update={"stage": "probation", "until": at + length})


def _onward(verdict: Verdict, fine: bool, at: float, boot: str, policy: JudgePolicy) -> Verdict | None:
    """A verdict whose rule does not fire now. None: it is over."""
    if verdict.stage == "probation":
        return None if verdict.until is not None and at >= verdict.until else verdict
    heals = _heals(verdict.rule, policy.declared)
    if heals == "reading" and fine:
        return verdict.model_copy(update={"stage": "repaired"}) if verdict.severity == "fatal" else None
    if heals == "quiet" and at - verdict.seen >= QUIET:
        return None
    rebooted = verdict.boot != boot and verdict.action in ("reset_gpu", "reboot")
    if heals == "repair" and verdict.stage == "active" and rebooted:
        return verdict.model_copy(update={"stage": "repaired"})
    return verdict


def _fire(
    known: Verdict | None, fired: Fired, at: float, boot: str, repairs: tuple[Repair, ...], policy: JudgePolicy
) -> Verdict:
    rule = fired.rule
    if known is not None and known.stage == "active":
        more: dict[str, object] = {"count": known.count + fired.count, "seen": at, "boot": boot}
        if ORDER[rule.severity] > ORDER[known.severity]:  # the driver confirms what the kernel's log reported
            more |= {"severity": rule.severity, "text": rule.text, "raw": fired.raw, "since": at}
        elif rule.id in SHOWS_NEWEST:
            more["raw"] = fired.raw
        return known.model_copy(update=more)
    action = rule.action
    for repair in repairs:
        if (repair.device, repair.rule) == (fired.device, rule.id) and action == repair.action:
            action = _NEXT.get(action, action)
    return Verdict(
        rule=rule.id,
        device=fired.device,
        severity=rule.severity,
        action=action,
        text=rule.text,
        raw=fired.raw,
        since=known.since if known is not None else at,
        seen=at,
        count=fired.count + (known.count if known is not None else 0),
        boot=boot,
        dry_run=rule.id in policy.dry_run,
    )


def published(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """The worst of them, with counts as powers of ten and the last time to the hour."""
    ranked = sorted(verdicts, key=lambda v: (not v.bars, -ORDER[v.severity], v.device, v.rule))
    return tuple(_rough(v) for v in ranked[:MOST_PUBLISHED])


def _rough(verdict: Verdict) -> Verdict:
    seen = max(verdict.since, verdict.seen // HOUR * HOUR)
    count = 10 ** (len(str(verdict.count)) - 1)
    return verdict.model_copy(update={"seen": seen, "count": count, "raw": verdict.raw[:RAW]})


def offered_gpus(
    known: Sequence[Gpu],
    seen: Collection[GpuReading],
    verdicts: Iterable[Verdict],
    may_join: bool,
    held: Collection[str] = (),
    unlisted: Iterable[Gpu] = (),
) -> tuple[Gpu, ...]:
    """The node's GPUs: those known, and (``may_join``) those that were only found by now. One with a verdict that bars
    it is left out, with its worst one's words; and so are those of which nobody knows whether they work, those
    that somebody else uses, those that are ``held`` for a check, and ``unlisted``: those that belong to the machine and
    are not there. Those count as installed all the same, or a job that takes all GPUs of a node would start with fewer;
    their numbers come after the others', since a driver numbers anew."""
    verdicts = tuple(verdicts)
    why: dict[str, str] = {}
    for verdict in verdicts:
        if verdict.rule in TAKEN and not verdict.dry_run:
            why.setdefault(verdict.device, f"used by somebody else: {verdict.raw} ({verdict.rule})")
        if verdict.device and verdict.bars:
            why.setdefault(verdict.device, f"{verdict.text} ({verdict.rule}){_stage(verdict)}")
    for uuid in held:
        why.setdefault(uuid, "it is being checked (nodeagentctl diag)")
    unknown = sorted((verdict for verdict in verdicts if verdict.unknown), key=lambda verdict: not verdict.device)
    found = {
        gpu.uuid: Gpu(
            uuid=gpu.uuid, index=gpu.index, name=gpu.name, variable=gpu.variable, visible=gpu.visible, numa=gpu.numa
        )
        for gpu in seen
    }
    base = {gpu.uuid: found.get(gpu.uuid, gpu) for gpu in known}
    if may_join:
        base = base | found
    after = max((gpu.index for gpu in base.values()), default=-1) + 1
    missing = [gpu for gpu in unlisted if gpu.uuid not in base]
    base |= {gpu.uuid: gpu.model_copy(update={"index": index}) for index, gpu in enumerate(missing, after)}
    for verdict in unknown:
        for uuid in [verdict.device] if verdict.device else base:
            why.setdefault(uuid, f"{verdict.text} ({verdict.rule})")
    for gpu in missing:
        why.setdefault(gpu.uuid, "its driver has not listed it yet")
    whole = (g.model_copy(update={"healthy": False, "why": why[g.uuid]}) if g.uuid in why else g for g in base.values())
    return tuple(sorted(whole, key=lambda g: (g.index, g.uuid)))


def _stage(verdict: Verdict) -> str:
    return {"active": "", "repaired": ", repaired, to be verified", "probation": ", on probation"}[verdict.stage]


_HEALS = {rule.id: rule.heals for rule in rules()}


def _heals(rule: str, declared: Mapping[str, Rule]) -> str:
    """How a rule heals; of an Xid beyond the table, and of a rule of an older version, as the table's own words say."""
    if rule in declared:
        return declared[rule].heals
    if rule in _HEALS:
        return _HEALS[rule]
    return xid_rule(int(rule[4:])).heals if rule.startswith("xid.") and rule[4:].isdigit() else "repair"
