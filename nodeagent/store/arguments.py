"""The arguments that several steps share, as the scripts read them."""

from __future__ import annotations

from nodeagent.model.node import Incarnation, NodeFacts
from nodeagent.model.timing import Timing, millis
from nodeagent.store import codec
from nodeagent.store.messages import Ending, Judgement, Proposal, Settlement


def who(node: str, incarnation: Incarnation) -> dict[str, object]:
    return {"node": node, "life": incarnation.life, "start": incarnation.start}


def told_facts(facts: NodeFacts) -> dict[str, object]:
    return {"facts": codec.encode_facts(facts), "address": facts.address, "pid": facts.agent_pid}


def told_timing(timing: Timing) -> dict[str, object]:
    return {
        "timing": timing.to_json(),
        "lease": millis(timing.lease),
        "credit": millis(timing.credit),
        "gap": millis(timing.gap),
        "limit": millis(timing.failsafe_limit),
    }


def expectation(step: Proposal | Ending | Settlement | Judgement) -> dict[str, object]:
    return {
        "uid": step.uid,
        "expect": step.expect.model_dump() if step.expect is not None else None,
        "expect_state": step.expect_state,
        "control_rev": step.control_rev,
        "by": step.by,
    }


def ended_by(step: Proposal | Ending) -> dict[str, object]:
    return expectation(step) | {
        "spend": codec.encode_optional(step.spend),
        "lost": sorted(set(step.lost)),
        "planned": step.planned,
    }
