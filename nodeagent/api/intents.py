"""Changes that an operator may request for a job: pure functions from the job's record to its next control, and the
answer to a repeated request.

Each function refuses (``ApiError``), returns None (the job is so already), or returns the change. It is called again
for every repetition of a write, so it uses only the present record. ``plan/job/running.py`` decides how a scale ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nodeagent.api.errors import ApiError
from nodeagent.api.once import Once, once, other_change
from nodeagent.model.base import NAME
from nodeagent.model.job import TERMINAL, Control, JobRecord, Scale
from nodeagent.model.jobspec import MOST_NODES, JobSpec, most_places
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Refusal, natural
from nodeagent.plan.job.running import scaled_size
from nodeagent.spec.errors import did_you_mean


@dataclass(frozen=True, slots=True)
class Change:
    """Fields of the control to change, and the event that reports the change."""

    change: dict[str, Any]
    event: str
    """Its kind: of what takes its time and has an event when it is done, another one (JobStopRequested, JobStopped)."""
    text: str


def foundation(job: JobRecord, refusal: Refusal | None, *, ends: bool) -> JobRecord:
    """The job as the base of a new change: of a control that no agent signed, only the revision is kept. ``ends``: the
    change ends the job, which is allowed for any record. Raises ``ApiError`` (``state``)."""
    if refusal is None:
        return job
    if refusal.kind != "control" and not ends:
        raise ApiError("state", f"job {job.name!r} is not run: {refusal.text}", "nothing was changed")
    if refusal.controlled:
        return job
    rev, target = max(job.control.rev, refusal.rev), job.spec.nodes.target
    fresh = Control(rev=rev, target=target, restart=job.restart_done)
    return job.model_copy(update={"control": fresh})


Intent = Callable[[JobRecord], Change | None]


def _alive(job: JobRecord, verb: str) -> None:
    if job.phase in TERMINAL:
        raise ApiError(
            "state",
            f"job {job.name!r} has ended ({job.phase}: {job.reason}); there is nothing to {verb}",
            "submit it again: nodeagentctl submit FILE",
        )


def not_stopping(job: JobRecord, verb: str) -> None:
    """Refuses for a job that has ended or is being stopped."""
    _alive(job, verb)
    if job.control.desired == "stop":
        raise ApiError(
            "state",
            f"job {job.name!r} is being stopped (by {job.control.by}); it cannot {verb} any more",
            "wait for its end, then submit it again: nodeagentctl submit FILE",
        )


def pause(job: JobRecord) -> Change | None:
    """Stop the workers gracefully and keep the job."""
    not_stopping(job, "pause")
    if job.control.desired == "pause":
        return None
    return Change({"desired": "pause"}, "JobPauseRequested", "pause")


def resume(job: JobRecord) -> Change | None:
    """Run again after a pause."""
    not_stopping(job, "resume")
    if job.control.desired == "run":
        return None
    return Change({"desired": "run"}, "JobResumed", "resume")


def restart(job: JobRecord) -> Change | None:
    """Re-form the gang once, without spending the budget."""
    not_stopping(job, "restart")
    if job.control.desired == "pause":
        raise ApiError(
            "state",
            f"job {job.name!r} is paused; there is nothing to restart",
            f"run it again: nodeagentctl resume {job.name}",
        )
    if job.active is None:
        raise ApiError(
            "state",
            f"job {job.name!r} has not started yet ({job.phase}); there is nothing to restart",
            f"see what it waits for: nodeagentctl describe {job.name}",
        )
    return Change({"restart": job.control.restart + 1}, "JobRestarted", "restart")


def stop(job: JobRecord) -> Change | None:
    """End the job for good."""
    _alive(job, "stop")
    if job.control.desired == "stop":
        return None
    return Change({"desired": "stop"}, "JobStopRequested", "stop")


def delete(job: JobRecord) -> Change | None:
    """Remove the record; a live job is stopped first."""
    if job.control.delete:
        return None
    if job.phase in TERMINAL:
        return Change({"delete": True}, "JobDeleteRequested", "delete")
    return Change({"desired": "stop", "delete": True}, "JobDeleteRequested", "stop and delete")


Verb = Literal["scale", "scaleout", "scalein"]

OUT_TIMEOUT = 600.0
"""Seconds that a scale-out may take, unless the request says otherwise."""
MOST_TIMEOUT = 86_400.0
"""The longest timeout of any scale, and so the longest grace of a scale-in: a day."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a request did, as the store remembers it: the sizes before and after."""

    before: int
    after: int

    @property
    def text(self) -> str:
        """As the store keeps it."""
        return f"{self.before} {self.after}"

    def reply(self, *, changed: bool) -> dict[str, object]:
        """The part of the reply that comes from it."""
        return {"changed": changed, "previous_target": self.before, "asked_target": self.after}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``target`` for scale, of ``role`` if it is named, ``count`` or ``nodes`` for the others."""

    verb: Verb
    request: str
    target: int = 0
    role: str = ""
    count: int = 0
    nodes: tuple[str, ...] = ()
    timeout: float | None = None

    def of(self, job: JobRecord) -> Once:
        """Which change it is. With another timeout it is the same."""
        return once(self.request, self.verb, job.uid, self.target, self.role, self.count, self.nodes)

    def done(self, job: JobRecord, after: Control) -> Done:
        """What the store remembers of it. ``after``: the control that it came to."""
        return Done(self._size(job.spec, job.control), self._size(job.spec, after))

    def _size(self, spec: JobSpec, control: Control) -> int:
        """What it changes, as this control wants it."""
        roles = {role.name: role for role in spec.of_sizes(control.sizes).roles} if spec.several else {}
        return roles[self.role].places if self.role in roles else control.target


FIELDS: Mapping[Verb, tuple[str, ...]] = {
    "scale": ("target", "role", "timeout"),
    "scaleout": ("count", "timeout"),
    "scalein": ("count", "nodes", "timeout"),
}
"""Of the body of a request to change a job's size."""


def read_scale(verb: Verb, body: dict[str, Any], request: str) -> Asked:
    """The request in a body. Raises ``ApiError`` (``usage``)."""
    timeout = body.get("timeout")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= MOST_TIMEOUT
    ):
        raise ApiError("usage", f"timeout must be 0 to {MOST_TIMEOUT:g} seconds", "leave it out for the default")
    seconds = None if timeout is None else float(timeout)
    if verb == "scale":
        role = body.get("role", "")
        if not isinstance(role, str):
            raise ApiError("usage", "role must be the name of a role", "send {role: NAME, target: N}")
        return Asked(verb, request, target=_whole(body, "target"), role=role, timeout=seconds)
    nodes = body.get("nodes")
    if verb == "scaleout" or nodes is None:
        count = _whole(body, "count")
        if count < 1:
            raise ApiError("usage", f"count is {count}: it must be 1 or more", "send {count: N}")
        return Asked(verb, request, count=count, timeout=seconds)
    if not isinstance(nodes, list) or not nodes or not all(isinstance(n, str) for n in nodes) or "count" in body:
        raise ApiError("usage", "a scale-in takes either count or the names of nodes", "send {nodes: [NODE, ...]}")
    if len(nodes) > MOST_NODES:
        raise ApiError("usage", f"nodes must be at most {MOST_NODES} names of nodes", "see: nodeagentctl nodes")
    if (odd := next((n for n in nodes if not re.fullmatch(NAME, n)), None)) is not None:
        raise ApiError("usage", f"{odd[:64]!r} is no name of a node", "name each by itself, see: nodeagentctl nodes")
    return Asked(verb, request, nodes=tuple(sorted(set(nodes), key=natural)), timeout=seconds)


def _whole(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError("usage", f"{key} must be a whole number of nodes", f"send {{{key}: N}}")
    return value


def goal(asked: Asked, job: JobRecord) -> int:
    """The target it comes to, relative to the target as it is; of one of several roles its places. Raises ``ApiError``
    (``state``) where the job cannot have it."""
    not_stopping(job, asked.verb)
    if asked.role and asked.role not in (names := [role.name for role in job.spec.roles]):
        right = did_you_mean(asked.role, names, intro="its roles are" if job.spec.several else "its role is")
        raise ApiError("state", f"job {job.name!r} has no role {asked.role!r}", f"{right}; nothing was changed")
    if job.spec.several:
        return _goal_of_role(asked, job)
    now, size = job.control.target, job.spec.nodes
    if asked.verb == "scalein":
        _may_scale_in(asked, job)
    target = {"scale": asked.target, "scaleout": now + asked.count, "scalein": now - (asked.count or len(asked.nodes))}
    wanted = target[asked.verb]
    if not size.min <= wanted <= size.max:
        span = f"{size.min} to {size.max}" if size.min < size.max else f"exactly {size.min} (a fixed size)"
        raise ApiError(
            "state",
            f"job {job.name!r} cannot have {wanted} nodes: its file allows {span}, and its target is {now}",
            "choose a size within, or submit it with another `nodes:`; nothing was changed",
        )
    if job.spec.segments and wanted % job.spec.segments:
        raise ApiError(
            "state",
            f"job {job.name!r} consists of segments of {job.spec.segments} nodes, and {wanted} is no multiple of that",
            "choose a multiple; nothing was changed",
        )
    return wanted


def _goal_of_role(asked: Asked, job: JobRecord) -> int:
    """How many places the role is to have."""
    sizes = {role.name: role.places for role in job.sized.roles}
    have = ", ".join(f"{name} {places}" for name, places in sizes.items())
    if not asked.role:
        ranges = [role.name for role in job.spec.roles if role.size.min < role.size.max]
        likely = [*ranges, job.spec.completes or job.spec.roles[-1].name][0]
        raise ApiError(
            "state",
            f"job {job.name!r} has several roles ({have}), which are scaled one by one",
            f"say which: nodeagentctl scale {job.name} {likely}={max(asked.target, 1)}; nothing was changed",
        )
    role = next(role for role in job.spec.roles if role.name == asked.role)
    low, high = 1, most_places(len(sizes)) - (sum(sizes.values()) - sizes[asked.role])
    if elastic := role.size.min < role.size.max:
        low, high = role.size.min, min(role.size.max, high)
    if not low <= asked.target <= high:
        raise ApiError(
            "state",
            f"role {asked.role} of job {job.name!r} cannot have {asked.target} places: {low} to {high} are allowed"
            f"{' by its file' if elastic else ''}, and it is to have {sizes[asked.role]}",
            "choose a size within; nothing was changed",
        )
    growing = _growing(job)
    if growing is not None and growing.role != asked.role:
        raise ApiError(
            "state",
            f"role {growing.role} of job {job.name!r} is being scaled out to {growing.want} places (by "
            f"{job.control.by}); nothing was changed",
            f"wait for its end, or take it back: nodeagentctl scale {job.name} {growing.role}={growing.before}",
        )
    return asked.target


def _growing(job: JobRecord) -> Scale | None:
    """The scale-out that is not met, even if the agents have yet to record that."""
    growing, generation = job.control.growing, job.generation
    active = generation is not None and generation.state == "active"
    return None if growing is not None and active and scaled_size(growing, generation) >= growing.want else growing


def _may_scale_in(asked: Asked, job: JobRecord) -> None:
    growing = _growing(job)
    if growing is not None:
        raise ApiError(
            "state",
            f"job {job.name!r} is being scaled out to {growing.want} nodes (by {job.control.by}); nothing was changed",
            f"wait for its end, or take it back: nodeagentctl scale {job.name} {growing.before}",
        )
    if not asked.nodes:
        return
    generation = job.generation
    gang = [] if generation is None or generation.state == "ended" else sorted(generation.members, key=natural)
    strangers = sorted(set(asked.nodes).difference(gang), key=natural)
    if strangers:
        there = f"its nodes are {', '.join(gang)}" if gang else f"it has none now ({job.phase}: {job.reason})"
        raise ApiError(
            "state",
            f"job {job.name!r} does not run on {', '.join(strangers)}: {there}; nothing was changed",
            f"see nodeagentctl get {job.name}, or say how many are to go: --count N",
        )


def scale(asked: Asked, job: JobRecord, served: int) -> Change | None:
    """The change of the control; None if that is the target already."""
    target, control = goal(asked, job), job.control
    role = asked.role if job.spec.several else ""
    sizes = {one.name: one.places for one in job.sized.roles}
    now = sizes[role] if role else control.target
    if target == now:
        return None
    growing = _growing(job)
    before = growing.before if growing is not None else now
    scale = Scale(request=asked.request, want=target, before=before, leaving=asked.nodes, role=role)
    stated = f"{role} {now} -> {target} places" if role else f"target {now} -> {target}"
    if control.desired == "pause":
        scale = scale.model_copy(update={"state": "set", "reason": "the job was paused: it counts when it runs again"})
    elif target > before:
        timeout = OUT_TIMEOUT if asked.timeout is None else asked.timeout
        scale = scale.model_copy(update={"timeout": timeout, "deadline": served + max(1, millis(timeout))})
        stated += f" within {timeout:g}s"
    else:
        scale = scale.model_copy(update={"grace": asked.timeout})
        stated += f", {', '.join(asked.nodes)} to leave" if asked.nodes else ""
    change: dict[str, Any] = {"target": target, "scale": scale}
    if role:
        change |= {"target": sum(sizes.values()) - now + target, "sizes": control.sizes | {role: target}}
    return Change(change, "JobScaled", stated)


_SIZES = re.compile(r"([0-9]{1,9}) ([0-9]{1,9})")


def repeated(asked: Asked, did: str) -> dict[str, object]:
    """The reply to a request that was carried out before. ``did``: as ``Done.text``. The store's texts are not signed:
    somebody may have written over one. Raises ``ApiError`` (``state``) then."""
    if (sizes := _SIZES.fullmatch(did)) is None:
        raise other_change(asked.request)
    return Done(int(sizes[1]), int(sizes[2])).reply(changed=False) | {"repeated": True}
