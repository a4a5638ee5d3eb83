"""SIGHUP: the config is read again, and taken whole or not at all.

Owns which keys a running agent can take over. Must never start anything anew: what needs that is told, and a restart
costs training nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from pydantic import BaseModel

from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.errors import SpecError

LIVE = ("drain", "jobs", "limits", "without_agent")
"""Keys, and sections with all that is in them, that are looked up each time they are used."""


def differing(old: BaseModel, new: BaseModel, prefix: str = "") -> list[str]:
    """The keys, written as ``jobs.standbys``, whose values are not the same."""
    found: list[str] = []
    for name in type(old).model_fields:
        one, other = getattr(old, name), getattr(new, name)
        if one != other:
            if isinstance(one, BaseModel) and isinstance(other, BaseModel):
                found += differing(one, other, f"{prefix}{name}.")
            else:
                found.append(prefix + name)
    return found


def reload(load: Callable[[], AgentConfig], old: AgentConfig, take: Callable[[AgentConfig], None]) -> str:
    """Read the config anew and ``take`` it if it is right and every change can be made now. What became of it, in one
    line; logged as well."""
    log = structlog.get_logger("reload")
    try:
        new = load()
    except SpecError as error:
        log.error("config not reloaded: it is wrong", why=str(error))
        return "config not reloaded: it is wrong, see the log"
    changed = differing(old, new)
    stuck = [key for key in changed if key.partition(".")[0] not in LIVE]
    if stuck:
        text = f"config not reloaded: {', '.join(stuck)} needs a restart"
        log.error(text, fix="systemctl restart nodeagent: training goes on")
        return text
    take(new)
    log.info("config reloaded", changed=changed)
    return f"config reloaded: {', '.join(changed) or 'nothing changed'}"
