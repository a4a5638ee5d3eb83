"""The queue file as people write it (a whole tree), and the settings of one queue on a command line. Owns the keys and
their words; must never do I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from nodeagent.model.base import Record
from nodeagent.model.queue import (
    DEFAULT_QUEUE,
    MOST_QUEUES,
    RESOURCES,
    Amount,
    JobLimits,
    Queue,
    Queues,
    QueueSettings,
    UserQuota,
)
from nodeagent.spec import jobvalues
from nodeagent.spec.check import validate
from nodeagent.spec.errors import CheckError, Problem, SpecError, did_you_mean
from nodeagent.spec.yamlfile import Document, load


def _names(value: object) -> object:
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list | tuple) and all(isinstance(v, str) and v for v in found):
        return tuple(dict.fromkeys(found))
    raise CheckError("this is not a list of names", "write for instance [alice, bob]")


_Names = Annotated[tuple[str, ...], BeforeValidator(_names), Field(max_length=1000)]
_Runtime = Annotated[float | None, BeforeValidator(jobvalues.min_runtime)]
_Limit = Annotated[float | None, BeforeValidator(jobvalues.or_never)]
_Usual = Annotated[float | Literal["never"] | None, BeforeValidator(jobvalues.usual_time_limit)]
_UsualHang = Annotated[float | Literal["auto", "off"] | None, BeforeValidator(jobvalues.usual_hang)]
_Name = Annotated[str, AfterValidator(jobvalues.job_name)]


class _Amount(Amount):
    model_config = ConfigDict(strict=True)


class _UserQuota(UserQuota):
    model_config = ConfigDict(strict=True)


class _JobLimits(JobLimits):
    model_config = ConfigDict(strict=True)
    max_time_limit: _Limit = None
    default_time_limit: _Usual = None
    default_hang: _UsualHang = None


class QueueKeys(QueueSettings):
    """One queue."""

    model_config = ConfigDict(strict=True)
    guarantee: _Amount = _Amount()
    capability: _Amount = _Amount()
    min_runtime: _Runtime = None
    limits: _JobLimits = _JobLimits()
    users: _Names = ()
    groups: _Names = ()
    user_quota: _UserQuota = _UserQuota()


class QueueFile(Record):
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
    return Queue(name=name, **keys.model_dump())


@dataclass(frozen=True, slots=True)
class TreeMistake:
    """One thing that cannot be, and what would be right."""

    queue: str
    key: str
    """The key of the queue that it is about; empty: the queue as a whole."""
    what: str
    right: str

    def __str__(self) -> str:
        return f"queue {self.queue}: {self.what}: {self.right}"


def tree_mistakes(tree: Queues) -> list[TreeMistake]:
    """Every reason to refuse the tree; empty where it is sound."""
    if found := list(_shape(tree)):
        return found  # what follows goes up and down the tree
    return [mistake for queue in tree.by_name.values() for mistake in _one(tree, queue)]


def _shape(tree: Queues) -> Iterator[TreeMistake]:
    names = [queue.name for queue in tree.queues]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield TreeMistake(name, "", "it is there twice", "keep one of them")
    if len(tree.by_name) > MOST_QUEUES:
        text = f"there are {len(tree.by_name)} queues with {DEFAULT_QUEUE}"
        yield TreeMistake(names[-1], "", text, f"at most {MOST_QUEUES} can be")
    for queue in tree.by_name.values():
        if queue.parent == DEFAULT_QUEUE:
            text = f"its parent is {DEFAULT_QUEUE}, which takes the jobs that name no queue, and so has no children"
            yield TreeMistake(queue.name, "parent", text, "give it another parent, or none")
        elif queue.parent and queue.parent not in tree.by_name:
            known = [name for name in tree.by_name if name not in (queue.name, DEFAULT_QUEUE)]
            right = did_you_mean(queue.parent, known) if known else "create it first, or leave parent out"
            yield TreeMistake(queue.name, "parent", f"its parent {queue.parent} does not exist", right)
    circles: set[str] = set()
    for name in sorted(tree.by_name):
        above = [queue.name for queue in tree.path(name)]
        if tree.by_name[above[-1]].parent == name and name not in circles:
            circles |= {*above}
            around = " -> ".join([*above, name])
            yield TreeMistake(name, "parent", f"it is above itself ({around})", "give one of them no parent")


def _one(tree: Queues, queue: Queue) -> Iterator[TreeMistake]:
    below = tree.children.get(queue.name, ())
    for resource in RESOURCES:
        own: int | None = getattr(queue.guarantee, resource)
        theirs = sum(tree.guaranteed(child, resource) for child in below)
        if own is not None and theirs > own:
            text = f"its children ({', '.join(below)}) are guaranteed {theirs} {resource}, it has {own} itself"
            yield TreeMistake(queue.name, "guarantee", text, "lower theirs, or raise its own")
            continue
        mine = tree.guaranteed(queue.name, resource)
        bounds = [
            (up.name, cap) for up in tree.path(queue.name) if (cap := getattr(up.capability, resource)) is not None
        ]
        for name, cap in bounds[:1]:
            if mine > cap:
                whose = "its capability" if name == queue.name else f"the capability of {name} above it"
                text = f"its guarantee of {mine} {resource} is above {whose}, {cap}"
                yield TreeMistake(queue.name, "guarantee", text, "lower the one, or raise the other")
    usual = queue.limits.default_time_limit
    limits = [(most, up.name) for up in tree.path(queue.name) if (most := up.limits.max_time_limit) is not None]
    longest, name = min(limits, key=lambda one: one[0], default=(None, ""))
    stated = f"{usual:g} s" if isinstance(usual, float) else usual
    if usual is not None and longest is not None and (usual == "never" or usual > longest):
        whose = "its max_time_limit of" if name == queue.name else f"the max_time_limit of {name} above it,"
        text = f"its default_time_limit of {stated} is above {whose} {longest:g} s"
        yield TreeMistake(queue.name, "limits", text, "lower the one, or raise the other")
    if queue.state == "closed" and (ones := [name for name in below if tree.by_name[name].state == "open"]):
        text = f"it is closed while its children are open ({', '.join(ones)})"
        yield TreeMistake(queue.name, "state", text, "close these first, or open it")
    if queue.default and not (queue.users or queue.groups):
        text = "it is the default of nobody: it names neither users nor groups"
        right = f"name some; jobs of all others go to {DEFAULT_QUEUE}"
        yield TreeMistake(queue.name, "default", text, right)
    if queue.default and below:
        text = f"jobs cannot be in it, since it has children ({', '.join(below)})"
        yield TreeMistake(queue.name, "default", text, "make one of these the default")
    if queue.name == DEFAULT_QUEUE and queue.parent:
        text = f"it stays at the top, and has the parent {queue.parent}"
        yield TreeMistake(queue.name, "parent", text, "leave it out")


def with_queue(tree: Queues, queue: Queue) -> Queues:
    """The tree with this queue, new or changed."""
    return whole_tree(tree, [*(q for q in tree.queues if q.name != queue.name), queue])


def without_queue(tree: Queues, name: str) -> Queues:
    """The tree without it."""
    return whole_tree(tree, (q for q in tree.queues if q.name != name))


def whole_tree(tree: Queues, queues: Iterable[Queue]) -> Queues:
    """The tree with these queues, and no other."""
    found = tuple(sorted(queues, key=lambda queue: queue.name))
    return Queues(rev=tree.rev, by=tree.by, queues=found)
