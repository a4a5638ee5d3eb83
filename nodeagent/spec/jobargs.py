"""A job from the pieces of a command line, and the record of who submits it. The same checks as the job file's, shown
with the option's name. Must never read the environment by itself: it comes in."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nodeagent.model.jobspec import (
    DEFAULT_GRACE,
    DEFAULT_ROLE,
    MOST_GRACE,
    MOST_RESTARTS,
    JobSpec,
    NumaBinding,
    RestartLimits,
    Role,
    Submitter,
)
from nodeagent.spec import jobvalues, units
from nodeagent.spec.errors import CheckError, Problem, SpecError
from nodeagent.spec.jobcheck import check_spec
from nodeagent.spec.yamlfile import scalar

T = TypeVar("T")


def capture_submitter(environ: Mapping[str, str], cwd: str) -> Submitter:
    """Who submits from where: this process's user and host, the folder, and the few variables a job needs."""
    uid = os.getuid()
    try:
        entry = pwd.getpwuid(uid)
        user, gid = entry.pw_name, entry.pw_gid
    except KeyError:
        user, gid = str(uid), os.getgid()
    kept = {name: environ[name] for name in jobvalues.RECORDED if name in environ}
    return Submitter(user=user, uid=uid, gid=gid, host=socket.gethostname(), cwd=cwd, environ=kept)


def job_from_args(
    *,
    name: str,
    command: Sequence[str],
    submitter: Submitter,
    nodes: str = "1",
    nproc: str = "gpu",
    max_restarts: int | None = None,
    env: Sequence[str] = (),
    preload: Sequence[str] = (),
    guessed: Sequence[str] = (),
    checkpoint_dir: str | None = None,
    role: str = DEFAULT_ROLE,
    grace: int | None = None,
    virtual_local_rank: bool = False,
    numa_binding: NumaBinding | None = None,
    queue: str | None = None,
) -> JobSpec:
    """The job that ``nodeagentctl run`` was given.

    ``nodes`` is ``N`` or ``MIN:MAX``, ``nproc`` ``N`` or ``gpu``, ``env`` holds ``NAME=VALUE``, ``grace`` is in seconds
    (None: the default). Raises ``SpecError`` with every problem, each under its option (``--nodes: ...``).
    """
    problems: list[Problem] = []

    def checked(option: str, check: Callable[[Any], T], value: object) -> T | None:
        try:
            return check(value)
        except CheckError as error:
            problems.extend(Problem(option, 0, 0, e.what, e.right) for e in (error, *error.also))
            return None

    words = checked("COMMAND", jobvalues.command, tuple(command))
    count = checked("--nodes", jobvalues.nodes, scalar(nodes))
    workers = checked("--nproc-per-node", jobvalues.workers_per_node, scalar(nproc))
    checked("--name", jobvalues.job_name, name)
    if queue is not None:
        checked("--queue", jobvalues.job_name, queue)
    restarts = RestartLimits()
    if max_restarts is not None:
        checked("--max-restarts", lambda n: units.whole(n, 0, MOST_RESTARTS), max_restarts)
        restarts = restarts.model_copy(update={"max": max_restarts})
    checked("--role", jobvalues.role_name, role)
    if grace is not None:
        checked("--shutdown-timeout", lambda seconds: units.whole(seconds, 0, MOST_GRACE), grace)
    pairs: dict[str, str] = {}
    for pair in env:
        key, equals, value = pair.partition("=")
        if not equals:
            problems.append(Problem("--env", 0, 0, f"'{pair}' has no value", f"write --env {pair}=VALUE"))
        elif checked("--env", jobvalues.env_name, key) is not None:
            pairs[key] = value
    modules = checked("--preload", jobvalues.modules, tuple(preload))
    folder = None if checkpoint_dir is None else checked("--checkpoint-dir", jobvalues.folder, checkpoint_dir)
    if problems or words is None or count is None or workers is None:
        raise SpecError(problems)
    spec = JobSpec(
        name=name,
        roles=(
            Role(
                name=role,
                command=words,
                nodes=count,
                workers_per_node=workers,
                virtual_local_rank=virtual_local_rank,
                numa_binding=numa_binding,
            ),
        ),
        env=pairs,
        working_dir=jobvalues.resolve(".", submitter.cwd),
        user=submitter.user,
        checkpoint_dir=None if folder is None else jobvalues.resolve(folder, submitter.cwd),
        queue=queue or "",
        preload=modules or (),
        guessed=tuple(guessed),
        restarts=restarts,
        grace=DEFAULT_GRACE if grace is None else grace,
        submitter=submitter,
    )
    if wrong := check_spec(spec):
        raise SpecError(Problem("job", 0, 0, sentence) for sentence in wrong)
    return spec
