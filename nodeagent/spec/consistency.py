"""What in a job does not go together: what several roles have to agree on (sizes, names, which completes the job), and
events, actions, exit codes and timeouts of a policy. Pure; what a single value may be is ``jobvalues``'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.model.jobspec import FAULTS, LASTING, MOST_ROLES, JobSpec, Nodes, Role, most_places
from nodeagent.spec import jobvalues
from nodeagent.spec.errors import CheckError, Path, did_you_mean


@dataclass(frozen=True, slots=True)
class Mistake:
    """At which key, what is wrong, and what would be right."""

    path: Path
    what: str
    right: str


def written_mistakes(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Of a job file with ``roles``, as far as they are mappings: others are reported where values are checked."""
    roles = tree["roles"]
    if not isinstance(roles, dict):
        return
    if not roles:
        yield Mistake(("roles",), "no role is given", "write at least one")
        return
    if many := _many(roles):
        yield many
        return
    for name, role in roles.items():
        if isinstance(role, dict):
            yield from _size(("roles", name), role, len(roles) > 1)
    after = {str(n): role.get("after") if isinstance(role, dict) else None for n, role in roles.items()}
    yield from _order({n: [a] if isinstance(a, str) else a if isinstance(a, list) else [] for n, a in after.items()})
    added = [SCHEDULER] if tree.get("scheduler") is not None else []
    yield from _completes([*map(str, roles), *added], tree.get("completes"))


SCHEDULER = "scheduler"
"""The role that the key of this name adds (``pods/environment.py`` knows what its worker sees)."""


def with_scheduler(roles: Sequence[Role], workers: Role) -> tuple[Role, ...]:
    """These roles, and MindSpore's scheduler for some workers: their command, on no device, once. The workers start
    after it, and stop before it: without it they would look for it for half a minute as they leave."""
    scheduler = Role(
        name=SCHEDULER,
        command=workers.command,
        nodes=Nodes(min=1, max=1, target=1),
        replicas=Nodes(min=1, max=1, target=1),
        env=workers.env,
        workers_per_node=1,
        gpus_per_worker=0,
        placement=workers.placement,
    )
    follows = workers.model_copy(update={"after": (*workers.after, SCHEDULER)})
    return (*(follows if role is workers else role for role in roles), scheduler)


def scheduler_mistakes(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Of a job file whose scheduler is to be added."""
    if tree.get("scheduler") is None:
        return
    roles = tree.get("roles")
    if isinstance(roles, dict) and SCHEDULER in roles:
        yield Mistake((SCHEDULER,), "there is a role of this name already", "remove one of them")
    if isinstance(roles, dict) and len(roles) > 1:
        return  # their sizes are looked at as those of all roles beside others
    path: Path = ()
    one: Mapping[str, Any] = tree
    if isinstance(roles, dict):
        name, role = next(iter(roles.items()), ("", {}))
        path, one = ("roles", name), role if isinstance(role, dict) else {}
    try:
        size = jobvalues.nodes(one["nodes"]) if one.get("nodes") is not None else None
    except CheckError:  # reported where values are checked
        size = None
    yield from _beside_others(path, size, one.get("uneven") is True)


def spec_mistakes(spec: JobSpec) -> Iterator[Mistake]:
    """Of a job that somebody may have written by hand."""
    names = [role.name for role in spec.roles]
    if many := _many(names):
        yield many
        return
    if len(set(names)) < len(names):
        yield Mistake(("roles",), f"a name is given twice ({', '.join(names)})", "give each role a name of its own")
    if not spec.several and spec.role.restart == "alone":
        yield Mistake(("roles", spec.role.name, "restart"), "restart: alone is for jobs of several roles", "remove it")
    for role in spec.roles if spec.several else ():
        yield from _beside_others(("roles", role.name), role.nodes, role.uneven)
        if role.ready is not None and role.ready.port == bool(role.ready.command):
            yield Mistake(("roles", role.name, "ready"), "give either port or command", "write {port: true}")
    if spec.several and (places := sum(role.places for role in spec.roles)) > (most := most_places(len(names))):
        why = f"{places} places in {len(names)} roles"
        yield Mistake(("roles",), why, f"a job of {len(names)} roles has {most} places at most, all roles together")
    yield from _order({role.name: list(role.after) for role in spec.roles})
    yield from _completes(names, spec.completes or None)


def _many(roles: Collection[str]) -> Mistake | None:
    """Agents look at each role beside each other one."""
    if len(roles) <= MOST_ROLES:
        return None
    return Mistake(("roles",), f"{len(roles)} roles", f"a job has {MOST_ROLES} at most: give one several places")


def _size(path: Path, role: Mapping[str, Any], several: bool) -> Iterator[Mistake]:
    nodes, replicas = role.get("nodes"), role.get("replicas")
    right = "nodes: 2 (one place on each node) or replicas: 2 (several on a node where they fit)"
    if "nodes" not in role and "replicas" not in role:
        yield Mistake(path, f"the key 'nodes' is missing in {path[0]}.{path[1]}", f"add {right}")
    elif nodes is None and replicas is None:
        yield Mistake((*path, "nodes" if "nodes" in role else "replicas"), "null is no size", f"write {right}")
    elif nodes is not None and replicas is not None:
        yield Mistake((*path, "replicas"), "replicas stands beside nodes", "keep one of them")
    if role.get("restart") == "alone" and not several:
        yield Mistake((*path, "restart"), "restart: alone is for jobs of several roles", "remove it")
    if replicas is not None and not several:
        yield Mistake((*path, "replicas"), "replicas is for jobs of several roles", "write nodes")
    if several:
        try:
            size = jobvalues.nodes(nodes) if nodes is not None else None
        except CheckError:  # reported where values are checked
            size = None
        yield from _beside_others(path, size, role.get("uneven") is True)


def _beside_others(path: Path, nodes: Nodes | None, uneven: bool) -> Iterator[Mistake]:
    if nodes is not None and nodes.auto:
        what = "auto borrows idle nodes, which a role beside others cannot"
        yield Mistake((*path, "nodes"), what, "write how many places it has at least and at most, such as 2:8")
    if uneven:
        yield Mistake((*path, "uneven"), "a role beside others cannot be uneven yet", "remove it")


def _order(after: Mapping[str, Sequence[object]]) -> Iterator[Mistake]:
    """Roles that start after others: those exist, and none comes after itself. What is no text is reported where values
    are checked."""
    named = {name: [one for one in before if isinstance(one, str)] for name, before in after.items()}
    known = {name: [*dict.fromkeys(one for one in before if one in named)] for name, before in named.items()}
    for name, before in named.items():
        for one in before:
            if one not in named:
                right = did_you_mean(one, named, intro="its roles are")
                yield Mistake(("roles", name, "after"), f"there is no role '{one}'", right)
        way = way_back(name, known)
        if way and name == min(way):  # each circle once
            text = " after ".join((name, *way))
            yield Mistake(("roles", name, "after"), f"{text}: none of them could start", "remove one of these")


def way_back(name: str, after: Mapping[str, Sequence[str]]) -> list[str]:
    """The roles, or jobs, from the first that this one comes after, up to itself; empty if it does not come after
    itself."""
    came_from: dict[str, str] = {}
    ways = deque([name])
    while ways:
        here = ways.popleft()
        for one in after.get(here, ()):
            if one == name:
                way = [name]
                while here != name:
                    way.append(here)
                    here = came_from[here]
                return way[::-1]
            if one not in came_from:
                came_from[one] = here
                ways.append(one)
    return []


def _completes(names: list[str], completes: object) -> Iterator[Mistake]:
    if completes is None or not isinstance(completes, str):
        return
    if len(names) < 2:
        yield Mistake(("completes",), "completes is for jobs of several roles", "remove it")
    elif completes not in names:
        yield Mistake(
            ("completes",), f"there is no role '{completes}'", did_you_mean(completes, names, intro="roles are")
        )


_HAVE_CODE = frozenset({"WorkerFailed", "PodFailed", "*"})
"""Events of which a worker's exit code may be known."""
_WAITS = ("PodPending", "Unknown")
"""What a job is in that does not run."""


def written_policy_mistakes(tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Of a job file, as far as its policies are mappings: other mistakes are reported where values are checked."""
    turns = "%" in str(tree.get("array", ""))
    yield from _of_list(("policies",), tree.get("policies"), turns, a_role=False)
    written = tree.get("roles")
    roles = written if isinstance(written, dict) else {}
    several = len(roles) > 1
    for name, role in roles.items():
        if isinstance(role, dict):
            yield from _of_list(("roles", name, "policies"), role.get("policies"), turns, several)


def policy_mistakes(spec: JobSpec) -> Iterator[Mistake]:
    """Of a job that somebody may have written by hand."""
    turns = spec.array is not None and bool(spec.array.at_once)
    yield from _of_list(("policies",), [one.model_dump() for one in spec.policies], turns, a_role=False)
    for role in spec.roles:
        own = [one.model_dump() for one in role.policies or ()]
        yield from _of_list(("roles", role.name, "policies"), own, turns, spec.several)


def _of_list(path: Path, written: object, turns: bool, a_role: bool) -> Iterator[Mistake]:
    """``turns``: the job is a member of an array of which only some run at once. ``a_role``: they are the own policies
    of one of several roles."""
    for i, one in enumerate(written if isinstance(written, Sequence) and not isinstance(written, str) else ()):
        if isinstance(one, Mapping):
            on = one.get("on")
            events = [on] if isinstance(on, str) else list(on) if isinstance(on, list | tuple) else []
            yield from _of_policy((*path, i), events, one, turns, a_role)


def _of_policy(
    path: Path, events: Sequence[Any], one: Mapping[str, Any], turns: bool, a_role: bool
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
        yield from _started_again(path, events, do, waits, a_role)
    if do == "CompleteJob" and (waiting := [*(e for e in events if e in _WAITS), *(faults if waits else ())]):
        what = f"CompleteJob for {_names(waiting)} after a timeout would complete a job that does not run"
        yield Mistake((*path, "do"), what, "write AbortJob, TerminateJob or FailJob")


def _started_again(path: Path, events: Sequence[Any], do: str, waits: bool, a_role: bool) -> Iterator[Mistake]:
    """Of what goes on in a running generation: only a worker's failure is the matter of one place, or one role."""
    right = "write RestartJob"
    if not a_role:
        what = f"{do} starts a part of the gang again while the rest goes on, which only a service allows"
        yield Mistake((*path, "do"), what, "write it in the policies of that role beside others, or write RestartJob")
        return
    if ends := [event for event in events if event in (*LASTING, "TaskCompleted")]:
        what = f"{do} has no meaning for {_names(ends)}"
        yield Mistake((*path, "do"), what, "write AbortJob, TerminateJob or FailJob")
    elif others := [event for event in events if event != "WorkerFailed"]:
        yield Mistake((*path, "do"), f"{do} is for WorkerFailed: {_names(others)} takes the gang along", right)
    if waits:
        yield Mistake((*path, "timeout"), f"{do} is not waited with: the role's clients wait for it", "remove it")


def _names(events: Sequence[Any]) -> str:
    return " and ".join(map(str, events))
