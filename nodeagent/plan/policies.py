"""First-match policies: an event (and exit code) to an action. Knows nothing of budgets or nodes."""

from __future__ import annotations

from collections.abc import Sequence

from nodeagent.model.jobspec import ActionName, EventName, Policy


def match(policies: Sequence[Policy], event: EventName, exit_code: int | None) -> ActionName | None:
    """The action of the first policy that names this event (or ``*``) and, if it names a code, this code; None if
    none does."""
    for policy in policies:
        if event not in policy.on and "*" not in policy.on:
            continue
        if policy.exit_code is not None and policy.exit_code != exit_code:
            continue
        return policy.do
    return None
