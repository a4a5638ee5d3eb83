"""The commit of a checkpoint in the twin.

The twin of ``scripts/commit.lua``. Must never judge a checkpoint: whether its files are whole is the workers' word.
"""

from __future__ import annotations

from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Token
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.twin.holders import lives_of
from nodeagent.store.twin.state import State


def commit(
    s: State,
    uid: str,
    token: Token,
    node: str,
    incarnation: Incarnation,
    name: str,
    step: int,
    order: int,
    signature: str = "",
) -> JobRecord:
    s.current(node, incarnation)
    job = s.job(uid)
    if job.active != token:
        now = f"generation {job.active.number}" if job.active else "none"
        raise StoreRefusedError(
            "stale",
            f"generation {token.number} of job {job.name} may commit nothing any more: {now} is the newest that was "
            "active",
        )
    if incarnation.life not in lives_of(job.head, node):
        raise StoreRefusedError("stale", f"node {node} runs no workers of job {job.name}")
    old = job.checkpoint
    if old is not None and old.name == name:
        return job
    if old is not None and (old.number, old.order) >= (token.number, order):
        raise StoreRefusedError("stale", f"checkpoint {old.name} of job {job.name} was committed after {name}")
    new = Checkpoint(name=name, step=step, number=token.number, order=order, signature=signature)
    return s.save_job(job.model_copy(update={"checkpoint": new}))
