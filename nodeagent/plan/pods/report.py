"""What a pod has to say of its generation, read from what its shim tells.

Decides nothing: when it is sent, and what follows, is ``pod.py``'s and ``failure/faults.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nodeagent.model.pod import RankFacts, Stall
from nodeagent.model.world import BRIEF, MOST_ALONE, AloneRestart, Generation, Member, PodReport, WorkerExit
from nodeagent.plan.failure.blame import (
    blame,
    culprit_first,
    describe,
    farewell,
    is_failure,
    shell_code,
    victims_words,
    within_share,
)
from nodeagent.pods.base import PodStatus

LONGEST_SUSPENSION = 1e8
"""Seconds: a shim, which is the job's user's, may say more."""
STALL_TEXT = 200
"""Characters that are kept of each text in a stall."""
STALL_TEXTS = 1 << 16
"""Characters that are kept of all of them together."""


def of_member(status: PodStatus, member: Member) -> PodStatus:
    """The same, as far as it is about this member's own workers, places and roles, each once; the very same if all of
    it is. A shim is the job's user's, and what is reported of it every agent reads."""
    ranks = range(member.first_rank, member.first_rank + member.workers)
    places, roles = {place.name for place in member.places}, {place.role for place in member.places}
    kept: dict[str, object] = {
        "exits": tuple({end.rank: end for end in status.exits if end.rank in ranks}.values()),
        "restarted": tuple(end for end in status.restarted if end.rank in ranks)[-MOST_ALONE:],
        "waiting": tuple(dict.fromkeys(name for name in status.waiting if name in roles)),
        "ready": tuple(dict.fromkeys(name for name in status.ready if name in places)),
        "rounds": {name: number for name, number in status.rounds.items() if name in roles},
        "down": tuple(dict.fromkeys(name for name in status.down if name in roles)),
        "stall": _of_ranks(status.stall, ranks) if status.stall is not None else None,
    }
    changed = {name: value for name, value in kept.items() if value != getattr(status, name)}
    return status.model_copy(update=changed) if changed else status


def _of_ranks(stall: Stall, ranks: range) -> Stall:
    found, left = dict[int, RankFacts](), STALL_TEXTS
    for facts in stall.ranks:
        if facts.rank not in ranks or facts.rank in found:
            continue
        texts = {name: text for name in ("phase", "site", "stacks") if (text := getattr(facts, name))}
        most = min(STALL_TEXT, left // max(1, len(texts)))
        cut = {name: text[:most] for name, text in texts.items() if len(text) > most}
        found[facts.rank] = facts.model_copy(update=cut) if cut else facts
        left -= sum(min(len(text), most) for text in texts.values())
    return stall.model_copy(update={"ranks": tuple(found.values())})


def read_report(status: PodStatus) -> PodReport | None:
    """What a started pod has to say; None while its workers run and get on."""
    if status.refused and status.fenced:  # its time was over before its workers could start: no fault of the job's
        return PodReport(state="fenced", reason=status.refused)
    if status.refused:
        reason, output = without_output(status.refused)
        return PodReport(state="refused", reason=reason, error=output, runtime_failed=status.runtime_failed)
    if status.fenced:
        slept = min(status.suspended, LONGEST_SUSPENSION)
        reason = f"the machine was suspended for {slept:.0f} s" if slept > 0 else ""
        return PodReport(state="fenced", exits=with_few_texts(status.exits), reason=reason)
    if any(is_failure(e) for e in status.exits):
        return PodReport(state="failed", exits=with_few_texts(status.exits), taken=status.taken)
    done = [e for e in status.exits if not e.stopped and e.code == 0]
    if done and len(done) == len(status.workers):
        return PodReport(state="succeeded")  # no exits: each of its workers has exited 0
    if status.taken:  # those elsewhere failed for it
        return PodReport(state="failed", exits=with_few_texts(status.exits), taken=status.taken)
    if status.stall is not None and status.phase == "running":
        return PodReport(state="running", stall=status.stall)
    return None


_BEFORE_OUTPUT = re.compile(r"(?:^|; )(?:hook |ready |trouble with the fork server|no store process|modules: )")
_COLON = ": "
"""How a text begins, alone or behind others, that has what the job's own processes wrote behind its next colon."""


def without_output(reason: str) -> tuple[str, str]:
    """Why a pod is as it is, and apart from it what a command of its job printed (``shim/hook.py``), or its user's
    login shell (``shim/environment.py``), or a module that it preloads raised (``shim/prepare.py``,
    ``shim/rendezvous.py``), with all behind that: only the job's owner and operators may read it."""
    found = _BEFORE_OUTPUT.search(reason)
    head, colon, output = reason[0 if found is None else found.end() :].partition(_COLON)
    if found is None or not colon:
        return reason, ""
    return reason[: found.end()] + head, output


def with_completion(
    report: PodReport | None, status: PodStatus, member: Member, completes: str, asked: Collection[str]
) -> PodReport | None:
    """The same, and whose workers on this node have all ended well, whatever becomes of the others: those of the role
    that completes the job, and those of the roles that are asked for."""
    well = {e.rank for e in status.exits if not e.stopped and e.code == 0}
    done = {role for role in (completes, *asked) if (ranks := member.ranks_of(role)) and well.issuperset(ranks)}
    if not done:
        return report
    news = {"completed": completes in done, "tasks": tuple(role for role in asked if role in done)}
    return (report or PodReport(state="running")).model_copy(update=news)


def with_crowd(report: PodReport | None, share: float) -> PodReport | None:
    """The same, and whether the worker that counts on this node was killed for what others did. ``share``: of the
    node's memory, the part of this pod."""
    failed = min(filter(is_failure, report.exits), key=culprit_first, default=None) if report is not None else None
    if report is None or failed is None or not (crowded := within_share(failed.starved, share)):
        return report
    return report.model_copy(update={"crowded": crowded})


def with_alone(
    report: PodReport | None, sent: PodReport | None, status: PodStatus, case: RestartContext
) -> PodReport | None:
    """The same, with the workers that were started again alone: those that were reported before, and the new ones."""
    before = sent.alone if sent is not None else ()
    last = before[-1].order if before else -1
    fresh = [e for e in status.restarted if e.order > last]
    if not before and not fresh:
        return report
    newest = tuple(_alone(e, case, e is fresh[-1]) for e in fresh)
    if newest:
        before = tuple(one.model_copy(update={"error": ""}) if one.error else one for one in before)
    return (report or PodReport(state="running")).model_copy(update={"alone": (*before, *newest)[-MOST_ALONE:]})


@dataclass(frozen=True, slots=True)
class RestartContext:
    """Whose workers were started again alone, and when (served time, ms) that is learned."""

    member: Member
    served: int
    share: float = 0.0
    """As of ``blame.memory_share``."""


def _alone(exited: WorkerExit, case: RestartContext, newest: bool) -> AloneRestart:
    place = case.member.place_of(exited.rank)
    name = f"{place.name}, rank {exited.rank}," if place is not None else f"rank {exited.rank}"
    return AloneRestart(
        rank=exited.rank, order=exited.order, at=case.served, exit=shell_code(exited),
        text=f"{name} failed: {describe(exited)}", round=exited.round, error=exited.error[-BRIEF:] if newest else "",
        crowded=bool(within_share(exited.starved, case.share)),
    )  # fmt: skip


def cut_short(status: PodStatus) -> PodReport | None:
    """Its workers were stopped though their generation is active: by an agent that left, and whose goodbye the store
    never read."""
    if status.phase != "exited":
        return None
    why = "an agent that left this node stopped its workers"
    return PodReport(state="fenced", exits=with_few_texts(status.exits), reason=why)


def farewell_report(status: PodStatus) -> PodReport | None:
    """What its workers' planned stop has to say."""
    text = "; ".join(filter(None, (farewell(status.exits), status.written)))
    return PodReport(state="left", exits=with_few_texts(status.exits), reason=text) if text else None


def lost_report(status: PodStatus, number: int) -> PodReport | None:
    """What is known of this generation's workers if their shim died with them: nothing."""
    if status.lost is not None and status.lost.number == number:
        return lost("the shim died")
    if status.phase != "gone" or status.generation is None or status.generation.number != number:
        return None
    return lost(status.reason) if any(w.state == "running" for w in status.workers) else None


def lost(reason: str) -> PodReport:
    """Of a pod without a shim; ``reason``: why, as far as it is known."""
    return PodReport(state="lost", reason=reason or "its shim is gone, and its workers with it")


def with_few_texts(exits: Iterable[WorkerExit]) -> tuple[WorkerExit, ...]:
    """The same exits, with only the texts that a fault is judged by: all of the worker that counts on this node, of
    victims the words that make them victims, of others none. A gang has thousands of workers, and its record is one."""
    reported = tuple(exits)
    failed = sorted(filter(is_failure, reported), key=culprit_first)
    first = failed[0] if failed else None
    return tuple(e.model_copy(update={"error": _text(e, e is first)}) if e.error else e for e in reported)


def _text(exited: WorkerExit, first: bool) -> str:
    if not is_failure(exited):
        return ""
    return victims_words(exited, first) or (exited.error if first else "")


def same_report(sent: PodReport, report: PodReport) -> bool:
    """Workers that were stopped since make no difference: the acknowledgement of the next generation tells of all."""
    return _gist(sent) == _gist(report)


def _gist(report: PodReport) -> tuple[object, ...]:
    last = report.alone[-1].order if report.alone else None
    failed = sum(not e.stopped for e in report.exits)
    return (
        report.state,
        failed,
        report.taken,
        report.stall,
        report.completed,
        report.tasks,
        report.ready,
        report.rounds,
        last,
    )


def failure_words(exits: Iterable[WorkerExit]) -> str:
    """How the worker that counts on this node ended, and how many others failed there; empty if none has."""
    failed = sorted(filter(is_failure, exits), key=culprit_first)
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more here)" if len(failed) > 1 else ""
    return f"rank {failed[0].rank} failed: {describe(failed[0])}{more}"


def going_on(sent: PodReport | None) -> PodReport | None:
    """What takes back that the pod saw no progress."""
    return PodReport(state="running") if sent is not None and sent.state == "running" else None


def doom(generation: Generation, node: str, own: PodReport | None) -> str:
    """Why the active generation cannot go on, by what all have reported and this node is about to; empty if it can. A
    worker has failed by itself: whatever is decided, the others are stopped. Victims alone do not count: the one that
    failed first shall end by itself, and say of what."""
    reports = generation.reports if own is None else {**generation.reports, node: own}
    if all(report.state != "failed" for report in reports.values()):
        return ""
    who = blame(reports)
    return who.text if who is not None and not who.victim else ""
