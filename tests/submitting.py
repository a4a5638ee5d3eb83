"""Jobs that tests submit to a store without an agent: nobody signs them, unless the test does."""

from __future__ import annotations

from typing import Any

from nodeagent.model.job import Admission, Control, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.store.base import Store, StoreRefusedError
from nodeagent.store.client import RedisStore
from nodeagent.store.messages import NewJob


def first_control(spec: JobSpec, by: str) -> Control:
    """As the agent that takes the job writes it."""
    return Control(rev=1, target=spec.nodes.target, by=by)


def new_job(
    uid: str, spec: JobSpec, by: str, control: Control | None = None, admission: Admission | None = None
) -> NewJob:
    return NewJob(uid=uid, spec=spec, control=control or first_control(spec, by), admission=admission)


async def submit_one(
    store: Store,
    uid: str,
    spec: JobSpec,
    owner: int,
    wall: float,
    by: str,
    request: str,
    *,
    control: Control | None = None,
    admission: Admission | None = None,
    **more: Any,
) -> JobRecord:
    """The job as it is then: the new one, or the one that this request or uid has made before."""
    assert isinstance(store, RedisStore)
    first, _ = await store.submit([new_job(uid, spec, by, control, admission)], owner, wall, by, request, **more)
    try:
        return await store._job("read", {"uid": first})
    except StoreRefusedError as refused:
        if refused.code != "not_found":
            raise
        past = (await store.past(first)).jobs
        if not past:  # a request that is repeated names a job that is deleted by now
            raise
        return past[0]
