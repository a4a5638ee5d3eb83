"""The queue file as people write it (a whole tree), and the settings of one queue on a command line. Owns the keys and
their words; must never do I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from nodeagent.model.jobspec import MOST_NODES
from nodeagent.model.queue import MOST_DEVICES, MOST_QUEUES, Amount, JobLimits, Queue, Queues, QueueState, UserQuota
from nodeagent.spec import jobvalues
from nodeagent.spec.check import validate
from nodeagent.spec.errors import CheckError, Problem, SpecError
from nodeagent.spec.queuecheck import tree_mistakes
from nodeagent.spec.yamlfile import Document, load


def _names(value: object) -> object:
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list | tuple) and all(isinstance(v, str) and v for v in found):
        return tuple(dict.fromkeys(found))
    raise CheckError("this is not a list of names", "write for instance [alice, bob]")


_Names = Annotated[tuple[str, ...], BeforeValidator(_names), Field(max_length=1000)]
_Runtime = Annotated[float | None, BeforeValidator(jobvalues.min_runtime)]
_Limit = Annotated[float | None, BeforeValidator(jobvalues.hold_timeout)]
_Usual = Annotated[float | Literal["never"] | None, BeforeValidator(jobvalues.usual_time_limit)]
_Name = Annotated[str, AfterValidator(jobvalues.job_name)]


class _Written(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class AmountFile(_Written):
    """An amount of what the cluster has; what is left out is not limited."""

    gpus: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    """GPUs."""
    nodes: int | None = Field(default=None, ge=0, le=MOST_NODES)
    """Nodes; one that two jobs share counts twice."""
    slots: int | None = Field(default=None, ge=0, le=MOST_DEVICES)
    """CPU slots."""


class JobLimitsFile(_Written):
    """What one job of the queue, or of a queue below it, may ask for; the strictest limit counts."""

    max_nodes: int | None = Field(default=None, ge=1, le=MOST_NODES)
    """Most nodes; of a job of several roles, those that its places need at least."""
    max_time_limit: _Limit = None
    """The longest time_limit. A job that states none gets the default, else this. Default: any, or none."""
    default_time_limit: _Usual = None
    """The time_limit of a job that states none; never: it has none. Default: as its parent; at the top never."""


class UserQuotaFile(AmountFile):
    """What the live jobs of one user in the queue and below it may come to, by what each asks for at least."""

    jobs: int | None = Field(default=None, ge=1)
    """Most jobs that have not ended."""


class QueueKeys(_Written):
    """One queue."""

    parent: str = ""
    """The queue that it is a part of. Default: it is at the top."""
    weight: float = Field(default=1.0, gt=0, le=1_000_000)
    """Its part of what is contended, against that of its siblings."""
    guarantee: AmountFile = AmountFile()
    """What is always its own."""
    capability: AmountFile = AmountFile()
    """What its jobs never exceed, however much is idle. Default: no limit."""
    reclaimable: bool = True
    """Whether what it uses above its guarantee may be taken back for others."""
    min_runtime: _Runtime = None
    """How long its jobs run at least before one is stopped for another queue. Default: as its parent; at the top 1m."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Jobs of a queue with a higher one go first, whatever their own priority."""
    state: QueueState = "open"
    """closed: it takes no new jobs."""
    limits: JobLimitsFile = JobLimitsFile()
    """What one job may ask for."""
    users: _Names = ()
    """Users who may submit to it; "*" is everybody. Default, if groups is empty too: whoever may use its parent; at the
    top everybody."""
    groups: _Names = ()
    """Unix groups whose members may."""
    default: bool = False
    """Whether jobs of its users and groups go here if they name no queue."""
    user_quota: UserQuotaFile = UserQuotaFile()
    """What the jobs of one user may come to."""


class QueueFile(_Written):
    """Every queue of a cluster."""

    queues: dict[_Name, QueueKeys] = Field(max_length=MOST_QUEUES, examples=["{research: {weight: 2}}"])
    """By name. ``default`` may be left out: it exists all the same."""


def parse_queues(text: str, filename: str) -> tuple[Queue, ...]:
    """The queues that ``text`` describes. Raises ``SpecError`` with every problem at once."""
    document = load(text, filename)
    written = validate(document, QueueFile, {})
    queues = tuple(_complete(name, keys) for name, keys in written.queues.items())
    mistakes = tree_mistakes(Queues(queues=queues))
    if mistakes:
        raise SpecError(_placed(document, m.queue, m.key, f"queue {m.queue}: {m.what}", m.right) for m in mistakes)
    return queues


def _placed(document: Document, queue: str, key: str, what: str, right: str) -> Problem:
    """At the key if it is written, else at the queue, else (``default`` may not be in the file) at the top."""
    for path in (("queues", queue, key), ("queues", queue), ("queues",)):
        if path in document.keys:
            return document.problem(path, what, right)
    return document.problem((), what, right)


def changed_queue(name: str, before: Queue | None, settings: Iterable[str]) -> Queue:
    """A queue with these settings (``weight=2``, ``guarantee.gpus=8``; an empty value is the default). ``before``: the
    queue as it is, None for a new one. Raises ``SpecError``."""
    tree: dict[str, Any] = {} if before is None else written_queue(before)
    problems: list[Problem] = []
    try:
        jobvalues.job_name(name)
    except CheckError as error:
        problems.append(Problem(f"queue {name}", 0, 0, error.what, error.right))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            problems.append(Problem(setting, 0, 0, "it has no '='", "write KEY=VALUE, such as weight=2"))
            continue
        value = load(text, setting)
        problems += [Problem(setting, 0, 0, p.what, p.right) for p in value.problems]
        _put(tree, key.split("."), value.value)
    if problems:
        raise SpecError(problems)
    try:
        return _complete(name, validate(Document(f"queue {name}", tree), QueueKeys, {}))
    except SpecError as error:
        raise SpecError(Problem(p.file, 0, 0, p.what, p.right) for p in error.problems) from None


def _put(tree: dict[str, Any], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            tree[key] = below = {}
        tree = below
    if value is None:
        tree.pop(keys[-1], None)
    else:
        tree[keys[-1]] = value


def written_queue(queue: Queue) -> dict[str, Any]:
    """A queue as a file would have it: only what is not at its default, without its name."""
    return queue.model_dump(mode="json", exclude_defaults=True, exclude={"name"})


def _complete(name: str, keys: QueueKeys) -> Queue:
    return Queue(
        name=name,
        parent=keys.parent,
        weight=keys.weight,
        guarantee=Amount(**keys.guarantee.model_dump()),
        capability=Amount(**keys.capability.model_dump()),
        reclaimable=keys.reclaimable,
        min_runtime=keys.min_runtime,
        priority=keys.priority,
        state=keys.state,
        limits=JobLimits(**keys.limits.model_dump()),
        users=keys.users,
        groups=keys.groups,
        default=keys.default,
        user_quota=UserQuota(**keys.user_quota.model_dump()),
    )
