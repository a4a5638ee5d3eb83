"""The job file as people write it, one job or several with lines of ``---`` between them, and its way to a ``JobSpec``
with every default filled in.

Owns the keys, their defaults and what belongs where; what each value may be is ``jobvalues``'. Must never do I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from nodeagent.model.jobspec import (
    DEFAULT_FINISH,
    DEFAULT_ROLE,
    MOST_GRACE,
    MOST_JOBS,
    MOST_MEMBERS,
    MOST_RESTARTS,
    MOST_TIMEOUT,
    ActionName,
    Container,
    EventName,
    Hang,
    Hooks,
    JobSpec,
    Need,
    Nodes,
    NumaBinding,
    Policy,
    Ready,
    RestartLimits,
    Role,
    Submission,
    Submitter,
)
from nodeagent.spec import containerfile, jobvalues, units
from nodeagent.spec.check import dotted, validate
from nodeagent.spec.consistency import (
    Mistake,
    scheduler_mistakes,
    way_back,
    with_scheduler,
    written_mistakes,
    written_policy_mistakes,
)
from nodeagent.spec.containerfile import written_container_mistakes
from nodeagent.spec.errors import CheckError, Problem, SpecError
from nodeagent.spec.jobcheck import check_spec
from nodeagent.spec.jobvalues import indices, member_name
from nodeagent.spec.placementfile import PlacementFile, RolePlacementFile, constraints, together, uneven_segments
from nodeagent.spec.yamlfile import Document, load_all

_DURATION: dict[str, Any] = {"type": ["string", "number"], "examples": ["30s", "10m", "1h30m"]}
_NODE_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": jobvalues.MAX_NODES}
_EVENT: dict[str, Any] = {"enum": get_args(EventName)}

_Command = Annotated[
    tuple[str, ...],
    BeforeValidator(jobvalues.command),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string", "minLength": 1}]}
    ),
]
_Replicas = Annotated[
    Nodes,
    BeforeValidator(jobvalues.replicas),
    WithJsonSchema(
        {
            "anyOf": [
                _NODE_COUNT,
                {"type": "string", "pattern": r"^\s*\d+\s*:\s*\d+\s*$"},
                {
                    "type": "object",
                    "properties": {"min": _NODE_COUNT, "max": _NODE_COUNT, "target": _NODE_COUNT},
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
_Nodes = Annotated[
    Nodes,
    BeforeValidator(jobvalues.nodes),
    WithJsonSchema(
        {
            "anyOf": [
                _NODE_COUNT,
                {"const": "auto"},
                {"type": "string", "pattern": r"^\s*\d+\s*:\s*\d+\s*$"},
                {
                    "type": "object",
                    "properties": {
                        "min": _NODE_COUNT,
                        "max": _NODE_COUNT,
                        "target": {"anyOf": [_NODE_COUNT, {"const": "auto"}]},
                    },
                    "additionalProperties": False,
                    "anyOf": [{"required": ["min"]}, {"required": ["max"]}],
                },
            ]
        }
    ),
]
_Folder = Annotated[str, BeforeValidator(jobvalues.folder)]


class _Written(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class _RoleKeys(_Written):
    """Keys of a role that may also stand at the top of the file, for its single role."""

    workers_per_node: Annotated[
        int | Literal["gpu"],
        BeforeValidator(jobvalues.workers_per_node),
        WithJsonSchema(
            {"anyOf": [{"const": "gpu"}, {"type": "integer", "minimum": 1, "maximum": jobvalues.MAX_WORKERS}]}
        ),
    ] = "gpu"
    """Workers on each node: gpu is one per installed GPU (one on a node without GPUs), or a number."""
    gpus_per_worker: int | None = Field(default=None, ge=0, le=64)
    """GPUs of each worker. Default: one where the node has GPUs, none where it has not."""
    uneven: bool = False
    """true: a node with a GPU missing still takes part, with fewer workers."""
    numa_binding: NumaBinding | None = None
    """Binds each worker to the cores of its GPU's NUMA node (node) or socket, or to a part of the node's that no other
    GPU has (exclusive, core-complex). Default: not bound."""


class ReadyFile(_Written):
    """When a place of a role is ready: one of the keys."""

    port: Literal[True] | None = None
    """true: when its first worker listens on NODEAGENT_PORT."""
    command: _Command | None = Field(default=None, examples=["[python, check.py]"])
    """When this command ends with 0; it is run each second on the place's node, in its first worker's environment."""

    @model_validator(mode="after")
    def _one(self) -> ReadyFile:
        if (self.port is None) == (self.command is None):
            raise CheckError("give either port or command", "write {port: true} or {command: [...]}")
        return self


class PolicyFile(_Written):
    """What to do about an event; of several policies the first that matches decides."""

    on: Annotated[
        tuple[EventName, ...],
        BeforeValidator(jobvalues.events),
        WithJsonSchema({"anyOf": [_EVENT, {"type": "array", "items": _EVENT, "minItems": 1}]}),
    ] = Field(examples=["WorkerFailed"])
    """An event, or a list of them; * is any fault: WorkerFailed, WorkerHung, PodFailed, PodEvicted, NodeLost."""
    exit_code: int | None = Field(default=None, ge=1, le=255)
    """Only when the blamed worker ended with this code (128+n for signal n)."""
    do: Annotated[ActionName, BeforeValidator(jobvalues.action), WithJsonSchema({"enum": get_args(ActionName)})] = (
        Field(examples=["RestartJob"])
    )
    """RestartJob: re-form the gang, which spends the budget if the fault is the job's own. RestartPod,
    RestartTask, in a role's own list: start the place that failed, or all places of the role, again while the others
    go on. AbortJob: pause the job until somebody resumes it. TerminateJob, CompleteJob, FailJob: it ends as stopped,
    succeeded or failed."""

    timeout: Annotated[
        float | None,
        BeforeValidator(jobvalues.bounded(0, MOST_TIMEOUT, above=True)),
        WithJsonSchema(_DURATION),
    ] = None
    """How long what the event tells of has to last before this is done; what ends before is not acted on. Default: it
    is done at once."""


class RoleFile(_RoleKeys):
    """One named part of the job."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "maxRetry": "write restarts: {max: N} for the whole job",
        "minAvailable": "write nodes: MIN:MAX",
    }
    """A key of a Volcano task to what stands for it here."""

    command: _Command = Field(examples=["[python, train.py]"])
    """What each worker runs: a list of words, or one line that is split as a shell would (no shell runs it)."""
    nodes: _Nodes | None = Field(default=None, examples=["4", "2:8"])
    """How many nodes, each with one place: a number, MIN:MAX (elastic: it starts and goes on with MIN), or {min, max,
    target}."""
    replicas: _Replicas | None = Field(default=None, examples=["2", "1:4"])
    """Instead of nodes: how many places, in the same form; several of them on one node where its devices allow it."""
    env: dict[
        Annotated[str, AfterValidator(jobvalues.env_name)], Annotated[str, AfterValidator(jobvalues.env_value)]
    ] = {}
    """Environment of its workers; goes before the job's."""
    after: Annotated[
        tuple[str, ...],
        BeforeValidator(jobvalues.role_names),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ] = Field(default=(), examples=["pserver"])
    """A role or a list of them: its workers start when all their places are ready."""
    ready: ReadyFile | None = None
    """When a place of it is ready. Default: when its workers have been started."""
    restart: Literal["gang", "alone"] = "gang"
    """alone: a worker of it that fails is started again by itself. Default: the gang is formed anew."""
    policies: list[PolicyFile] | None = None
    """What to do about what happens to its workers, and to pods and nodes that have some, in place of the job's."""
    grace: Annotated[float | None, BeforeValidator(jobvalues.bounded(0, MOST_GRACE)), WithJsonSchema(_DURATION)] = None
    """From SIGTERM to SIGKILL of its workers on planned stops. Default: the job's."""
    placement: RolePlacementFile | None = None
    """Which nodes it may have and would rather have, besides what the job asks."""


class RestartsFile(_Written):
    """The restart budget. Membership changes, drains, scaling and hardware faults spend none of it."""

    max: int = Field(default=10, ge=0, le=MOST_RESTARTS)
    """Most restarts within the window; one more fails the job. 0: the first fault fails it."""
    window: Annotated[float, BeforeValidator(jobvalues.bounded(0, math.inf, above=True)), WithJsonSchema(_DURATION)] = (
        3600.0
    )
    """How long a restart counts."""
    backoff: Annotated[
        tuple[float, float],
        BeforeValidator(units.duration_range),
        WithJsonSchema({"type": ["string", "number"], "examples": ["0s..30s"]}),
        Field(json_schema_extra={"default": "0s..30s"}),
    ] = (0.0, 30.0)
    """FROM..TO: the first two restarts wait FROM, the third at least 0.5 s, each further one twice as long as the one
    before, up to TO."""


class HooksFile(_Written):
    """Commands that each node runs as the job's user, once per generation."""

    pre_start: _Command | None = None
    """Before the workers start; when it fails, the pod has failed."""
    post_stop: _Command | None = None
    """After the workers have stopped; when it fails, that is only logged."""
    timeout: Annotated[float, BeforeValidator(jobvalues.bounded(0, 3600, above=True)), WithJsonSchema(_DURATION)] = 60.0
    """Each hook is killed after this long."""


class HangFile(_Written):
    """When a gang that makes no progress is restarted."""

    progress: Annotated[float | None, BeforeValidator(jobvalues.hang_progress)] = Field(examples=["10m"])
    """How long no worker may show progress; auto: learned from the job's own steps."""
    phases: Annotated[float, BeforeValidator(jobvalues.bounded(*jobvalues.HANG_BOUNDS))] = 7200.0
    """How long a phase may take that a worker says it is in (evaluate, checkpoint, ...), unless it says that too."""


_FINISH: dict[str, Any] = {"anyOf": [{"enum": ["off", False]}, _DURATION]}
_HANG: dict[str, Any] = {
    "anyOf": [
        {"enum": ["off", False, "auto"]},
        {
            "type": "object",
            "properties": {"progress": {"anyOf": [{"const": "auto"}, _DURATION]}, "phases": _DURATION},
            "required": ["progress"],
            "additionalProperties": False,
        },
    ]
}


def _user(value: object, info: ValidationInfo) -> str:
    name = jobvalues.user_name(value)
    submitter: Submitter | None = (info.context or {}).get("submitter")
    if submitter:
        jobvalues.allowed_user(name, submitter)
    return name


class JobFile(_RoleKeys):
    """A job for nodeagent."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "maxRetry": "write restarts: {max: N}",
        "minAvailable": "write nodes: MIN:MAX, here or in a role",
        "minMember": "write nodes: MIN:MAX, here or in a role",
        "priorityClassName": "write priority: N",
        "schedulerName": "remove it",
        "tasks": "write roles: {NAME: {nodes: N, command: ...}}",
        "ttlSecondsAfterFinished": "write ttl: 10m",
    }
    """A key of a Volcano job or pod group to what stands for it here."""

    name: Annotated[str, BeforeValidator(jobvalues.job_name)] = Field(examples=["resnet50"])
    """Unique among live jobs: 1 to 63 of a-z, 0-9, '-' and '.'."""
    command: _Command | None = Field(default=None, examples=["[python, train.py]"])
    """What each worker runs: a list of words, or one line that is split as a shell would (no shell runs it)."""
    nodes: _Nodes | None = Field(default=None, examples=["4", "2:8", "auto"])
    """How many nodes: a number (fixed), MIN:MAX (elastic), or {min, max, target}. `target: auto` is min nodes of its
    own and as many idle ones as there are, up to max, which go back when another job needs them; `auto` alone is that
    with min 1."""
    roles: dict[Annotated[str, AfterValidator(jobvalues.role_name)], RoleFile] | None = None
    """Instead of command and nodes: roles by name. Several are one gang: all of their places start, or none."""
    scheduler: Literal["mindspore"] | None = None
    """mindspore: its scheduler is added as a role of this name, with the workers' command; they are the role worker
    then, if the job has no others."""
    completes: str | None = Field(default=None, examples=["trainer"])
    """The job has ended well when all workers of this role have; the others are then stopped with grace. Default: when
    all roles have."""
    env: dict[
        Annotated[str, AfterValidator(jobvalues.env_name)], Annotated[str, AfterValidator(jobvalues.env_value)]
    ] = {}
    """Environment of the workers; values are text, so numbers go in quotes."""
    env_file: _Folder | None = None
    """A file of NAME=VALUE lines on each node, for secrets: read as the job's user, never stored."""
    working_dir: _Folder | None = None
    """Where the workers start. Default: where the job was submitted."""
    user: Annotated[str | None, BeforeValidator(_user)] = None
    """Whom the workers run as. Default: who submits; only root may name somebody else."""
    checkpoint_dir: _Folder | None = None
    """The shared folder of the job's checkpoints, made if it is missing; a node on which it cannot be written takes no
    part."""
    container: Annotated[
        Container | None, BeforeValidator(containerfile.container), WithJsonSchema(containerfile.SCHEMA)
    ] = Field(default=None, examples=["/shared/images/torch.sif"])
    """The workers run in a container, which the job's user starts: an image that each node has, or {image, runtime,
    binds}. Default: no container."""
    modules: Annotated[
        tuple[str, ...],
        BeforeValidator(containerfile.site_modules),
        WithJsonSchema({"type": "array", "items": {"type": "string"}, "maxItems": containerfile.MOST_MODULES}),
    ] = ()
    """Environment modules of the site that are loaded on each node, in this order: [gcc/13, cuda/12.4]."""
    limits: dict[
        Annotated[str, AfterValidator(jobvalues.limit_name)],
        Annotated[
            int | Literal["infinity"],
            BeforeValidator(jobvalues.limit_value),
            WithJsonSchema({"anyOf": [{"const": "infinity"}, {"type": "integer", "minimum": 0}]}),
        ],
    ] = {}
    """Resource limits of the workers (soft and hard), as in ulimit: nofile, memlock, stack, ..."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher goes first in the queue."""
    queue: Annotated[str, BeforeValidator(jobvalues.job_name)] | None = Field(default=None, examples=["research"])
    """The queue that it waits and counts in. Default: the default queue of who submits, else `default`."""
    placement: PlacementFile | None = None
    """Which nodes the job may have, which it would rather have, and how they lie to each other."""
    preload: Annotated[
        tuple[str, ...],
        BeforeValidator(jobvalues.modules),
        WithJsonSchema({"type": "array", "items": {"type": "string"}}),
    ] = ()
    """Python modules imported ahead of time, so that a restart costs no import; [] for none. Default: what the script
    imports of the packages that take long, found by reading it."""
    fork_server: Annotated[
        bool, BeforeValidator(jobvalues.on_off), WithJsonSchema({"enum": [True, False, "on", "off"]})
    ] = True
    """off: no interpreter is kept warm; every start begins from nothing."""
    grace: Annotated[float, BeforeValidator(jobvalues.bounded(0, MOST_GRACE)), WithJsonSchema(_DURATION)] = 30.0
    """From SIGTERM to SIGKILL on planned stops (drain, scale, pause, stop)."""
    spot: Literal["allow"] | None = None
    """allow: nodes that may be taken away at short notice (`node.spot`) are used also if the job cannot go on with
    fewer nodes; default: only if it can."""
    hold_timeout: Annotated[
        float | None,
        BeforeValidator(jobvalues.or_never),
        WithJsonSchema({"anyOf": [{"const": "never"}, _DURATION]}),
    ] = None
    """How long a job that has run may wait for nodes again before it fails; default: never. A job that is queued waits
    for ever."""
    time_limit: Annotated[
        float | None,
        BeforeValidator(jobvalues.or_never),
        WithJsonSchema({"anyOf": [{"const": "never"}, _DURATION]}),
    ] = None
    """How long the job may have its nodes, counted from its first start, before it is stopped: 3650d at most; default:
    never."""
    begin: Annotated[
        jobvalues.When | None,
        BeforeValidator(jobvalues.begin),
        WithJsonSchema({"type": "string", "examples": ["+2h", "2030-01-31T22:00"]}),
    ] = None
    """It is not started before: a time (local unless it says otherwise), or +DURATION after it is submitted."""
    ttl: Annotated[float | None, BeforeValidator(jobvalues.ttl), WithJsonSchema(_DURATION)] = None
    """How long after its end its record is kept; default: as long as the site keeps others."""
    after: Annotated[
        dict[str, Need],
        BeforeValidator(jobvalues.after),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "object", "additionalProperties": {"enum": ["ok", "any"]}},
                ]
            }
        ),
    ] = Field(default={}, examples=["{prepare: ok}"])
    """Jobs or arrays that have to end before it starts: a name, a list of names, or {NAME: ok|any}; ok, the default:
    they have to succeed."""
    array: Annotated[
        str | None,
        BeforeValidator(jobvalues.array),
        WithJsonSchema({"type": ["string", "integer"], "examples": ["0-99%8"]}),
    ] = None
    """Submits it once for each index, as NAME-INDEX: 0-99, 0-99:10 or 1,3,5-7; %N behind it: N at once at most."""
    finish: Annotated[float | None, BeforeValidator(jobvalues.finish), WithJsonSchema(_FINISH)] = DEFAULT_FINISH
    """Workers that do nothing at all for so long after others have exited 0 hang: they are named and the gang is
    restarted. off: they may stay for ever. With hang its limits apply."""
    hang: Annotated[HangFile | None, BeforeValidator(jobvalues.hang), WithJsonSchema(_HANG)] = None
    """off, auto, or {progress: 10m}: a gang without progress for so long is restarted, and the worker that hangs is
    named. Default: as its queue says, else off."""
    restarts: RestartsFile = RestartsFile()
    policies: list[PolicyFile] = []
    """What to do about failures, instead of restarting while the budget lasts; the first match decides."""
    hooks: HooksFile = HooksFile()

    @model_validator(mode="after")
    def _whole_segments(self) -> JobFile:
        size = self.placement.segments if self.placement is not None else None
        roles = self.roles or {}
        nodes = next((role.nodes for role in roles.values()), None) if roles else self.nodes
        if size and (mistake := uneven_segments(size, nodes, several=len(roles) > 1)):
            raise CheckError(*mistake, at=("placement", "segments"))
        return self


ROLE_KEYS = tuple(
    key
    for key in RoleFile.model_fields
    if key in JobFile.model_fields and key not in ("env", "after", "placement", "policies", "grace")
)
"""Keys that stand inside of a role when there are ``roles``."""


def read_job(document: Document, submitter: Submitter) -> Submission:
    """The job that a document describes, complete. Raises ``SpecError`` with every problem at once."""
    written = validate(document, JobFile, {"submitter": submitter}, _layout(document))
    spec = _complete(written, submitter)
    if wrong := check_spec(spec):  # of what the submitter brings along: the file itself has been checked
        raise SpecError(document.problem((), sentence) for sentence in wrong)
    guess = "preload" not in written.model_fields_set and written.fork_server
    later = written.begin.seconds if written.begin is not None and written.begin.from_now else None
    return Submission(spec, written.after, written.array or "", guess, later)


def _layout(document: Document) -> list[Problem]:
    """What stands at the wrong level; reported whatever else is wrong."""
    tree = document.value
    if not isinstance(tree, dict):
        return []
    mistakes = (*written_policy_mistakes(tree), *written_container_mistakes(tree))
    out = [document.problem(m.path, _named(m), m.right) for m in mistakes]
    out += [document.problem(m.path, m.what, m.right) for m in scheduler_mistakes(tree)]
    if tree.get("roles") is None:
        missing = [k for k in ("command", "nodes") if tree.get(k) is None and document.raw.get((k,)) != ""]
        examples = {"command": "command: [python, train.py]", "nodes": "nodes: 1 (fixed) or nodes: 2:8 (elastic)"}
        return [*out, *(document.problem((), f"the key '{k}' is missing", f"add {examples[k]}") for k in missing)]
    out += [
        document.problem((k,), f"'{k}' stands beside roles", f"move it into the role: roles.NAME.{k}", key=True)
        for k in ROLE_KEYS
        if k in tree
    ]
    found = [m for m in written_mistakes(tree) if document.raw.get(m.path) != ""]  # a key without a value is reported
    return [*out, *(document.problem(m.path, _named(m), m.right) for m in found)]


def _named(mistake: Mistake) -> str:
    """With the key, where it is one of the roles' own."""
    named = len(mistake.path) == 3 or "policies" in mistake.path
    return f"{dotted(mistake.path)}: {mistake.what}" if named else mistake.what


def _complete(written: JobFile, submitter: Submitter) -> JobSpec:
    working_dir = jobvalues.resolve(written.working_dir or ".", submitter.cwd)
    written_roles: Mapping[str, RoleFile | JobFile] = written.roles or {DEFAULT_ROLE: written}
    roles = tuple(_role(name, role, written.placement) for name, role in written_roles.items())
    completes = written.completes or ""
    if written.scheduler is not None:
        completes = completes or roles[0].name
        roles = with_scheduler(roles, next((one for one in roles if one.name == completes), roles[0]))
    return JobSpec(
        name=written.name,
        roles=roles,
        completes=completes,
        env=written.env,
        env_file=None if written.env_file is None else jobvalues.resolve(written.env_file, working_dir),
        working_dir=working_dir,
        user=written.user or submitter.user,
        checkpoint_dir=(
            None if written.checkpoint_dir is None else jobvalues.resolve(written.checkpoint_dir, working_dir)
        ),
        container=containerfile.resolved(written.container, working_dir),
        modules=written.modules,
        limits=written.limits,
        priority=written.priority,
        spot=written.spot == "allow",
        queue=written.queue or "",
        placement=together(written.placement),
        preload=written.preload,
        fork_server=written.fork_server and written.container is None,
        grace=written.grace,
        restarts=RestartLimits(
            max=written.restarts.max,
            window=written.restarts.window,
            backoff_min=written.restarts.backoff[0],
            backoff_max=written.restarts.backoff[1],
        ),
        policies=_policies(written.policies),
        hooks=Hooks(
            pre_start=written.hooks.pre_start or (),
            post_stop=written.hooks.post_stop or (),
            timeout=written.hooks.timeout,
        ),
        finish=written.finish,
        hang=_hang(written),
        hold_timeout=written.hold_timeout,
        time_limit=written.time_limit,
        begin=None if written.begin is None or written.begin.from_now else written.begin.seconds,
        ttl=written.ttl,
        submitter=submitter,
    )


def _role(name: str, role: RoleFile | JobFile, jobs: PlacementFile | None) -> Role:
    replicas = role.replicas if isinstance(role, RoleFile) else None
    nodes = role.nodes if replicas is None else Nodes(min=1, max=replicas.max, target=replicas.target)
    assert role.command is not None and nodes is not None  # else _layout has reported it
    return Role(
        name=name,
        command=role.command,
        nodes=nodes,
        replicas=replicas,
        env=role.env if isinstance(role, RoleFile) else {},
        after=role.after if isinstance(role, RoleFile) else (),
        ready=_ready(role.ready) if isinstance(role, RoleFile) else None,
        restart=role.restart if isinstance(role, RoleFile) else "gang",
        policies=_policies(role.policies) if isinstance(role, RoleFile) and role.policies is not None else None,
        workers_per_node=role.workers_per_node,
        gpus_per_worker=role.gpus_per_worker,
        uneven=role.uneven,
        grace=role.grace if isinstance(role, RoleFile) else None,
        numa_binding=role.numa_binding,
        placement=constraints(role.placement if isinstance(role, RoleFile) else None, jobs),
    )


def _hang(written: JobFile) -> Hang | Literal["off"] | None:
    if written.hang is None:
        return "off" if "hang" in written.model_fields_set else None
    return Hang(progress=written.hang.progress, phases=written.hang.phases)


def _policies(written: Sequence[PolicyFile]) -> tuple[Policy, ...]:
    return tuple(Policy(on=p.on, exit_code=p.exit_code, do=p.do, timeout=p.timeout) for p in written)


def _ready(written: ReadyFile | None) -> Ready | None:
    return None if written is None else Ready(port=bool(written.port), command=written.command or ())


def parse_jobs(text: str, filename: str, submitter: Submitter) -> list[Submission]:
    """The jobs that ``text`` describes, in its order. Raises ``SpecError``."""
    documents = load_all(text, filename)
    if len(documents) > MOST_JOBS:
        raise SpecError([documents[MOST_JOBS].problem((), f"more than {MOST_JOBS} jobs", "write several files")])
    problems: list[Problem] = []
    found: list[tuple[Document, Submission]] = []
    for document in documents:
        try:
            found.append((document, read_job(document, submitter)))
        except SpecError as error:
            problems += error.problems
    problems += _together(found)
    if problems:
        raise SpecError(problems)
    return [submission for _, submission in found]


def _together(found: Sequence[tuple[Document, Submission]]) -> Iterator[Problem]:
    """What is wrong with jobs that are right each by itself."""
    names: dict[str, Document] = {}
    for document, job in found:
        try:
            own = [job.spec.name, *(member_name(job.spec.name, i) for i in _indices(job))]
        except CheckError as error:
            yield document.problem(("array",), error.what, error.right, key=True)
            continue
        for name in own:
            if name in names:
                first = names[name].place(("name",))
                yield document.problem(
                    ("name",), f"a job named {name} is in this file already (line {first.line})", "give each its own"
                )
                break
        names.update(dict.fromkeys(own, document))
    if sum(len(_indices(job)) or 1 for _, job in found) > MOST_MEMBERS:
        yield found[0][0].problem((), f"more than {MOST_MEMBERS} jobs, with those of arrays", "write several files")
    after = {job.spec.name: list(job.after) for _, job in found}
    for document, job in found:
        if way := way_back(job.spec.name, after):
            text = " -> ".join((job.spec.name, *way))
            yield document.problem(("after",), f"these jobs wait for each other: {text}", "break the circle", key=True)


def _indices(job: Submission) -> tuple[int, ...]:
    return indices(job.array).numbers if job.array else ()
