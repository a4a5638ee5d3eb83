"""What other nodes hear of a node's health: few verdicts, the worst first, and its GPUs as they may be used. Pure.

Whatever is told goes to the store whenever it is another, so repetitions of a verdict must not make it another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from nodeagent.health.readings import GpuReading
from nodeagent.health.rules import TAKEN
from nodeagent.model.health import ORDER, Verdict
from nodeagent.model.node import Gpu

MOST = 32
"""Verdicts told; the harmless ones go first."""
RAW = 200
"""Characters of the line that made one fire."""
HOUR = 3600.0


def told(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """The worst of them, with counts as powers of ten and the last time to the hour."""
    ranked = sorted(verdicts, key=lambda v: (not v.bars, -ORDER[v.severity], v.device, v.rule))
    return tuple(_rough(v) for v in ranked[:MOST])


def _rough(verdict: Verdict) -> Verdict:
    seen = max(verdict.since, verdict.seen // HOUR * HOUR)
    count = 10 ** (len(str(verdict.count)) - 1)
    return verdict.model_copy(update={"seen": seen, "count": count, "raw": verdict.raw[:RAW]})


def gpus(
    known: Sequence[Gpu],
    seen: Collection[GpuReading],
    verdicts: Iterable[Verdict],
    may_join: bool,
    held: Collection[str] = (),
) -> tuple[Gpu, ...]:
    """The node's GPUs: those known, and (``may_join``) those that were only found by now. One with a verdict that bars
    it is left out, with its worst one's words; and so are those of which nobody knows whether they are sound, those
    that somebody else uses, and those that are ``held`` for a check."""
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
    found = {gpu.uuid: Gpu(uuid=gpu.uuid, index=gpu.index, name=gpu.name) for gpu in seen}
    base = {gpu.uuid: found.get(gpu.uuid, gpu) for gpu in known}
    if may_join:
        base = base | found
    for verdict in unknown:
        for uuid in [verdict.device] if verdict.device else base:
            why.setdefault(uuid, f"{verdict.text} ({verdict.rule})")
    whole = (g.model_copy(update={"healthy": False, "why": why[g.uuid]}) if g.uuid in why else g for g in base.values())
    return tuple(sorted(whole, key=lambda g: (g.index, g.uuid)))


def _stage(verdict: Verdict) -> str:
    return {"active": "", "repaired": ", repaired, to be verified", "probation": ", on probation"}[verdict.stage]
