"""Request ids: a change is made once, however often it is asked for under its id, and an id is for one change only.

Under the id the store keeps which change it was: its verb, and a digest of all that makes it this change and no other
(``store/scripts/_records.lua``, ``request_seen``). Must never answer for a change that was not made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from nodeagent.api.errors import ApiError
from nodeagent.model.jobspec import Submission
from nodeagent.store.base import Store
from nodeagent.store.messages import Answer


@dataclass(frozen=True, slots=True)
class Once:
    """One change that is asked for under a request id."""

    request: str
    change: str
    """Which one it is, in one word."""

    def did(self, more: str = "") -> str:
        """What the store is to keep of it. ``more``: what the answer to the same request needs besides."""
        return f"{self.change} {more}" if more else self.change


def once(request: str, verb: str, *figures: object) -> Once:
    """``figures``: the target, and whatever else makes it this change and no other, as JSON would have it. Not what
    differs each time that the same is asked for, such as a time that is counted from now."""
    text = json.dumps([verb, *figures], sort_keys=True)
    return Once(request, f"{verb}:{hashlib.sha256(text.encode()).hexdigest()[:32]}")


def as_asked(job: Submission) -> dict[str, object]:
    """What makes it this job and no other, for any sender and any place: without ``begin``, which may be counted from
    now."""
    spec = job.spec.model_dump(mode="json", exclude={"submitter", "begin"})
    return spec | {"after": dict(job.after), "array": job.array}


async def earlier(store: Store, asked: Once) -> Answer | None:
    """What the store keeps of the same change, made under this id before, with its ``more`` alone; None if the id is
    new. Raises ``ApiError`` (``state``) if the id belongs to another change."""
    kept = await store.request(asked.request)
    return None if kept is None else same(asked, kept)


def same(asked: Once, kept: Answer) -> Answer:
    """The same of what the store keeps."""
    change, _, more = kept.did.partition(" ")
    if change != asked.change:
        raise other_change(asked.request)
    return kept.model_copy(update={"did": more})


def other_change(request: str) -> ApiError:
    """The refusal of an id that belongs to another change."""
    return ApiError(
        "state",
        f"the request id {request!r} was used for another change before; nothing was changed",
        "take a new request id for a new change",
    )
