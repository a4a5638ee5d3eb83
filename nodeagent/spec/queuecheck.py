"""What is wrong with a tree of queues: what the types of one queue cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nodeagent.model.queue import DEFAULT_QUEUE, MOST_QUEUES, RESOURCES, Amount, Queue, Queues
from nodeagent.spec.errors import did_you_mean


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


def amount_text(amount: Amount) -> str:
    """For people: ``8 gpus, 2 nodes``; empty where nothing is said."""
    return ", ".join(f"{value} {name}" for name, value in amount.stated.items())


def with_queue(tree: Queues, queue: Queue) -> Queues:
    """The tree with this queue, new or changed."""
    return _of(tree, [*(q for q in tree.queues if q.name != queue.name), queue])


def without_queue(tree: Queues, name: str) -> Queues:
    """The tree without it."""
    return _of(tree, (q for q in tree.queues if q.name != name))


def whole_tree(tree: Queues, queues: Iterable[Queue]) -> Queues:
    """The tree with these queues, and no other."""
    return _of(tree, queues)


def _of(tree: Queues, queues: Iterable[Queue]) -> Queues:
    found = tuple(sorted(queues, key=lambda queue: queue.name))
    return Queues(rev=tree.rev, by=tree.by, queues=found)
