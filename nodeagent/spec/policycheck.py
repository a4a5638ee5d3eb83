"""What of a policy does not go together: events, actions, exit codes and timeouts. Pure; what a single value may be is
``jobvalues``'. It reports each mistake of each policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.model.jobspec import FAULTS, LASTING, JobSpec
from nodeagent.spec.errors import Path
from nodeagent.spec.rolecheck import Mistake

_HAVE_CODE = frozenset({"WorkerFailed", "PodFailed", "*"})
"""Events of which a worker's exit code may be known."""
_WAITS = ("PodPending", "Unknown")
"""What a job is in that does not run."""


@dataclass(frozen=True, slots=True)
class _RoleSize:
    """A role beside others."""

    name: str
    places: int
    """0 if that is not known."""


def written_policy_mistakes(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Of a job file, as far as its policies are mappings: other mistakes are reported where values are checked."""
    turns = "%" in str(tree.get("array", ""))
    yield from _of_list(("policies",), tree.get("policies"), turns, None)
    written = tree.get("roles")
    roles = written if isinstance(written, dict) else {}
    several = len(roles) > 1
    for name, role in roles.items():
        if isinstance(role, dict):
            sizes = [size for size in (role.get("nodes"), role.get("replicas")) if type(size) is int]
            beside = _RoleSize(str(name), max(sizes, default=0)) if several else None
            yield from _of_list(("roles", name, "policies"), role.get("policies"), turns, beside)


def policy_mistakes(spec: JobSpec) -> Iterator[Mistake]:
    """Of a job that somebody may have written by hand."""
    turns = spec.array is not None and bool(spec.array.at_once)
    yield from _of_list(("policies",), [one.model_dump() for one in spec.policies], turns, None)
    for role in spec.roles:
        own = [one.model_dump() for one in role.policies or ()]
        beside = _RoleSize(role.name, role.places) if spec.several else None
        yield from _of_list(("roles", role.name, "policies"), own, turns, beside)


def _of_list(path: Path, written: object, turns: bool, role: _RoleSize | None) -> Iterator[Mistake]:
    """``turns``: the job is a member of an array of which only some run at once. ``role``: whose own policies they are,
    if that is one of several."""
    for i, one in enumerate(written if isinstance(written, Sequence) and not isinstance(written, str) else ()):
        if isinstance(one, Mapping):
            on = one.get("on")
            events = [on] if isinstance(on, str) else list(on) if isinstance(on, list | tuple) else []
            yield from _of_policy((*path, i), events, one, turns, role)


def _of_policy(
    path: Path, events: Sequence[Any], one: Mapping[str, Any], turns: bool, role: _RoleSize | None
) -> Iterator[Mistake]:
    do, waits = one.get("do"), one.get("timeout") is not None
    faults = [event for event in events if event in FAULTS or event == "*"]
    lasting = [event for event in events if event in LASTING]
    if one.get("exit_code") is not None and events and not _HAVE_CODE & set(events):
        what = f"{_names(events)} have no exit code, so this never matches"
        yield Mistake((*path, "exit_code"), what, "remove it, or add WorkerFailed to on")
    if lasting and not waits:
        what = f"{_names(lasting)} is what each job is in for a while"
        yield Mistake((*path, "on"), what, "add a timeout, such as 10m")
    if "TaskCompleted" in events and waits:
        yield Mistake((*path, "timeout"), "TaskCompleted is acted on at once", "remove it")
    if "PodPending" in events and turns:
        what = "PodPending does not count while a member of an array waits for its turn, and its turn has no time"
        yield Mistake((*path, "on"), what, "remove it, or remove %N from array")
    if do == "RestartJob" and (ends := [event for event in events if event in (*LASTING, "TaskCompleted")]):
        what = f"RestartJob has no meaning for {_names(ends)}"
        yield Mistake((*path, "do"), what, "write AbortJob, TerminateJob or FailJob")
    if do == "RestartJob" and faults and waits:
        what = f"RestartJob for {_names(faults)} is not waited with: the gang is formed anew as soon as it can be"
        yield Mistake((*path, "timeout"), what, "remove it")
    if do in ("RestartPod", "RestartTask"):
        yield from _started_again(path, events, do, waits, role)
    if do == "CompleteJob" and (waiting := [*(e for e in events if e in _WAITS), *(faults if waits else ())]):
        what = f"CompleteJob for {_names(waiting)} after a timeout would complete a job that does not run"
        yield Mistake((*path, "do"), what, "write AbortJob, TerminateJob or FailJob")


def _started_again(
    path: Path, events: Sequence[Any], do: str, waits: bool, role: _RoleSize | None
) -> Iterator[Mistake]:
    """Of what goes on in a running generation: only a worker's failure is the matter of one place."""
    right = "write RestartJob"
    if role is None:
        what = f"{do} starts a part of the gang again while the rest goes on, which only a service allows"
        yield Mistake((*path, "do"), what, "write it in the policies of that role beside others, or write RestartJob")
        return
    if others := [event for event in events if event != "WorkerFailed"]:
        yield Mistake((*path, "do"), f"{do} is for WorkerFailed: {_names(others)} takes the gang along", right)
    if waits:
        yield Mistake((*path, "timeout"), f"{do} is not waited with: the role's clients wait for it", "remove it")
    if do == "RestartTask" and role.places > 1:
        what = (
            f"RestartTask is for a role of one place, and {role.name} has {role.places}: its places are started again "
            f"together only with the gang"
        )
        yield Mistake((*path, "do"), what, "write RestartPod (the place that failed) or RestartJob (all)")


def _names(events: Sequence[Any]) -> str:
    return " and ".join(map(str, events))
