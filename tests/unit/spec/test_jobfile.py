"""The job file: what it means, and how each mistake is told."""

from __future__ import annotations

import pytest

from nodeagent.model.jobspec import Hang, Hooks, JobSpec, Nodes, Policy, Ready, RestartLimits, Role
from nodeagent.spec.jobcheck import check_spec
from tests.unit.spec.helpers import ROOT, TRAIN, check_marked, job, problems

LEAST = "name: a\ncommand: x\nnodes: 1\n"

CONTRACT = """
name: resnet50                       # unique among live jobs; a second one is refused
command: [python, train.py]          # or roles: {pserver: {...}, trainer: {...}}
nodes: {min: 2, max: 8, target: 4}   # MIN:MAX elastic; or a number: fixed, holds below it
workers_per_node: gpu                # one per installed GPU, or a number
gpus_per_worker: 1
uneven: false
env: {OMP_NUM_THREADS: "4"}
working_dir: /shared/resnet
user: train1
checkpoint_dir: /shared/resnet/ckpt
limits: {memlock: infinity, nofile: 1048576}
priority: 0
preload: [torch]
grace: 30s
restarts: {max: 10, window: 1h, backoff: 0s..30s}
policies:
  - {on: WorkerFailed, exit_code: 3, do: FailJob}
  - {on: [PodFailed, PodEvicted, NodeLost], do: RestartJob}
hooks: {pre_start: [sh, -c, "true"], post_stop: [sync]}
"""


def test_the_contracts_example() -> None:
    assert job(CONTRACT) == JobSpec(
        name="resnet50",
        roles=(Role(command=("python", "train.py"), nodes=Nodes(min=2, max=8, target=4), gpus_per_worker=1),),
        env={"OMP_NUM_THREADS": "4"},
        working_dir="/shared/resnet",
        user="train1",
        checkpoint_dir="/shared/resnet/ckpt",
        limits={"memlock": "infinity", "nofile": 1048576},
        preload=("torch",),
        policies=(
            Policy(on=("WorkerFailed",), exit_code=3, do="FailJob"),
            Policy(on=("PodFailed", "PodEvicted", "NodeLost"), do="RestartJob"),
        ),
        hooks=Hooks(pre_start=("sh", "-c", "true"), post_stop=("sync",)),
        submitter=TRAIN,
    )


def test_the_least() -> None:
    spec = job(LEAST)
    assert spec == JobSpec(
        name="a",
        roles=(Role(command=("x",), nodes=Nodes(min=1, max=1, target=1)),),
        working_dir="/shared/me",
        user="train1",
        submitter=TRAIN,
    )
    assert spec.restarts == RestartLimits()
    assert check_spec(spec) == []


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ("4", (4, 4, 4)),
        ("2:8", (2, 8, 8)),
        ('"2:8"', (2, 8, 8)),
        ("{min: 2, max: 8}", (2, 8, 8)),
        ("{min: 2, max: 8, target: 4}", (2, 4, 8)),
        ("{max: 8}", (1, 8, 8)),
        ("{min: 2}", (2, 2, 2)),
        ("{min: 2, target: 4}", (2, 4, 4)),
        ("{max: 8, target: 4}", (1, 4, 8)),
        ("4096", (4096, 4096, 4096)),
    ],
)
def test_nodes(written: str, sizes: tuple[int, int, int]) -> None:
    nodes = job(f"name: a\ncommand: x\nnodes: {written}").role.nodes
    assert (nodes.min, nodes.target, nodes.max) == sizes


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        ("working_dir: run7", "working_dir", "/shared/me/run7"),
        ("working_dir: ../x/./y", "working_dir", "/shared/x/y"),
        ("working_dir: /a\ncheckpoint_dir: ckpt", "checkpoint_dir", "/a/ckpt"),
        ("checkpoint_dir: ckpt", "checkpoint_dir", "/shared/me/ckpt"),
        ("working_dir: /a\nenv_file: .env", "env_file", "/a/.env"),
        ("fork_server: off", "fork_server", False),
        ("fork_server: on", "fork_server", True),
        ("fork_server: false", "fork_server", False),
        ("grace: 0", "grace", 0.0),
        ("finish: 10m", "finish", 600.0),
        ("finish: off", "finish", None),
        ("grace: 1m30s", "grace", 90.0),
        ("hold_timeout: 10m", "hold_timeout", 600.0),
        ("hold_timeout: never", "hold_timeout", None),
        ("time_limit: 2h", "time_limit", 7200.0),
        ("time_limit: never", "time_limit", None),
        ("time_limit: 3650d", "time_limit", 315_360_000.0),
        ("hang: off", "hang", "off"),
        ("hang: false", "hang", "off"),
        ("hang: auto", "hang", Hang()),
        ("hang: {progress: auto, phases: 1d}", "hang", Hang(phases=86400)),
        ("hang: {progress: 10m}", "hang", Hang(progress=600, phases=7200)),
        ("env: {A: no, B: 010, C: ''}", "env", {"A": "no", "B": "010", "C": ""}),
        ("restarts: {backoff: 5s}", "restarts", RestartLimits(backoff_min=5, backoff_max=5)),
        ("priority: -3", "priority", -3),
        ("limits: {}", "limits", {}),
        ("user: train1", "user", "train1"),
        ('policies: [{on: "*", do: FailJob}]', "policies", (Policy(on=("*",), do="FailJob"),)),
    ],
)
def test_values(lines: str, field: str, value: object) -> None:
    assert getattr(job(LEAST + lines), field) == value


def test_a_command_in_one_line() -> None:
    spec = job("name: a\ncommand: python train.py --name 'a b'\nnodes: 1")
    assert spec.role.command == ("python", "train.py", "--name", "a b")
    assert job("name: a\ncommand: sh -c 'a && b > c'\nnodes: 1").role.command == ("sh", "-c", "a && b > c")


def test_one_role_by_name() -> None:
    role = job("name: a\nroles:\n  trainer: {command: x y, nodes: 2:3, workers_per_node: 4, uneven: true}").role
    assert role == Role(
        name="trainer", command=("x", "y"), nodes=Nodes(min=2, max=3, target=3), workers_per_node=4, uneven=True
    )


def test_each_role_may_be_bound_to_cores() -> None:
    assert job(LEAST).role.numa_binding is None
    assert job(LEAST + "numa_binding: node").role.numa_binding == "node"
    roles = job("name: a\nroles:\n  a: {command: x, nodes: 2, numa_binding: core-complex}\n  b: {command: x, nodes: 1}")
    assert [role.numa_binding for role in roles.roles] == ["core-complex", None]


def test_root_may_submit_for_others() -> None:
    assert job(LEAST + "user: train1", ROOT).user == "train1"
    assert job(LEAST, ROOT).user == "root"


FIVE = """name: ResNet 50
comand: [python, train.py]
command: [python, train.py]
nodes: {min: 8, max: 2}
env: {OMP_NUM_THREADS: 4}
grace: 30 sec
"""


def test_five_mistakes_at_once() -> None:
    found = problems(lambda: job(FIVE))
    assert [str(p) for p in found] == [
        "job.yaml:1:7: name: 'ResNet 50' is not a name, use 1 to 63 of a-z, 0-9, '-' and '.', starting and ending with "
        "a letter or digit, such as 'resnet-50'",
        "job.yaml:2:1: unknown key 'comand', did you mean 'command'?",
        "job.yaml:4:8: nodes: min 8 is above max 2, it must be 1 <= min <= max <= 4096",
        'job.yaml:5:24: env.OMP_NUM_THREADS: 4 is a number, not text, write "4" in quotes',
        "job.yaml:6:8: grace: '30 sec' is not a duration, write 30s",
    ]


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("nodes: >>0", "0 is out of range, write a whole number from 1 to 4096"),
        ("nodes: >>'4'", "write 4 without quotes"),
        ("nodes: >>three", "write 4, 2:8, auto or {min: 2, max: 8, target: 4}"),
        ("nodes: >>1e1", "write 10"),
        ("nodes: >>true", "true is not a whole number"),
        ("nodes: >>8:2", "min 8 is above max 2"),
        ("nodes: >>0:2", "min 0, max 2, it must be 1 <= min"),
        ("nodes: >>{min: 2, max: 4, target: 5}", "target 5 is not within min 2 .. max 4"),
        ("nodes: >>{target: 5}", "neither min nor max is given"),
        ("nodes: {min: >>two, max: >>0.5, >>taget: 3}", "did you mean 'target'?"),
        ("nodes: >>{}", "neither min nor max"),
        ("nodes: >>[2, 8]", "write 4, 2:8"),
        ("command: >>[]", "an empty command, write [python, train.py]"),
        ("command: >>''", "an empty command"),
        ("command: [>>'']", "the program's name is empty"),
        ("command: [python, >>1e-4, --x, >>true, >>null, >>[a]]", 'write "1e-4" in quotes'),
        ("command: >>a && b", "no shell runs this, so '&&' does nothing, write [sh, -c, 'the whole line']"),
        ("command: >>a | b", "so '|'"),
        ("command: >>a 'b", "a quote that is not closed"),
        ("command: >>7", "write [python, train.py]"),
        ('command: [a, >>"b\\0"]', "NUL"),
    ],
)
def test_mistakes_in_nodes_and_command(marked: str, words: str) -> None:
    rest = [line for line in LEAST.splitlines() if not marked.startswith(line.split(":")[0] + ":")]
    check_marked("\n".join([*rest, marked]), job, words)


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("workers_per_node: >>'8'", "write 8 without quotes"),
        ("workers_per_node: >>0", "from 1 to 1024"),
        ("workers_per_node: >>gpus", "write gpu (one worker per GPU) or a number such as 8"),
        ("gpus_per_worker: >>one", "gpus_per_worker: 'one' is not a whole number"),
        ("gpus_per_worker: >>65", "it must be at most 64"),
        (">>maxRetry: 3", "unknown key 'maxRetry', write restarts: {max: N}"),
        ("uneven: >>yes", "write true"),
        ("uneven: >>off", "write false"),
        ("uneven: >>maybe", "write true or false"),
        ("uneven: >>1", "write true"),
        ("numa_binding: >>cores", "write 'node', 'socket', 'exclusive' or 'core-complex'"),
        ("env: {A: >>1.10}", 'env.A: 1.10 is a number, not text, write "1.10" in quotes'),
        ("env: {A: >>true}", 'write "true" in quotes'),
        ("env: {A: >>[x]}", "not text"),
        ("env: {A: >>null}", "not text"),
        ("env: {>>A: }", "'env.A' has no value, write one, or remove the key"),
        ("env: {>>9A: x}", "is not a variable's name"),
        ("env: {>>RANK: '1'}", "RANK is reserved, remove it: nodeagent sets it for each worker"),
        ("env: {>>CUDA_VISIBLE_DEVICES: '0'}", "use gpus_per_worker"),
        ("env: {>>NODEAGENT_JOB: x}", "NODEAGENT_ are nodeagent's own"),
        ("env: {A: b, >>A: c}", "given twice"),
        ("env: >>[A=b]", "env: a list is not a mapping"),
        ("env_file: >>~/secrets", "nothing replaces '~'"),
        ("working_dir: >>$HOME/x", "nothing replaces '$'"),
        ("working_dir: >>''", "an empty text"),
        ("checkpoint_dir: >>7", "7 is not text"),
        ("user: >>root", "train1 may not run a job as root, remove the key, or have root submit it"),
        ("user: >>eve", "have eve or root submit it"),
        ("user: >>a b", "is not a user's name"),
        ("user: >>1000", "1000 is not a user's name, write the login name"),
        ("user: >>'1000'", "1000 is a number, and nodes find a user by name, write the login name, such as train1"),
        ("limits: {>>memlok: 1}", "did you mean 'memlock'?"),
        ("limits: {>>RLIMIT_NOFILE: 1}", "did you mean 'nofile'?"),
        ("limits: {nofile: >>unlimited}", "write infinity"),
        ("limits: {nofile: >>-1}", "write infinity"),
        ("limits: {nofile: >>64k}", "write a whole number such as 1048576, or infinity"),
        ("priority: >>010", "'010' is not a whole number, write 10"),
        ("priority: >>1001", "at most 1000"),
        ("preload: >>torch", "write [torch]"),
        ("preload: [torch, >>a-b, >>1]", "write it as after 'import'"),
        ("fork_server: >>maybe", "write on or off"),
        ("grace: >>'30'", "write 30s for seconds"),
        ("finish: >>0s", "it must be at least 1s and at most 604800s, or off"),
        ("grace: >>2d", "it must be at least 0s and at most 3600s"),
        ("hold_timeout: >>0", "it must be above 0s"),
        ("time_limit: >>0", "it must be above 0s"),
        ("time_limit: >>999999999999d", "it must be at most 3650d"),
        ("hang: >>10m", "write hang: {progress: 10m}"),
        ("hang: >>on", "write hang: {progress: 10m}, hang: auto or hang: off"),
        ("hang: >>true", "true does not say when a job hangs"),
        ("hang: {progress: >>0.5s}", "it must be at least 1s"),
        ("hang: {progress: >>soon}", "write for instance 500ms, 30s, 10m or 1h30m"),
        ("hang: {progress: 1m, phases: >>0}", "it must be at least 1s"),
        ("hang: {progress: 1m, >>phase: 1h}", "did you mean 'phases'?"),
        ("hang: >>{phases: 1h}", "the key 'progress' is missing in hang, add progress: 10m"),
        ("restarts: >>3", "restarts: 3 is not a mapping"),
        ("restarts: {max: >>-1, window: >>0s, backoff: >>30s..0s}", "write the shorter one first: 0s..30s"),
        ("restarts: {>>maximum: 3}", "unknown key 'maximum' in restarts, did you mean 'max'?"),
        ("policies: >>{on: WorkerFailed}", "policies: a mapping is not a list"),
        ("policies: [>>{on: WorkerFailed}]", "the key 'do' is missing in policies[0], add do: RestartJob"),
        ("policies:\n  - {on: >>WorkerFail, do: >>Fail}", "did you mean 'WorkerFailed'?"),
        ("policies:\n  - {on: [PodFailed, >>x], do: FailJob}", "events are WorkerFailed, WorkerHung"),
        ("policies:\n  - {on: NodeLost, do: >>Abort}", "'Abort' is not an action, did you mean 'AbortJob'?"),
        ("policies:\n  - {on: NodeLost, do: >>ResumeJob}", "goes on by itself, and one that was paused when somebody"),
        ("policies:\n  - {on: NodeLost, exit_code: >>3, do: FailJob}", "this never matches"),
        ("policies:\n  - {on: WorkerFailed, exit_code: >>256, do: FailJob}", "at most 255"),
        ("policies:\n  - {on: WorkerFailed, do: FailJob, >>exitcode: 3}", "did you mean 'exit_code'?"),
        ("hooks: {pre_start: >>a && b, timeout: >>2h}", "at most 3600s"),
        ("hooks: {>>prestart: x}", "did you mean 'pre_start'?"),
        (">>grace:", "'grace' has no value, write one, or remove the key"),
        (">>hang_timeout: 3", "unknown key 'hang_timeout', did you mean"),
        (">>zzz: 3", "unknown key 'zzz', known here are"),
    ],
)
def test_mistakes(marked: str, words: str) -> None:
    check_marked(LEAST + marked, job, words)


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        (">>", "the file is empty, write keys such as name, command, nodes"),
        (">>- a", "does not hold 'key: value' lines"),
        (">>command: x\nnodes: 1", "the key 'name' is missing, add name: resnet50"),
        (">>name: a\nnodes: 1", "the key 'command' is missing, add command: [python, train.py]"),
        (">>name: a\ncommand: x", "the key 'nodes' is missing, add nodes: 1 (fixed) or nodes: 2:8 (elastic)"),
        (">>name: a\nroles: ~\nnodes: 1", "the key 'command' is missing"),
        ("name: >>Foo Bar!\ncommand: x\nnodes: 1", "such as 'foo-bar'"),
        *(
            (
                f"name: >>{text}\ncommand: x\nnodes: 1",
                f"{shown} is not a name, YAML reads it as {kind}: put it in quotes",
            )
            for text, shown, kind in (
                ("5", "5", "a number"),
                ("1e3", "1000.0", "a number"),
                ("true", "true", "a truth value"),
            )
        ),
        ("name: a\n>>nodes: 1\nroles: {w: {command: x, nodes: 1}}", "move it into the role: roles.NAME.nodes"),
        ("name: a\nroles: >>{}", "no role is given"),
        ("name: a\nroles: {b: {command: x, nodes: 1, >>minAvailable: 3}}", "in roles.b, write nodes: MIN:MAX"),
        ("name: a\nroles: >>x", "is not a mapping"),
        ("name: a\nroles:\n  >>B b: {command: x, nodes: 1}", "is not a role's name"),
        ("name: a\nroles:\n  b: >>{command: x}", "the key 'nodes' is missing in roles.b, add nodes: 2"),
        ("name: a\nroles:\n  b: {command: x, nodes: >>x, >>uneve: true}", "roles.b.nodes: 'x'"),
        ("name: a\nroles: {b: {command: x, nodes: >>null}}", "roles.b.nodes: null is no size, write nodes: 2"),
        (
            "name: a\nroles: {b: {command: x, replicas: >>null}, c: {command: y, nodes: 1}}",
            "roles.b.replicas: null is no size, write nodes: 2",
        ),
        ("name: a\nroles:\n  b:\n    command: x\n    >>nodes:", "'roles.b.nodes' has no value"),
        ("name: a\nroles: {b: {command: x, nodes: 1, after: >>[[x]]}}", "roles.b.after: a list is not a role's name"),
    ],
)
def test_mistakes_of_the_whole(marked: str, words: str) -> None:
    check_marked(marked, job, words)


@pytest.mark.parametrize("key", ["working_dir", "checkpoint_dir", "env_file"])
def test_a_path_that_cannot_be_printed_is_a_mistake(key: str) -> None:
    words = f"{key}: the path has a character that cannot be printed (U+001B), use a path without such characters"
    check_marked(LEAST + f'{key}: >>"/a/\\x1b[2Jb"', job, words)


def test_a_path_may_have_letters_and_spaces_of_any_language() -> None:
    assert job(LEAST + "working_dir: /Zürich/資料\u3000a/\u00a0x").working_dir == "/Zürich/資料\u3000a/\u00a0x"


def test_a_submitter_without_a_folder_is_reported() -> None:
    (found,) = problems(lambda: job(LEAST + "working_dir: /x", TRAIN.model_copy(update={"cwd": "nowhere"})))
    assert "submitter.cwd: 'nowhere' is not an absolute path" in str(found)


ROLES = """
name: ctr
completes: trainer
env: {A: "1"}
roles:
  pserver: {command: [python, s.py], replicas: 2, workers_per_node: 1, env: {B: "2"}}
  trainer: {command: [python, t.py], nodes: 3}
"""


def test_several_roles() -> None:
    spec = job(ROLES)
    server, trainer = spec.roles
    assert (server.places, server.nodes, server.replicas) == (
        2, Nodes(min=1, max=2, target=2), Nodes(min=2, max=2, target=2),
    )  # fmt: skip
    assert (server.env, trainer.env, spec.completes) == ({"B": "2"}, {}, "trainer")
    assert (trainer.places, trainer.replicas) == (3, None)
    assert spec.nodes == Nodes(min=3, max=5, target=5)
    assert check_spec(spec) == []


def test_roles_one_after_another() -> None:
    written = ROLES.replace("replicas: 2,", "replicas: 2, ready: {port: true},").replace(
        "nodes: 3", "nodes: 3, after: pserver"
    )
    server, trainer = job(written).roles
    assert (server.ready, trainer.after, trainer.ready) == (Ready(port=True), ("pserver",), None)
    assert job(written).ordered and not job(ROLES).ordered
    command = job(written.replace("{port: true}", "{command: test -e x}")).roles[0].ready
    assert command == Ready(command=("test", "-e", "x"))


CIRCLE = """\
name: a
roles:
  a: {command: x, nodes: 1, after: >>[b]}
  b: {command: x, nodes: 1, after: [c]}
  c: {command: x, nodes: 1, after: [a]}
  d: {command: x, nodes: 1, after: >>d}
  e: {command: x, nodes: 1, after: [>>f], ready: >>{}}
"""


def test_mistakes_of_the_order_of_roles() -> None:
    check_marked(
        CIRCLE.replace(">>f", "f").replace("[f]", ">>[f]"),
        job,
        "roles.a.after: a after b after c after a: none of them could start",
        "roles.d.after: d after d",
        "roles.e.after: there is no role 'f'",
        "roles.e.ready: give either port or command",
    )


def test_a_port_that_is_to_be_ready_is_given_by_nodeagent() -> None:
    check_marked(
        "name: a\nroles:\n  s: {command: x, nodes: 1, ready: {port: >>70000}}\n  t: {command: x, nodes: 1}\n",
        job,
        "70000 is not known here, write true",
    )


FIVE_MISTAKES = """\
name: ctr
completes: >>trainers
roles:
  pserver: {command: x, nodes: 2, replicas: >>2}
  trainer: {command: x, nodes: >>auto, uneven: >>true}
  chief: >>{command: x}
"""


def test_elastic_roles_beside_others() -> None:
    """As ``nodes`` of a job of one role; and so may replicas."""
    spec = job(ROLES.replace("replicas: 2", "replicas: 1:4").replace("nodes: 3", "nodes: {min: 2, max: 8, target: 3}"))
    server, trainer = spec.roles
    assert (server.least, server.places, server.size.max, server.nodes) == (1, 4, 4, Nodes(min=1, max=4, target=4))
    assert (trainer.least, trainer.places, trainer.size.max) == (2, 3, 8)
    assert (spec.nodes, check_spec(spec)) == (Nodes(min=2, max=7, target=7), [])
    sized = spec.of_sizes({"trainer": 6})
    assert sized.roles[1].size == Nodes(min=2, max=8, target=6)
    assert spec.of_sizes({"trainer": 6}, "trainer").roles[1].least == 6


def test_five_mistakes_of_roles_are_named_at_once() -> None:
    check_marked(
        FIVE_MISTAKES,
        job,
        "there is no role 'trainers', did you mean 'trainer'?",
        "roles.pserver.replicas: replicas stands beside nodes, keep one of them",
        "roles.trainer.nodes: auto borrows idle nodes, which a role beside others cannot, write how many",
        "roles.trainer.uneven: a role beside others cannot be uneven yet",
        "the key 'nodes' is missing in roles.chief",
    )


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("name: a\ncompletes: >>w\nroles: {w: {command: x, nodes: 1}}", "completes is for jobs of several roles"),
        ("name: a\nroles: {w: {command: x, replicas: >>2}}", "replicas is for jobs of several roles"),
        (
            "name: a\nroles: {w: {command: x, nodes: 1, restart: >>alone}}",
            "alone is for jobs of several roles",
        ),
        ("name: a\nroles: {w: {command: x, nodes: 1, restart: >>never}}", "roles.w.restart"),
        ("name: a\nroles: {w: {command: x, replicas: >>0}, v: {command: x, nodes: 1}}", "0 is out of range"),
        ("name: a\nroles: {w: {command: x, replicas: >>auto}, v: {command: x, nodes: 1}}", "auto borrows idle nodes"),
        ("name: a\nroles: {w: {command: x, replicas: >>4:2}, v: {command: x, nodes: 1}}", "min 4 is above max 2"),
        ("name: a\nroles: {w: {command: x, nodes: 1, env: {>>RANK: x}}}", "RANK is reserved"),
    ],
)
def test_a_mistake_of_a_role(text: str, reported: str) -> None:
    check_marked(text, job, reported)


POLICY_MISTAKES = """\
name: a
array: 0-9%2
policies:
  - {on: >>PodPending, do: AbortJob, timeout: 10m}
  - {on: >>PodRunning, do: TerminateJob}
  - {on: TaskCompleted, do: CompleteJob, timeout: >>5m}
  - {on: [WorkerFailed, NodeLost], do: RestartJob, timeout: >>5m}
  - {on: NodeLost, do: >>CompleteJob, timeout: 5m}
  - {on: Unknown, do: >>RestartJob, timeout: 5m}
  - {on: PodEvicted, exit_code: >>3, do: FailJob}
  - {on: >>PodGone, do: >>Restart, timeout: >>never}
roles:
  pserver: {command: x, nodes: 1, policies: [{on: Unknown, do: >>CompleteJob, timeout: 1m}]}
  trainer: {command: x, nodes: 1, policies: [{on: TaskCompleted, do: >>RestartJob}, {on: "*", do: >>ResumeJob}]}
"""


def test_all_mistakes_of_all_policies_are_named_at_once() -> None:
    check_marked(
        POLICY_MISTAKES,
        job,
        "policies[0].on: PodPending does not count while a member of an array waits for its turn",
        "policies[1].on: PodRunning is what each job is in for a while, add a timeout, such as 10m",
        "policies[2].timeout: TaskCompleted is acted on at once, remove it",
        "policies[3].timeout: RestartJob for WorkerFailed and NodeLost is not waited with",
        "policies[4].do: CompleteJob for NodeLost after a timeout would complete a job that does not run",
        "policies[5].do: RestartJob has no meaning for Unknown",
        "policies[6].exit_code: PodEvicted have no exit code, so this never matches",
        "policies[7].on: 'PodGone' is not an event",
        "policies[7].do: 'Restart' is not an action, did you mean 'RestartPod'?",
        "policies[7].timeout: 'never' is not a duration",
        "roles.pserver.policies[0].do: CompleteJob for Unknown after a timeout would complete a job that does not run",
        "roles.trainer.policies[0].do: RestartJob has no meaning for TaskCompleted",
        "roles.trainer.policies[1].do: ResumeJob has no meaning here",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            LEAST + "policies: [{on: WorkerFailed, do: >>RestartPod}]",
            "starts a part of the gang again while the rest goes",
        ),
        (
            "name: a\nroles: {w: {command: x, nodes: 1, policies: [{on: WorkerFailed, do: >>RestartTask}]}}",
            "roles.w.policies[0].do: RestartTask starts a part of the gang again",
        ),
        (
            "name: a\nroles:\n  w: {command: x, nodes: 1, policies: [{on: [WorkerFailed, NodeLost], do: >>RestartPod}]}"
            "\n  v: {command: x, nodes: 1}",
            "RestartPod is for WorkerFailed: NodeLost takes the gang along, write RestartJob",
        ),
        (
            "name: a\nroles:\n  w: {command: x, nodes: 1, policies: [{on: WorkerFailed, do: RestartPod, timeout: >>1}]}"
            "\n  v: {command: x, nodes: 1}",
            "RestartPod is not waited with",
        ),
    ],
)
def test_only_a_service_beside_others_is_started_again_in_part(text: str, expected: str) -> None:
    check_marked(text, job, expected)


def test_a_role_has_a_grace_of_its_own_or_the_jobs() -> None:
    spec = job(ROLES.replace("pserver: {", "pserver: {grace: 5s, ", 1) + "grace: 20s\n")
    assert (spec.graces(), spec.longest_grace) == ((20, {"pserver": 5}), 20)
    assert spec.graces(["pserver"]) == (5, {})
    assert spec.graces(asked=9) == (9, {"pserver": 5})
    assert spec.graces(asked=3) == (3, {})
    check_marked(ROLES.replace("pserver: {", "pserver: {grace: >>never, ", 1), job, "roles.pserver.grace")


def test_what_is_started_again_when_a_worker_fails() -> None:
    rules = (
        "[{on: NodeLost, do: FailJob}, {on: WorkerFailed, exit_code: 3, do: RestartJob}, "
        "{on: WorkerFailed, exit_code: 4, do: RestartPod}, {on: WorkerFailed, exit_code: 5, do: FailJob}]"
    )
    spec = job(ROLES.replace("pserver: {", f"pserver: {{restart: alone, policies: {rules}, ", 1))
    assert spec.roles[0].alone == ((3, "gang"), (4, "place"), (None, "worker"))
    assert spec.roles[1].alone == ((None, "gang"),)
    rules = "[{on: WorkerFailed, exit_code: 4, do: RestartPod}, {on: WorkerFailed, do: RestartTask}]"
    whole = job(ROLES.replace("pserver: {", f"pserver: {{policies: {rules}, ", 1)).roles[0]
    assert whole.places > 1 and whole.alone == ((4, "place"), (None, "role"), (None, "gang"))


def test_a_job_written_by_hand_has_its_policies_checked_too() -> None:
    sound = job(LEAST + "policies: [{on: PodPending, do: AbortJob, timeout: 10m}]\n")
    assert (check_spec(sound), sound.policies[0].timeout) == ([], 600)
    wrong = sound.model_copy(update={"policies": (sound.policies[0].model_copy(update={"timeout": None}),)})
    assert check_spec(wrong) == [
        "policies[0].on: PodPending is what each job is in for a while, add a timeout, such as 10m"
    ]


def test_a_role_has_policies_of_its_own_or_the_jobs() -> None:
    text = ROLES.replace("pserver: {", "pserver: {policies: [{on: WorkerFailed, exit_code: 3, do: FailJob}], ", 1)
    assert text != ROLES
    spec = job(text + "policies: [{on: '*', do: RestartJob}]\n")
    assert [policy.exit_code for (policy,) in spec.policies_of(["pserver"])] == [3]
    assert spec.policies_of(["trainer"]) == spec.policies_of([]) == (spec.policies,)
    assert spec.policies_of(["trainer", "pserver"]) == (*spec.policies_of(["pserver"]), spec.policies)
    none = job(ROLES.replace("pserver: {", "pserver: {policies: [], ", 1) + "policies: [{on: '*', do: FailJob}]\n")
    assert none.policies_of(["pserver"]) == ((),)


def test_a_hand_made_job_of_roles() -> None:
    spec = job(ROLES)
    elastic = spec.roles[1].model_copy(update={"nodes": Nodes(min=1, max=2, target=2, auto=True), "uneven": True})
    server = spec.roles[0].model_copy(update={"ready": Ready(), "after": ("nobody",)})
    wrong = spec.model_copy(update={"roles": (server, elastic), "completes": "nobody"})
    assert [text.partition(":")[0] for text in check_spec(wrong)] == [
        "roles.pserver.ready", "roles.trainer.nodes", "roles.trainer.uneven", "roles.pserver.after", "completes",
    ]  # fmt: skip


def test_mindspores_scheduler_is_added_as_a_role() -> None:
    spec = job("name: a\ncommand: python t.py\nnodes: 2\nworkers_per_node: 8\nscheduler: mindspore")
    assert [role.name for role in spec.roles] == ["worker", "scheduler"]
    workers, scheduler = spec.roles
    assert (spec.completes, scheduler.command) == ("worker", workers.command)
    assert (scheduler.places, scheduler.workers_per_node, scheduler.gpus_per_worker) == (1, 1, 0)
    assert check_spec(spec) == []
    roles = "roles:\n  t: {command: x, nodes: 2}\n  e: {command: y, nodes: 1}\n"
    text = f"name: a\nscheduler: mindspore\ncompletes: t\n{roles}"
    assert [(role.name, role.command[0]) for role in job(text).roles] == [("t", "x"), ("e", "y"), ("scheduler", "x")]
    assert job(text.replace("  e: {command: y, nodes: 1}\n", "")).completes == "t"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "command: x\nnodes: >>auto\nscheduler: mindspore",
            "auto borrows idle nodes, which a role beside others cannot",
        ),
        ("command: x\nnodes: 2\nscheduler: >>mpi", "mindspore"),
        ("scheduler: >>mindspore\nroles: {scheduler: {command: x, nodes: 1}}", "there is a role of this name already"),
    ],
)
def test_mistakes_about_a_scheduler(text: str, says: str) -> None:
    check_marked(f"name: a\n{text}", job, says)
