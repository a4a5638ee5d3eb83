"""Blame: which worker failed first, and which only died of it. Compares no clocks of different nodes.

The kernel that wants memory kills the largest process, whoever filled it. Where a limit of the pod itself was reached,
it was the pod. Else the memory is shared with other pods and with whatever else runs there: then it was the pod only if
it held more than its share. Nothing here knows who else it was.

Beside it what agents publish of members that cannot reach each other (``agent/reach.py``), in words: of a network that
is cut every worker may die, and none is to blame.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeFacts, NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.world import BRIEF, Generation, PodReport, Starved, WorkerExit, signal_words
from nodeagent.plan.cluster import natural

REFORM_CODES = frozenset({101, 102})
"""Exit codes that ask to be re-formed and are not counted (Paddle's elastic convention)."""

_COLLECTIVE = re.compile(
    r"(Read|Write) error \[|(recvValue|recvBytes|sendBytes) failed|"
    r"failed to (recv|send), got|DistNetworkError|DistStoreError|"
    r"Timed out waiting|Gloo connectFullMesh failed|"
    r"ncclRemoteError|ncclSystemError|NCCL communicator was aborted|Watchdog caught collective operation timeout|"
    r"remote process (exited|has terminated)|Some NCCL operations have failed",
    re.IGNORECASE,
)
"""What PyTorch, gloo and NCCL write when a *peer* is gone: the writer is a victim. A plain "Connection refused" is
not here: a script that cannot reach a service of its own is at fault itself. Words only: it decides which of several
failed workers is named, never what a fault costs, nor what follows."""
_COLLECTIVE_LINES = (
    (re.compile(r"RuntimeError: ", re.IGNORECASE), re.compile(r"Connection (closed|reset) by peer", re.IGNORECASE)),
    (re.compile(r"gloo", re.IGNORECASE), re.compile(r"closed|reset|refused|timed? ?out|error", re.IGNORECASE)),
)
"""How a line begins and ends that says so. They are two patterns, since one of both (``gloo.*error``) tries each
beginning with all that is behind it: a worker that wrote nothing but the beginning stopped every agent for seconds."""

OUT_OF_MEMORY = re.compile(r"^nodeagent: (out of memory(?:, it seems)?): ", re.MULTILINE)
"""What the shim writes below a killed worker's last lines (``shim/record.py``)."""


def collective_words(text: str) -> tuple[int, int] | None:
    """Where in the text the first words begin and end which say that a peer is gone; None: it does not say so. Takes
    time in proportion to its length, whatever it is."""
    found = []
    for begins, ends in _COLLECTIVE_LINES:
        at = 0
        while (begin := begins.search(text, at)) is not None:
            at = text.find("\n", begin.end())
            at = len(text) if at < 0 else at
            last = max((end.end() for end in ends.finditer(text, begin.end(), at)), default=0)
            if last:
                found.append((begin.start(), last))
                break
    if (plain := _COLLECTIVE.search(text)) is not None:
        found.append(plain.span())
    return min(found, key=itemgetter(0), default=None)


@dataclass(frozen=True, slots=True)
class Blame:
    """The cause among the exits of one generation."""

    node: str
    worker: WorkerExit
    victim: bool
    """Only victims were seen: somebody else failed first and is not known yet."""
    text: str

    @property
    def code(self) -> int:
        return shell_code(self.worker)


def shell_code(exited: WorkerExit) -> int:
    """The code a shell would show: 128+n for signal n."""
    return 128 + exited.signal if exited.signal is not None else (exited.code or 0)


def describe(exited: WorkerExit) -> str:
    """In words: ``exit code 7``, ``SIGKILL (9)``, ``SIGKILL (9), out of memory``."""
    if exited.signal is None:
        return f"exit code {exited.code}"
    if exited.signal == signal.SIGKILL and (known := OUT_OF_MEMORY.search(exited.error)):
        return f"SIGKILL (9), {known[1]}"
    return signal_words(exited.signal)


def farewell(exits: Iterable[WorkerExit]) -> str:
    """What became of the last steps of workers that were stopped as planned; empty if nobody knows."""
    reported = list(exits)
    parts = []
    for step in sorted({e.left_at for e in reported if e.left_at is not None}):
        took = [e.saved_in for e in reported if e.left_at == step]
        kept = [seconds for seconds in took if seconds is not None]
        if len(kept) == len(took):
            parts.append(f"checkpoint at step {step} in {max(kept):.2f} s")
        else:
            parts.append(f"left at step {step}, where nothing was kept")
    late = [e for e in reported if e.overdue is not None and e.left_at is None]
    if late:
        ranks = ", ".join(str(e.rank) for e in sorted(late, key=lambda e: e.rank))
        parts.append(f"grace of {late[0].overdue:g} s ran out: rank{'s' if len(late) > 1 else ''} {ranks} killed")
    missed = sorted(e.rank for e in reported if e.missed)
    if missed:
        ranks = f"rank{'s' if len(missed) > 1 else ''} {', '.join(map(str, missed))}"
        parts.append(f"{ranks} made no last checkpoint, since not all ranks lived to make it")
    return "; ".join(parts)


def leaves_broken(job: JobRecord, generation: Generation) -> bool:
    """Whether some ranks of the gang that is stopped as planned are gone, and never came to leave: the others wait for
    them in vain. They were asked and ended before they had begun to save, or failed before their node had asked them.
    A node that was lost meanwhile has become the generation's cause (``job/gang.py``)."""
    lost = generation.state == "forming" and generation.cause.kind == "node_lost"
    return lost or any(e.missed or is_failure(e) for r in job.last_reports.values() for e in r.exits)


def is_failure(exited: WorkerExit) -> bool:
    """It ended by itself, and not well."""
    return not exited.stopped and (exited.signal is not None or bool(exited.code))


def asks_to_reform(exited: WorkerExit) -> bool:
    """It ended with a code that asks for a new generation."""
    return exited.signal is None and exited.code in REFORM_CODES


def is_victim(exited: WorkerExit) -> bool:
    """It ended with an error that says a peer was gone."""
    return exited.signal in (None, signal.SIGABRT) and collective_words(exited.error) is not None


def victims_words(exited: WorkerExit, first: bool) -> str:
    """What makes a victim one, short, and of the first on its node with the end of what it wrote; empty for others."""
    if not is_victim(exited) or (found := collective_words(exited.error)) is None:
        return ""
    begin, end = found
    words = exited.error[begin:end]
    words = words if len(words) <= BRIEF else f"{words[: BRIEF // 3]} ... {words[-BRIEF // 2 :]}"
    ends: tuple[str, ...] = (exited.error[-BRIEF:], exited.error[:end][-BRIEF:]) if first else ()
    for text in (*ends, words):
        if collective_words(text) is not None:
            return text
    return exited.error


def culprit_first(exited: WorkerExit) -> tuple[bool, bool, int]:
    """Sorts those that failed on one node as ``blame`` does: one that no peer can have killed, then one that does not
    speak of a lost peer, then who was first."""
    return exited.signal != signal.SIGKILL, is_victim(exited), exited.order


def blame(reports: Mapping[str, PodReport]) -> Blame | None:
    """The worker to blame, None when none failed by itself.

    A SIGKILL comes of no peer; then the node counts whose report reached the store first (seq, given by the store),
    then the order of ending on that node. If the first of them asks to be re-formed, it is the one. Else, of those that
    do not ask, one whose error does not speak of a lost peer is named before those whose does.
    """
    failed = _in_order(reports)
    if not failed:
        return None
    *_, node, worst = failed[0]
    if not asks_to_reform(worst):
        *_, node, worst = min(failed, key=lambda row: (row[0], asks_to_reform(row[-1]), is_victim(row[-1])))
    victim = is_victim(worst)
    text = f"rank {worst.rank} on {node} failed first: {describe(worst)}"
    if victim:
        text = f"rank {worst.rank} on {node} lost its peers ({describe(worst)}); who failed first is not known"
        text += describe_pairs(reports)
    elif len(failed) > 1:
        others = ", ".join(str(row[-1].rank) for row in failed if row[-1] is not worst)
        text += f" (ranks {others} ended after it)"
    return Blame(node, worst, victim, text)


def _in_order(reports: Mapping[str, PodReport]) -> list[tuple[bool, int, int, str, WorkerExit]]:
    """The workers that failed, each behind its node: who was killed first, then by the order of the reports."""
    return sorted(
        ((e.signal != signal.SIGKILL, r.seq or 1 << 30, e.order, node, e)
         for node, r in reports.items() for e in _failures(r)),
        key=lambda row: row[:4],
    )  # fmt: skip


def first_failed(reports: Mapping[str, PodReport]) -> str:
    """The node of the worker that failed first, whatever workers wrote; empty if none failed."""
    return next((node for *_, node, _worker in _in_order(reports)), "")


def may_be_cause(reports: Mapping[str, PodReport], who: Blame) -> list[tuple[str, WorkerExit]]:
    """Of the failed workers, those of whom order alone does not tell that a peer was the cause, with their nodes, the
    blamed one first: only it if it asks to be re-formed; those that were killed if there are any; else all that do not
    ask to be re-formed. What they wrote makes no difference."""
    if asks_to_reform(who.worker):
        return [(who.node, who.worker)]
    killed = who.worker.signal == signal.SIGKILL
    others = [
        (node, e)
        for node, report in sorted(reports.items())
        for e in _failures(report)
        if e is not who.worker and not asks_to_reform(e) and (e.signal == signal.SIGKILL) == killed
    ]
    return [(who.node, who.worker), *others]


def _failures(report: PodReport) -> Iterable[WorkerExit]:
    return (e for e in report.exits if is_failure(e))


MOST_MEMORY = 0.75
"""Of the memory: the largest share, of a pod that has the whole node. The rest is the kernel's, and the system's."""


def memory_share(facts: NodeFacts, devices: Collection[str]) -> float:
    """The part of the node's memory that goes with these devices: their part of its GPUs, or of its CPU slots."""
    gpus = {gpu.uuid for gpu in facts.gpus}.intersection(devices)
    of_gpus = len(gpus) / len(facts.gpus) if gpus else 0.0
    slots = len(devices) - len(gpus)
    return min(MOST_MEMORY, max(of_gpus, slots / facts.cpu_slots if facts.cpu_slots else 0.0))


def within_share(starved: Starved | None, share: float) -> str:
    """The amounts, in words, if a worker was killed though its pod held no more than its share; else empty."""
    if starved is None or starved.held > share * starved.total:
        return ""
    held, mine, total = (f"{size / 1e9:.1f}" for size in (starved.held, share * starved.total, starved.total))
    return f"memory was full, and its pod held {held} GB of {total} GB, within its share of {mine} GB"


MOST_PAIRS = 4
"""Pairs that one sentence names."""
ADVICE = "check the network between them"


@dataclass(frozen=True, slots=True)
class Cut:
    """Two members of one gang, or a member and a failsafe member, of whom one gets no answer from the other."""

    node: str
    """Who asks."""
    other: str
    address: str
    """``host:port`` (UDP) at which ``other`` was asked; empty if it is not known any more."""
    since: float
    """Unix time of the first question without an answer."""
    both: bool
    """``other`` gets no answer from ``node`` either."""
    known: bool = True
    """Both hold their leases. While the store is away nobody knows."""
    outside: bool = False
    """``other`` is a failsafe member that is no member."""


def find_cuts(
    pods: Mapping[str, PodState],
    nodes: Mapping[str, NodeRecord],
    *,
    known: bool = True,
    outside: Collection[str] = (),
) -> tuple[Cut, ...]:
    """Each pair once. ``pods``: what the members of one gang publish, by node; ``known``: as in ``Cut``; ``outside``:
    its failsafe members that are no members."""
    reported = {(node, other): at for node, pod in pods.items() for other, at in pod.unreachable.items()}
    return tuple(
        Cut(
            node=node,
            other=other,
            address=nodes[other].facts.peer if other in nodes else "",
            since=min(reported[pair], reported.get((other, node), reported[pair])),
            both=(other, node) in reported,
            known=known,
            outside=other in outside,
        )
        for pair in _each_once(reported)
        for node, other in [pair]
    )


def describe_cut(cut: Cut, now: float) -> str:
    """One sentence. ``now``: Unix time."""
    where, nor = _when(cut.address), f", nor {cut.other} {cut.node}" if cut.both else ""
    unknown = f"; while the store is away nobody knows whether {cut.other} is up: see there, and"
    other = f"its failsafe member {cut.other}" if cut.outside else cut.other
    return (
        f"{cut.node} cannot reach {other}{where}{nor} (no answer over UDP for {max(0.0, now - cut.since):.0f} s)"
        f"{', though both are alive:' if cut.known else unknown} {ADVICE}"
    )


def describe_pairs(reports: Mapping[str, PodReport]) -> str:
    """Which members could not reach each other when they reported, to go behind another sentence; empty if none."""
    reported = {(node, other): at for node, report in reports.items() for other, at in report.unreachable.items()}
    if not reported:
        return ""
    named = [f"{node} cannot reach {other}{_when(reported[node, other])}" for node, other in _each_once(reported)]
    more = f", and {len(named) - MOST_PAIRS} more pairs" if len(named) > MOST_PAIRS else ""
    return f"; {', '.join(named[:MOST_PAIRS])}{more}: {ADVICE}"


def _when(address: str) -> str:
    return f" at {address}" if address else ""


def _each_once(reported: Mapping[tuple[str, str], object]) -> Iterator[tuple[str, str]]:
    """The pairs in order, each in one direction only."""
    for node, other in sorted(reported, key=lambda pair: (natural(pair[0]), natural(pair[1]))):
        if (other, node) not in reported or natural(node) < natural(other):
            yield node, other
