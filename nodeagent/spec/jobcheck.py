"""The checks of a whole ``JobSpec`` that its types do not hold: what an agent makes of a request that somebody may
have written by hand. Says the same as the job file's reader, since both use ``jobvalues``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError

from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.spec import containerfile, jobvalues, units
from nodeagent.spec.check import dotted
from nodeagent.spec.consistency import policy_mistakes, spec_mistakes
from nodeagent.spec.containerfile import container_mistakes
from nodeagent.spec.errors import CheckError, Path
from nodeagent.spec.placementfile import placement_mistakes

MAX_BYTES = 256 * 1024
"""Most bytes of a job as JSON: every agent keeps every job."""

MOST_PROBLEMS = 100
"""So many reasons are given at most: each costs a search for what was meant, and the agent's loop waits for it."""

MOST_ENTRIES = 2048
"""Of one list or mapping in a job: no person writes as many."""
MOST_VALUES = 10_000
"""Values in a job, lists and mappings counted with what is in them: each that is wrong costs a sentence."""
MOST_DEPTH = 16
"""Lists and mappings in each other, about twice as many as a job has."""
MOST_NAMED = 1000
"""Mistakes of which the first ``MOST_PROBLEMS`` are named; of more only the number is said, since pydantic makes the
sentences of all of them or of none."""

_Check = tuple[str, Callable[[Any], object], object]


def too_much(value: Mapping[str, object]) -> list[str]:
    """The reasons to refuse what a request calls a job before it is validated, which takes a time, and memory, for each
    mistake; empty where there is none. Looks at so many values at most, whatever it is given."""
    left = MOST_VALUES
    inside: list[tuple[str, int, object]] = [("the job", 0, value)]
    while inside:
        where, depth, one = inside.pop()
        if not isinstance(one, dict | list):
            continue
        left -= len(one)
        if len(one) > MOST_ENTRIES:
            return [f"{where}: {len(one)} entries in a list or mapping, a job has {MOST_ENTRIES} at most in each"]
        if left < 0:
            return [f"{where}: with it the job has more than {MOST_VALUES} values"]
        if depth > MOST_DEPTH:
            return [f"{where}: lists and mappings are nested more than {MOST_DEPTH} deep"]
        named = isinstance(one, dict) and depth == 0
        entries = one.items() if isinstance(one, dict) else enumerate(one)
        inside += [(str(key)[:64] if named else where, depth + 1, entry) for key, entry in entries]
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _too_large(len(text.encode(errors="surrogatepass")))


def mistakes(wrong: ValidationError) -> list[str]:
    """What pydantic found, as sentences that start with the field."""
    count = wrong.error_count()
    if count > MOST_NAMED:
        return [f"the job: {count} mistakes, too many to name: look at how it was written"]
    found = wrong.errors(include_url=False, include_context=False, include_input=False)
    return [f"{'.'.join(str(p)[:64] for p in e['loc']) or 'spec'}: {e['msg']}" for e in found[:MOST_PROBLEMS]]


def check_spec(spec: JobSpec) -> list[str]:
    """The reasons to refuse the job, as sentences that start with the field; empty when it is sound."""
    try:
        size = len(spec.to_json().encode())
    except ValueError:
        return list(islice(_no_text(spec.model_dump(), ()), MOST_PROBLEMS))
    return _too_large(size) or list(islice(_problems(spec), MOST_PROBLEMS))


def _no_text(value: object, path: Path) -> Iterator[str]:
    """What of a job no record can hold: a word of a command line, or a folder's name, with bytes that are not UTF-8
    has half of a character for each."""
    if isinstance(value, dict | list | tuple):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _no_text(one, (*path, key))
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield f"{dotted(path)}: {ascii(value)[:100]} has bytes that are not UTF-8 text: use another name"


def _too_large(size: int) -> list[str]:
    if size <= MAX_BYTES:
        return []
    return [
        f"the job takes {size} bytes, more than {MAX_BYTES} ({MAX_BYTES // 1024} KiB): put long texts into files "
        f"that the nodes can read"
    ]


def _problems(spec: JobSpec) -> Iterator[str]:
    for where, check, value in _checks(spec):
        try:
            check(value)
        except CheckError as error:
            yield from (f"{where}: {e}" for e in (error, *error.also))
    for found in (spec_mistakes, policy_mistakes, placement_mistakes, container_mistakes):
        yield from (f"{dotted(m.path)}: {m.what}, {m.right}" for m in found(spec))
    if spec.restarts.backoff_min > spec.restarts.backoff_max:
        yield (
            f"restarts: backoff_min {spec.restarts.backoff_min:g} is above backoff_max {spec.restarts.backoff_max:g}, "
            f"it must not be"
        )


def _checks(spec: JobSpec) -> Iterator[_Check]:
    for role in spec.roles:
        yield from _role_checks(role)
    for name, value in spec.env.items():
        yield f"env.{name}", jobvalues.env_name, name
        yield f"env.{name}", jobvalues.env_value, value
    paths = {"working_dir": spec.working_dir, "checkpoint_dir": spec.checkpoint_dir, "env_file": spec.env_file}
    for where, path in paths.items():
        if path is not None:
            yield where, jobvalues.absolute, path
    durations = {
        "grace": spec.grace,
        "hold_timeout": spec.hold_timeout,
        "time_limit": spec.time_limit,
        "ttl": spec.ttl,
        "hooks.timeout": spec.hooks.timeout,
        "restarts.window": spec.restarts.window,
        "restarts.backoff_min": spec.restarts.backoff_min,
        "restarts.backoff_max": spec.restarts.backoff_max,
    }
    for where, seconds in durations.items():
        if seconds is not None:
            yield where, units.duration, seconds
    for one in spec.after:
        yield "after", jobvalues.job_name, one.name
    if spec.array is not None:
        yield "array.name", jobvalues.job_name, spec.array.name
    if spec.finish is not None:
        yield "finish", jobvalues.finish, spec.finish
    if (watched := spec.watched_by) is not None:
        yield "hang.progress", jobvalues.hang_progress, watched.progress or "auto"
        yield "hang.phases", jobvalues.bounded(*jobvalues.HANG_BOUNDS), watched.phases
    yield "user", jobvalues.user_name, spec.user
    yield "user", lambda name: jobvalues.allowed_user(name, spec.submitter), spec.user
    if spec.queue:
        yield "queue", jobvalues.job_name, spec.queue
    if spec.container is not None:
        yield "container", containerfile.container, spec.container.model_dump()
    yield "modules", containerfile.site_modules, spec.modules
    for name, limit in spec.limits.items():
        yield f"limits.{name}", jobvalues.limit_name, name
        yield f"limits.{name}", jobvalues.limit_value, limit
    yield "preload", jobvalues.modules, spec.preload
    yield "guessed", jobvalues.modules, spec.guessed
    for where, command in {"pre_start": spec.hooks.pre_start, "post_stop": spec.hooks.post_stop}.items():
        if command:
            yield f"hooks.{where}", jobvalues.command, command
    yield "submitter.cwd", jobvalues.absolute, spec.submitter.cwd
    for name, value in spec.submitter.environ.items():
        yield f"submitter.environ.{name}", jobvalues.recorded_name, name
        yield f"submitter.environ.{name}", jobvalues.env_value, value


def _role_checks(role: Role) -> Iterator[_Check]:
    at = f"roles.{role.name}"
    yield at, jobvalues.role_name, role.name
    yield f"{at}.command", jobvalues.command, role.command
    yield f"{at}.nodes", jobvalues.nodes, role.nodes
    if role.ready is not None and role.ready.command:
        yield f"{at}.ready.command", jobvalues.command, role.ready.command
    if role.grace is not None:
        yield f"{at}.grace", units.duration, role.grace
    if role.replicas is not None:
        yield f"{at}.replicas", jobvalues.replicas, role.replicas
    for name, value in role.env.items():
        yield f"{at}.env.{name}", jobvalues.env_name, name
        yield f"{at}.env.{name}", jobvalues.env_value, value
    yield f"{at}.workers_per_node", jobvalues.workers_per_node, role.workers_per_node
