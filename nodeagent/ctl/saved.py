"""What the tool makes of a command that is accepted, but not on enough disks yet."""

from __future__ import annotations

from typing import Any

from nodeagent.ctl.errors import TimedOutError
from nodeagent.ctl.terminal import echo

NEXT = "ask again with the same --request-id: it happens once, and counts as done when it is saved"


def demand_saved(what: str, after: dict[str, Any]) -> None:
    """For a command that ends here: done means saved. Raises ``TimedOutError``."""
    if text := _text(after):
        raise TimedOutError(f"{what}: {text}", NEXT)


def mention_unsaved(what: str, after: dict[str, Any]) -> None:
    """For a command that waits for more: it goes on."""
    if text := _text(after):
        echo(f"nodeagentctl: warning: {what}: {text}", err=True)


def _text(after: dict[str, Any]) -> str:
    return str(after.get("saved", {}).get("text", ""))
