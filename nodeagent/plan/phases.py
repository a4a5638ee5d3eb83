"""The table of job phases: which step leads from where to where. The documents' diagram is drawn from it.

Owns nothing but the table and its reading; who takes a step, and when, is ``gang.py``'s.
"""

from __future__ import annotations

from typing import Literal

from nodeagent.model.job import TERMINAL, Phase

Step = Literal["propose", "activate", "hold", "pause", "paused", "succeed", "fail", "stop"]

TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    ("queued", "propose"): "forming",
    ("queued", "paused"): "paused",
    ("queued", "fail"): "failed",
    ("queued", "stop"): "stopped",
    ("forming", "propose"): "forming",
    ("forming", "activate"): "running",
    ("forming", "hold"): "holding",
    ("forming", "pause"): "pausing",
    ("forming", "fail"): "failed",
    ("forming", "stop"): "stopped",
    ("running", "propose"): "forming",
    ("running", "hold"): "holding",
    ("running", "pause"): "pausing",
    ("running", "succeed"): "succeeded",
    ("running", "fail"): "failed",
    ("running", "stop"): "stopped",
    ("holding", "propose"): "forming",
    ("holding", "pause"): "pausing",
    ("holding", "paused"): "paused",
    ("holding", "fail"): "failed",
    ("holding", "stop"): "stopped",
    ("pausing", "paused"): "paused",
    ("pausing", "propose"): "forming",
    ("pausing", "hold"): "holding",
    ("pausing", "stop"): "stopped",
    ("paused", "propose"): "forming",
    ("paused", "hold"): "holding",
    ("paused", "stop"): "stopped",
}
"""(phase, step) to the next phase; every pair not here is impossible. Terminal phases have no way out."""

MEANING: dict[Step, str] = {
    "propose": "enough nodes fit: a new generation is proposed",
    "activate": "every member acknowledged, nobody may still run an older one",
    "hold": "fewer than min nodes fit, or a restart backs off",
    "pause": "an operator paused it; workers take their grace",
    "paused": "the last worker of a paused job is gone",
    "succeed": "every worker of the generation exited 0",
    "fail": "failed at its start, spent its budget, or a policy said so",
    "stop": "an operator stopped it",
}


def allowed(before: Phase, after: Phase) -> bool:
    """Whether some single step leads from ``before`` to ``after`` (staying is always allowed; ``pausing`` may be too
    short to be seen)."""
    if before == after:
        return True
    reach = {to for (phase, _), to in TRANSITIONS.items() if phase == before}
    return after in reach or (after == "paused" and "pausing" in reach)


def diagram() -> str:
    """A Mermaid state diagram of the table, for the documents."""
    lines = ["stateDiagram-v2", "    [*] --> queued"]
    lines += [f"    {before} --> {after}: {step}" for (before, step), after in TRANSITIONS.items()]
    lines += [f"    {phase} --> [*]" for phase in sorted(TERMINAL)]
    return "\n".join(lines)
