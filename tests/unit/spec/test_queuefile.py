"""The queue file, the settings of one queue, and what makes a tree impossible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.queue import DEFAULT_QUEUE, MOST_QUEUES, Amount, JobLimits, Queue, Queues, UserQuota
from nodeagent.spec.errors import SpecError
from nodeagent.spec.queuefile import changed_queue, parse_queues, tree_mistakes, with_queue, without_queue


def tree(*queues: Queue) -> Queues:
    return Queues(queues=queues)


def sentences(*queues: Queue) -> list[str]:
    return [str(mistake) for mistake in tree_mistakes(tree(*queues))]


FILE = """
queues:
  default: {weight: 0.5}
  research:
    weight: 3
    guarantee: {gpus: 8}
    capability: {gpus: 16, nodes: 4}
    groups: [research, phd]
    default: true
    limits: {max_nodes: 4, max_time_limit: 48h, default_time_limit: 4h, default_hang: 10m}
    user_quota: {jobs: 10, gpus: 8}
  product:
    priority: 10
    reclaimable: false
    min_runtime: 10m
  serving: {parent: product, min_runtime: 0, state: closed, users: alice}
  open: {parent: product, limits: {default_time_limit: never, default_hang: off}, users: "*"}
"""


def test_a_file_is_a_whole_tree() -> None:
    default, research, product, serving, everybodys = parse_queues(FILE, "queues.yaml")
    assert default == Queue(name="default", weight=0.5)
    assert research == Queue(
        name="research",
        weight=3,
        guarantee=Amount(gpus=8),
        capability=Amount(gpus=16, nodes=4),
        groups=("research", "phd"),
        default=True,
        limits=JobLimits(max_nodes=4, max_time_limit=172800, default_time_limit=14400, default_hang=600),
        user_quota=UserQuota(jobs=10, gpus=8),
    )
    assert product == Queue(name="product", priority=10, reclaimable=False, min_runtime=600.0)
    assert serving == Queue(name="serving", parent="product", state="closed", users=("alice",), min_runtime=0.0)
    limits = JobLimits(default_time_limit="never", default_hang="off")
    assert everybodys == Queue(name="open", parent="product", limits=limits, users=("*",))
    assert changed_queue("open", everybodys, ["weight=2"]).limits == limits
    assert changed_queue("open", everybodys, ["limits.default_time_limit="]).limits == JobLimits(default_hang="off")
    assert changed_queue("open", everybodys, ["limits.default_hang=auto"]).limits.default_hang == "auto"
    for wrong in ("0.5s", "8d", "soon", "never", "{progress: 10m}"):
        with pytest.raises(SpecError, match=", or auto or off"):
            changed_queue("a", None, [f"limits.default_hang={wrong}"])


def test_every_mistake_of_a_file_is_named_with_its_place() -> None:
    text = "queues:\n  a:\n    wieght: 2\n    parent: b\n  B: {}\n  c: {weight: 0}\n"
    with pytest.raises(SpecError) as caught:
        parse_queues(text, "q.yaml")
    assert str(caught.value).splitlines() == [
        "q.yaml:3:5: unknown key 'wieght' in queues.a, did you mean 'weight'?",
        "q.yaml:5:3: queues.B: 'B' is not a name, use 1 to 63 of a-z, 0-9, '-' and '.', starting and ending with a "
        "letter or digit, such as 'b'",
        "q.yaml:6:15: queues.c.weight: 0 is too small, it must be above 0",
    ]


def test_how_long_a_job_runs_at_least() -> None:
    queue = changed_queue("a", None, ["min_runtime=90s"])
    assert queue.min_runtime == 90
    assert changed_queue("a", queue, ["weight=2"]).min_runtime == 90
    assert changed_queue("a", queue, ["min_runtime="]).min_runtime is None
    for wrong in ("soon", "-1s", "31d"):
        with pytest.raises(SpecError, match="min_runtime"):
            changed_queue("a", None, [f"min_runtime={wrong}"])
    tree_of = tree(Queue(name="p", min_runtime=5.0), Queue(name="a", parent="p"), Queue(name="b"))
    assert [tree_of.min_runtime(name) for name in ("p", "a", "b", "default", "gone")] == [5, 5, 60, 60, 60]


def test_a_mistake_of_the_tree_is_named_where_it_is_written() -> None:
    with pytest.raises(SpecError) as caught:
        parse_queues("queues:\n  research: {}\n  vision:\n    parent: reserch\n", "q.yaml")
    assert str(caught.value) == (
        "q.yaml:4:13: queue vision: its parent reserch does not exist, did you mean 'research'?"
    )


def test_a_sound_tree_has_no_mistakes() -> None:
    assert tree_mistakes(Queues()) == []
    assert tree_mistakes(tree(*parse_queues(FILE, "q.yaml"))) == []


def test_an_unknown_parent() -> None:
    assert sentences(Queue(name="a", parent="b")) == [
        "queue a: its parent b does not exist: create it first, or leave parent out"
    ]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_circle_is_named_once(length: int) -> None:
    names = [f"q{i}" for i in range(length)]
    ring = [Queue(name=name, parent=names[i - 1]) for i, name in enumerate(names)]
    (sentence,) = sentences(*ring, Queue(name="apart"), Queue(name="z", parent=names[0]))
    assert sentence.startswith("queue q0: it is above itself (q0 -> ") and sentence.endswith(
        "give one of them no parent"
    )


def test_the_default_queue_stays_at_the_top_and_without_children() -> None:
    assert "has no children" in sentences(Queue(name="a", parent="default"))[0]
    assert "it stays at the top" in sentences(Queue(name="a"), Queue(name="default", parent="a"))[0]


def test_children_are_guaranteed_no_more_than_their_parent() -> None:
    parent = Queue(name="p", guarantee=Amount(gpus=8))
    a, b = (Queue(name=n, parent="p", guarantee=Amount(gpus=g, nodes=99)) for n, g in (("a", 4), ("b", 5)))
    assert sentences(parent, a, b) == [
        "queue p: its children (a, b) are guaranteed 9 gpus, it has 8 itself: lower theirs, or raise its own"
    ]
    assert sentences(parent, a, b.model_copy(update={"guarantee": Amount(gpus=4)})) == []


def test_a_parent_that_states_no_guarantee_has_that_of_its_children() -> None:
    family = tree(Queue(name="p"), Queue(name="a", parent="p", guarantee=Amount(gpus=3)))
    assert family.guaranteed("p", "gpus") == 3 and family.guaranteed("p", "nodes") == 0


def test_a_guarantee_is_within_every_capability_above_it() -> None:
    assert sentences(Queue(name="a", guarantee=Amount(slots=3), capability=Amount(slots=2))) == [
        "queue a: its guarantee of 3 slots is above its capability, 2: lower the one, or raise the other"
    ]
    found = sentences(
        Queue(name="p", guarantee=Amount(gpus=8), capability=Amount(nodes=1)),
        Queue(name="a", parent="p", guarantee=Amount(nodes=2)),
    )
    assert "queue a: its guarantee of 2 nodes is above the capability of p above it, 1: lower the one, or raise" in (
        "\n".join(found)
    )


def test_a_closed_queue_has_no_open_children() -> None:
    parent = Queue(name="p", state="closed")
    assert sentences(parent, Queue(name="a", parent="p"), Queue(name="b", parent="p", state="closed")) == [
        "queue p: it is closed while its children are open (a): close these first, or open it"
    ]


def test_the_usual_time_limit_is_within_the_longest() -> None:
    assert sentences(Queue(name="a", limits=JobLimits(max_time_limit=60, default_time_limit=60))) == []
    assert sentences(Queue(name="a", limits=JobLimits(max_time_limit=60, default_time_limit="never"))) == [
        "queue a: its default_time_limit of never is above its max_time_limit of 60 s: lower the one, or raise the "
        "other"
    ]
    assert sentences(Queue(name="a", limits=JobLimits(max_time_limit=60, default_time_limit=61))) == [
        "queue a: its default_time_limit of 61 s is above its max_time_limit of 60 s: lower the one, or raise the other"
    ]
    top = Queue(name="p", limits=JobLimits(max_time_limit=60))
    assert sentences(top, Queue(name="a", parent="p", limits=JobLimits(max_time_limit=90, default_time_limit=61))) == [
        "queue a: its default_time_limit of 61 s is above the max_time_limit of p above it, 60 s: lower the one, or "
        "raise the other"
    ]


def test_a_queue_is_the_default_of_somebody() -> None:
    assert "of nobody" in sentences(Queue(name="a", default=True))[0]
    family = (Queue(name="p", default=True, users=("u",)), Queue(name="a", parent="p"))
    assert "jobs cannot be in it" in sentences(*family)[0]


def test_there_are_not_too_many() -> None:
    many = [Queue(name=f"q{i}") for i in range(MOST_QUEUES - 1)]
    assert sentences(*many) == []
    assert sentences(*many[:-1], Queue(name="default"), Queue(name="z")) == []
    assert "at most 256" in str(tree_mistakes(Queues.model_construct(queues=(*many, Queue(name="z"))))[0])


def test_twice_the_same() -> None:
    assert sentences(Queue(name="a"), Queue(name="a", weight=2)) == ["queue a: it is there twice: keep one of them"]


def test_settings_change_what_they_name() -> None:
    made = changed_queue("a", None, ["weight=2", "guarantee.gpus=8", "users=[alice, bob]"])
    assert made == Queue(name="a", weight=2, guarantee=Amount(gpus=8), users=("alice", "bob"))
    assert changed_queue("a", made, ["guarantee.nodes=1"]).guarantee == Amount(gpus=8, nodes=1)
    assert changed_queue("a", made, ["guarantee.gpus=", "users="]) == Queue(name="a", weight=2)
    limited = changed_queue("a", made, ["limits.max_time_limit=1h30m"])
    assert limited.limits == JobLimits(max_time_limit=5400)
    assert changed_queue("a", limited, ["limits.max_nodes=2"]).limits == JobLimits(max_time_limit=5400, max_nodes=2)
    assert changed_queue("a", limited, ["limits.max_time_limit="]) == made


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("weight", "weight: it has no '=', write KEY=VALUE, such as weight=2"),
        ("wait=2", "queue a: unknown key 'wait', did you mean 'weight'?"),
        ("weight=heavy", "queue a: weight: "),
        ("guarantee=8", "queue a: guarantee: 8 is not a mapping"),
        ("state=shut", "queue a: state: 'shut' is not known here"),
    ],
)
def test_settings_that_cannot_be(setting: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        changed_queue("a", None, [setting])
    assert str(caught.value).startswith(words)


NAMES = st.sampled_from(["default", "a", "b", "c", "d"])
AMOUNTS = st.builds(Amount, gpus=st.none() | st.integers(0, 9), nodes=st.none() | st.integers(0, 9))
QUEUES = st.builds(
    Queue, name=NAMES, parent=st.just("") | NAMES, guarantee=AMOUNTS, capability=AMOUNTS,
    state=st.sampled_from(["open", "closed"]), default=st.booleans(), users=st.sampled_from([(), ("u",)]),
)  # fmt: skip
TREES = st.lists(QUEUES, max_size=5).map(lambda queues: Queues(queues=tuple(queues)))


@given(TREES)
def test_what_has_no_mistakes_can_be_walked(found: Queues) -> None:
    if tree_mistakes(found):
        return
    names = {*found.by_name}
    walked, reached = [*found.children[""]], set()
    while walked:
        reached.add(name := walked.pop())
        walked += found.children.get(name, ())
    assert reached == names
    for name in names:
        path = list(found.path(name))
        assert path[-1].parent == "" and len({queue.name for queue in path}) == len(path)
        for resource in ("gpus", "nodes"):
            caps = [cap for up in path if (cap := getattr(up.capability, resource)) is not None]
            assert found.guaranteed(name, resource) <= min(caps, default=10**9)


@given(QUEUES)
def test_a_queue_is_written_as_it_is_read(queue: Queue) -> None:
    assert changed_queue(queue.name, queue, []) == queue


@given(TREES, QUEUES)
def test_one_queue_is_put_and_taken(found: Queues, queue: Queue) -> None:
    more = with_queue(found, queue)
    assert more.by_name[queue.name] == queue
    assert [q.name for q in more.queues] == sorted(q.name for q in more.queues)
    assert queue.name not in without_queue(more, queue.name).by_name or queue.name == DEFAULT_QUEUE


@pytest.mark.parametrize("key", ["max_time_limit", "default_time_limit"])
def test_no_time_limit_is_longer_than_a_job_may_have(key: str) -> None:
    with pytest.raises(SpecError, match="it must be at most 3650d"):
        changed_queue("a", None, [f"limits.{key}=999999999999d"])
