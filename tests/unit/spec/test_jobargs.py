"""Jobs from a command line, who submits them, and the check of a job that somebody wrote by hand."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nodeagent.model.jobspec import Container, Hooks, JobSpec, Nodes, Policy, RestartLimits, Role, Submitter
from nodeagent.spec.jobargs import capture_submitter, job_from_args
from nodeagent.spec.jobcheck import check_spec
from tests.unit.spec.helpers import ROOT, TRAIN, job, problems


def test_a_job_from_arguments_is_the_files_job() -> None:
    got = job_from_args(
        name="digits",
        command=["python", "train.py", "--lr", "0.1"],
        submitter=TRAIN,
        nodes="2:8",
        nproc="4",
        max_restarts=3,
        env=["A=1", "B=x=y", "C="],
        preload=["torch"],
        checkpoint_dir="ckpt",
    )
    assert got == job("""
name: digits
command: [python, train.py, --lr, "0.1"]
nodes: 2:8
workers_per_node: 4
restarts: {max: 3}
env: {A: "1", B: x=y, C: ""}
preload: [torch]
checkpoint_dir: ckpt
""")


def test_defaults_of_arguments() -> None:
    got = job_from_args(name="a", command=["x"], submitter=TRAIN)
    assert got == job("name: a\ncommand: x\nnodes: 1")


def test_every_wrong_argument_at_once() -> None:
    found = problems(
        lambda: job_from_args(
            name="A b",
            command=[],
            submitter=TRAIN,
            nodes="4:2",
            nproc="auto",
            max_restarts=-1,
            env=["A", "RANK=3", "9=x"],
            preload=["a-b"],
            checkpoint_dir="~/x",
        )
    )
    assert [str(p).split(",")[0] for p in found] == [
        "--checkpoint-dir: in '~/x' nothing replaces '~'",
        "--env: '9' is not a variable's name",
        "--env: 'A' has no value",
        "--env: RANK is reserved",
        "--max-restarts: -1 is out of range",
        "--name: 'A b' is not a name",
        "--nodes: min 4 is above max 2",
        "--nproc-per-node: 'auto' is not a whole number",
        "--preload: 'a-b' is not a module's name",
        "COMMAND: an empty command",
    ]


def test_capture_submitter() -> None:
    environ = {"PATH": "/bin", "HOME": "/h", "AWS_SECRET_ACCESS_KEY": "s", "TERM": "x", "CONDA_PREFIX": "/c"}
    got = capture_submitter(environ, "/work")
    assert got.environ == {"PATH": "/bin", "HOME": "/h", "CONDA_PREFIX": "/c"}
    assert (got.uid, got.cwd) == (os.getuid(), "/work")
    assert got.host
    assert got.user


def _with(**changes: Any) -> JobSpec:
    return job("name: a\ncommand: x\nnodes: 2:4").model_copy(update=changes)


def _role(**changes: Any) -> JobSpec:
    spec = _with()
    return spec.model_copy(update={"roles": (spec.role.model_copy(update=changes),)})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (_role(nodes=Nodes(min=4, max=2, target=3)), "roles.worker.nodes: min 4 is above max 2"),
        (_role(nodes=Nodes(min=1, max=2, target=3)), "target 3 is not within min 1 .. max 2"),
        (_role(workers_per_node=0), "roles.worker.workers_per_node: 0 is out of range"),
        (_role(workers_per_node=10**9), "out of range"),
        (_role(command=("",)), "the program's name is empty"),
        (_role(command=("a", "b\0")), "NUL"),
        (_role(name="A B"), "is not a role's name"),
        (_with(roles=_role(nodes=Nodes(min=2, max=2, target=2)).roles * 2), "a name is given twice (worker, worker)"),
        (_with(env={"RANK": "1"}), "env.RANK: RANK is reserved"),
        (_with(env={"A=B": "1"}), "is not a variable's name"),
        (_with(env={"A": "x\0"}), "env.A: a NUL character"),
        (_with(working_dir="relative"), "working_dir: 'relative' is not an absolute path"),
        (_with(checkpoint_dir="x"), "checkpoint_dir: 'x' is not an absolute path"),
        (_with(env_file="x\0"), "env_file"),
        (
            _with(env_file="/e\n"),
            "env_file: the path has a character that cannot be printed (U+000A), use a path without",
        ),
        (_with(working_dir="/w\x01"), "working_dir: the path has a character that cannot be printed (U+0001)"),
        (_with(checkpoint_dir="/c\x9b"), "checkpoint_dir: the path has a character that cannot be printed (U+009B)"),
        (
            _with(container=Container(image="/i\u2028", binds=()), fork_server=False),
            "container: the path has a character that cannot be",
        ),
        (
            _with(container=Container(image="t", binds=("/a\u202e:/b",)), fork_server=False),
            "cannot be printed (U+202E)",
        ),
        (_with(user="root"), "user: train1 may not run a job as root"),
        (_with(user="a:b", submitter=ROOT), "is not a user's name"),
        (_with(user="1000", submitter=ROOT), "user: 1000 is a number, and nodes find a user by name, write the login"),
        (_with(limits={"nofiles": 3}), "limits.nofiles: unknown limit"),
        (_with(limits={"nofile": -1}), "limits.nofile: -1 is not a limit"),
        (_with(preload=("os; x",)), "preload: 'os; x' is not a module's name"),
        (_with(hooks=Hooks(pre_start=("", "x"))), "hooks.pre_start: the program's name is empty"),
        (_with(grace=float("nan")), "grace: nan is not a duration"),
        (_with(restarts=RestartLimits.model_construct(window=float("inf"))), "restarts.window: inf is out of range"),
        (_with(restarts=RestartLimits(backoff_min=60.0)), "backoff_min 60 is above backoff_max 30"),
        (_with(env={"A": "x" * 300_000}), "more than 262144"),
        (_with(submitter=TRAIN.model_copy(update={"cwd": "x"})), "submitter.cwd"),
        (_with(submitter=TRAIN.model_copy(update={"environ": {"LD_PRELOAD": "x"}})), "LD_PRELOAD is not recorded"),
    ],
)
def test_a_hand_made_job_is_refused(spec: JobSpec, words: str) -> None:
    (reported,) = check_spec(spec)
    assert words in reported


def test_a_hand_made_job_gets_every_reason() -> None:
    assert len(check_spec(_with(user="root", working_dir="x", preload=("a-b", "c d"), env={"RANK": "1"}))) == 5


def test_root_may_name_anybody() -> None:
    assert check_spec(_with(user="eve", submitter=ROOT)) == []


def test_whose_name_is_a_number_may_submit() -> None:
    """As at sites whose directory has numbers of staff or students as login names."""
    submitter = TRAIN.model_copy(update={"user": "20260117"})
    assert check_spec(_with(user="20260117", submitter=submitter)) == []


def test_unknown_fields_on_the_wire_are_refused() -> None:
    with pytest.raises(ValidationError):
        JobSpec.from_json(_with().to_json().replace('"name"', '"nmae"', 1))


_words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10)
_paths = st.lists(st.text("abc._-", min_size=1, max_size=6), max_size=3).map(lambda parts: "/" + "/".join(parts))
_floats = st.floats(0.001, 3600)
_nodes = st.tuples(*[st.integers(1, 4096)] * 3).map(sorted).map(lambda n: Nodes(min=n[0], target=n[1], max=n[2]))
_specs = st.builds(
    JobSpec,
    name=st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", fullmatch=True),
    roles=st.builds(
        Role,
        name=st.just("worker"),
        command=st.lists(_words, max_size=4).map(lambda rest: ("python", *rest)),
        nodes=_nodes,
        workers_per_node=st.just("gpu") | st.integers(1, 1024),
        gpus_per_worker=st.none() | st.integers(0, 64),
        uneven=st.booleans(),
    ).map(lambda role: (role,)),
    env=st.dictionaries(st.from_regex(r"X_[A-Z0-9_]{0,8}", fullmatch=True), _words, max_size=4),
    env_file=st.none() | _paths,
    working_dir=_paths,
    user=st.just("train1"),
    checkpoint_dir=st.none() | _paths,
    limits=st.dictionaries(
        st.sampled_from(["nofile", "memlock", "core"]), st.just("infinity") | st.integers(0, 2**63 - 1)
    ),
    priority=st.integers(-1000, 1000),
    preload=st.lists(st.sampled_from(["torch", "numpy.linalg"]), max_size=2).map(tuple),
    fork_server=st.booleans(),
    grace=st.floats(0, 3600),
    restarts=st.builds(
        RestartLimits,
        max=st.integers(0, 60),
        window=_floats,
        backoff_min=st.floats(0, 1),
        backoff_max=st.floats(1, 60),
    ),
    policies=st.lists(
        st.builds(
            Policy,
            on=st.just(("WorkerFailed", "NodeLost")),
            exit_code=st.none() | st.integers(1, 255),
            do=st.just("FailJob"),
        ),
        max_size=2,
    ).map(tuple),
    hooks=st.builds(Hooks, pre_start=st.just(()) | st.just(("sync",)), post_stop=st.just(()), timeout=_floats),
    hold_timeout=st.none() | _floats,
    time_limit=st.none() | _floats,
    submitter=st.just(TRAIN)
    | st.just(Submitter(user="train1", uid=7, gid=7, host="h", cwd="/", environ={"PATH": "é"})),
)


@settings(max_examples=150, deadline=None)
@given(_specs)
def test_sound_jobs_go_over_the_wire_unchanged(spec: JobSpec) -> None:
    again = JobSpec.from_json(spec.to_json())
    assert again == spec
    assert check_spec(again) == []
