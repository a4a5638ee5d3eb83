"""``nodeagent-run`` beside torchrun: the same line, given to both, has the same workers, console and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import CALL_LIMIT, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.torch, pytest.mark.timeout(300)]
NODES = 1
NOTHING: Mapping[str, str] = {}

THEIRS = ("-m", "torch.distributed.run")
OURS = ("-c", "from nodeagent.ctl.main import run_main; run_main()")
SAME = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "PATH", "HOME", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
SEEN = f"""
import json, os, sys
env = {{name: os.environ.get(name) for name in {SAME!r}}}
seen = env, sys.argv, os.getcwd(), sys.executable, sys.stdout.write_through, sys.path[0], __name__
with open(f"seen-{{os.environ['RANK']}}.json", "w") as file:
    json.dump(seen, file)
"""
TALK = """
import os
rank = os.environ["RANK"]
for fd, text in ((1, "out"), (1, "loss"), (2, "error")):
    os.write(fd, f"{text} {rank}\\n".encode())
os.write(1, b"unfinished")
"""
RECORDED = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("the data is bad")
    time.sleep(60)
main()
"""


@pytest.fixture
def shell(calm: Cluster) -> Iterator[Cluster]:
    """The module's cluster, as from a shell that sets none of what torchrun sets."""
    ours = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_ERROR_FILE")
    environ = {k: v for k, v in calm.environ.items() if k not in ours and not k.startswith("PET_")}
    for name, text in (("seen.py", SEEN), ("talk.py", TALK), ("recorded.py", RECORDED)):
        (calm.work / name).write_text(text)
    yield replace(calm, environ=environ)


def give(
    shell: Cluster, launcher: tuple[str, ...], *words: str, check: int = 0, environ: Mapping[str, str] = NOTHING
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *launcher, *words], env=shell.environ | dict(environ), cwd=shell.work,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_LIMIT,
    )  # fmt: skip
    assert done.returncode == check, done.stderr
    return done


def take_seen(folder: Path) -> list[Any]:
    files = sorted(folder.glob("seen-*.json"))
    seen = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return seen


LINES = [
    (("--nproc-per-node", "2", "--max_restarts=3", "--role", "trainer", "seen.py", "--lr", "0.1", "--nnodes", ""), {}),
    (("--standalone", "--nproc_per_node", "1", "-m", "seen", "-m", "x"), {}),
    (("--virtual-local-rank", "--no-python", sys.executable, "-u", "seen.py"), {"PET_NPROC_PER_NODE": "2"}),
    (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "seen.py"), {}),
    (("--standalone", "--nproc-per-node", "2", "seen.py"), {"OMP_NUM_THREADS": "3"}),
]


@pytest.mark.parametrize(("words", "environ"), LINES, ids=["role", "module", "virtual", "rendezvous", "threads"])
def test_the_same_workers(shell: Cluster, words: tuple[str, ...], environ: dict[str, str]) -> None:
    give(shell, THEIRS, *words, environ=environ)
    theirs = take_seen(shell.work)
    done = give(shell, OURS, *words, environ=environ)
    ours = take_seen(shell.work)
    assert theirs
    if "--virtual-local-rank" in words:  # torchrun names GPUs even where there are none
        for seen in (*theirs, *ours):
            del seen[0]["CUDA_VISIBLE_DEVICES"]
    assert ours == theirs
    assert done.stdout == ""
    assert done.stderr.count("not needed here: ") == ("--rdzv-backend=c10d" in words)


def test_the_interpreter_that_is_named(shell: Cluster) -> None:
    other = shell.work / "python"
    other.symlink_to(sys.executable)
    for launcher in (THEIRS, OURS):
        give(shell, launcher, "seen.py", environ={"PYTHON_EXEC": str(other)})
        assert [seen[3] for seen in take_seen(shell.work)] == [str(other)]


def files(folder: Path) -> dict[str, str]:
    """What was logged, without the name of the run's own folder."""
    found = {str(path.relative_to(folder)).partition("/")[2]: path.read_text() for path in folder.rglob("*.log")}
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("-r", "3"),
        ("-t", "3"),
        ("-r", "0:1,1:2"),
        ("--tee", "0:1,1:2", "--redirects", "3"),
        ("--tee=3", "--local-ranks-filter=1", "--duplicate-stdout-filters", "loss,none"),
        ("--local_ranks_filter", "0"),
    ],
    ids=" ".join,
)
def test_the_same_console_and_files(shell: Cluster, words: tuple[str, ...]) -> None:
    output, kept = [], []
    for launcher, name in ((THEIRS, "theirs"), (OURS, "ours")):
        folder = shell.work / f"{name}-{'-'.join(words).replace('/', '')}"
        done = give(
            shell, launcher, "--standalone", "--nproc-per-node", "2", *words, "--log-dir", str(folder), "talk.py"
        )
        texts = (
            sorted(re.findall(r"(\[default\d\]:)?(out \d|loss \d|error \d)", text))
            for text in (done.stdout, done.stderr)
        )
        output.append([*texts, done.stdout.count("unfinished")])
        kept.append(files(folder))
    assert output[1] == output[0]
    assert kept[1] == kept[0]


def test_a_recorded_error_is_shown_as_the_cause(shell: Cluster) -> None:
    theirs = give(shell, THEIRS, "--nproc-per-node", "2", "recorded.py", check=1)
    ours = give(shell, OURS, "--nproc-per-node", "2", "recorded.py", check=1)
    for output in (theirs.stderr, ours.stderr):
        assert "ValueError: the data is bad" in output
    cause = ours.stderr[ours.stderr.index("Blamed for the end of generation 1") :]
    assert "rank 1 on n1 failed first: exit code 1" in cause
    assert 'raise ValueError("the data is bad")' in cause


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_the_exit_code_is_the_scripts(shell: Cluster, end: str, code: int) -> None:
    (shell.work / "end.py").write_text(f"import os, sys\nopen('starts', 'a').write('x')\n{end}")
    (shell.work / "starts").unlink(missing_ok=True)
    give(shell, OURS, "--max-restarts", "1", "end.py", check=code)
    assert (shell.work / "starts").read_text() == ("xx" if code else "x")


def test_without_a_budget_the_first_failure_ends_it(shell: Cluster) -> None:
    (shell.work / "end.py").write_text("import os, sys; open('once', 'a').write('x'); sys.exit(3)")
    give(shell, OURS, "end.py", check=3)
    assert (shell.work / "once").read_text() == "x"


@pytest.mark.parametrize("words", [(), ("--no-fork-server",)], ids=["fork_server", "plain"])
def test_a_worker_that_cannot_be_bound_to_cores_says_so_and_runs(shell: Cluster, words: tuple[str, ...]) -> None:
    done = give(shell, OURS, "--numa-binding", "node", *words, "talk.py")
    assert "nodeagent: this worker is not bound to cores (node): it has no GPU\n" in done.stderr
    assert "out 0\n" in done.stdout


def test_a_terminated_launcher_gives_the_workers_its_grace(shell: Cluster) -> None:
    """As under torchrun: they have the signal, may save, and are killed when the time is over."""
    (shell.work / "stubborn.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open('told', 'a').write(os.environ['RANK']))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    command = [sys.executable, *OURS, "--shutdown-timeout", "1", "--signals-to-handle", "SIGUSR2", "stubborn.py"]
    with subprocess.Popen(
        command, env=shell.environ, cwd=shell.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        os.kill(launcher.pid, 12)
        _, output = launcher.communicate(timeout=CALL_LIMIT)
    assert launcher.returncode == 128 + 12, output
    assert set((shell.work / "told").read_text()) == {"0"}
