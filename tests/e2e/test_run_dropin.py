"""``nodeagentctl run`` in torchrun's place: scripts that never heard of nodeagent see the same, and end the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import CALL_LIMIT, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(480)]
NODES = 2

SEEN = """
import json, os, sys
seen = {"env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "stdin": sys.stdin.read()}
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "gradient", model.module.weight.grad[0, 0].item(), flush=True)
dist.destroy_process_group()
"""
ARGUMENTS = ("--lr", "0.1", "two words", "--nodes", "9", "")
SAME = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "PATH", "HOME",
)  # fmt: skip
"""Variables whose values are torchrun's, on one node."""
OF_THE_LAUNCHER = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What torchrun tells itself through its own environment, where workers happen to see it."""

Seen = dict[str, Any]


@pytest.fixture
def shell(calm: Cluster) -> Iterator[Cluster]:
    """The module's cluster, as from a shell in which ``python`` is this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {k: v for k, v in calm.environ.items() if k not in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")}
    yield replace(calm, environ=environ | {"PATH": path})


def take_seen(folder: Path) -> list[Seen]:
    """What each rank saw, by rank."""
    files = sorted(folder.glob("seen-*.json"))
    seen: list[Seen] = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    assert [int(s["env"]["RANK"]) for s in seen] == list(range(len(seen)))
    return seen


def torchrun(shell: Cluster, *words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    subprocess.run(
        command, env=shell.environ, cwd=shell.work, stdin=subprocess.DEVNULL, check=True, capture_output=True,
        timeout=CALL_LIMIT,
    )  # fmt: skip


def ranks(seen: list[Seen], name: str) -> list[int]:
    return [int(s["env"][name]) for s in seen]


@pytest.mark.torch
def test_the_same_variables_and_arguments_as_under_torchrun(shell: Cluster) -> None:
    (shell.work / "seen.py").write_text(SEEN)
    (shell.work / "train.py").write_text(SEEN + ALL_REDUCE)
    torchrun(shell, "--nproc-per-node", "2", "--max-restarts", "3", "seen.py", *ARGUMENTS)
    theirs = take_seen(shell.work)
    one_node = ("run", "--nodes", "1", "--nproc-per-node", "2", "--max-restarts", "3")
    shell.ctl(*one_node, "--", "python", "seen.py", *ARGUMENTS)
    ours = take_seen(shell.work)
    words = ("run", "--local", "2", "--nproc-per-node", "2", "--", "python", "train.py", *ARGUMENTS)
    done = shell.ctl(*words, limit=240)  # a cluster, and torch in four workers
    four = take_seen(shell.work)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>: sum 10.0 gradient 1.5" for rank in range(4)]

    added = set(theirs[0]["env"]) - set(shell.environ) - OF_THE_LAUNCHER
    assert {"RANK", "TORCHELASTIC_ERROR_FILE"} <= added
    for mine in (*ours, *four):
        assert added <= set(mine["env"])
        assert (mine["argv"][1:], mine["cwd"], mine["stdin"]) == (list(ARGUMENTS), str(shell.work), "")
    for rank in (0, 1):
        assert values(ours[rank]["env"]) == values(theirs[rank]["env"])
        assert (theirs[rank]["argv"], theirs[rank]["cwd"]) == (ours[rank]["argv"], ours[rank]["cwd"])

    # Two nodes of two workers: what torchrun's documentation says of each variable.
    assert ranks(four, "RANK") == ranks(four, "ROLE_RANK") == [0, 1, 2, 3]
    assert ranks(four, "LOCAL_RANK") == [0, 1, 0, 1]
    assert ranks(four, "GROUP_RANK") == [0, 0, 1, 1]
    assert {(e["WORLD_SIZE"], e["ROLE_WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["GROUP_WORLD_SIZE"])
            for e in (s["env"] for s in four)} == {("4", "4", "2", "2")}  # fmt: skip
    for common in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ROLE_NAME"):
        assert len({s["env"][common] for s in four}) == 1, common
    assert len({s["env"]["TORCHELASTIC_ERROR_FILE"] for s in four}) == 4
    assert {s["env"]["NODEAGENT_NODE"] for s in four} == {"n1", "n2"}


def values(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in SAME}


@pytest.mark.parametrize("code", [0, 7, 255])
def test_the_exit_code_is_the_jobs(shell: Cluster, code: int) -> None:
    script = f"import os, sys, time; time.sleep(0.2); sys.exit({code} if os.environ['RANK'] == '1' else 0)"
    done = shell.ctl("run", "--nodes", "2", "--nproc-per-node", "1", "--", "python", "-c", script, check=code)
    assert f"exit code {code}" in done.stderr if code else "succeeded" in done.stderr


def test_a_signal_is_128_more_and_the_restart_budget_counts(shell: Cluster) -> None:
    script = (
        "import os, signal; open('starts', 'a').write(os.environ['TORCHELASTIC_RESTART_COUNT'] + ' ');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = ("run", "--nodes", "1", "--nproc-per-node", "1", "--max-restarts", "2", "--", "python", "-c", script)
    done = shell.ctl(*words, check=128 + 9)
    assert (shell.work / "starts").read_text() == "0 1 2 "
    assert "SIGKILL" in done.stderr


def test_what_was_printed_before_a_kill_is_not_lost(shell: Cluster) -> None:
    """The script never flushes: it is not for the interpreter to keep lines back."""
    (shell.work / "killed.py").write_text(
        "import os\nfor n in range(3): print('line', n)\nprint('half a line', end='')\nos.kill(os.getpid(), 9)"
    )
    words = ("run", "--nodes", "1", "--nproc-per-node", "1", "--max-restarts", "0", "--", "python", "killed.py")
    done = shell.ctl(*words, check=128 + 9)
    assert done.stdout.splitlines() == [
        f"[0]<stdout>: {text}" for text in ("line 0", "line 1", "line 2", "half a line")
    ]


def test_output_name_and_variables(shell: Cluster) -> None:
    script = "import os, sys; print(os.environ['MINE'], os.environ['RANK']); sys.stderr.write('no end of line')"
    done = shell.ctl(
        "run", "--nodes", "2", "--nproc-per-node", "1", "--name", "mine", "--env", "MINE=a=b c", "--", "python", "-c",
        script,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>: a=b c 0", "[1]<stdout>: a=b c 1"]
    theirs = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert sorted(theirs) == ["[0]<stderr>: no end of line", "[1]<stderr>: no end of line"]
    others = set(done.stderr.splitlines()) - set(theirs)
    assert all(line.startswith("nodeagentctl: ") for line in others), done.stderr
    assert shell.job("mine")["phase"] == "succeeded"


@pytest.mark.slow
def test_a_flood_of_output_is_neither_lost_nor_mixed(shell: Cluster) -> None:
    lines, width = 8000, 1200
    script = (
        f"import os; r = os.environ['RANK']\n"
        f"for n in range({lines}): print(r, n, 'x' * {width})\n"
        f"print(r, 'one long line', 'y' * 2**20)\nprint(r, 'last')"
    )
    done = shell.ctl("run", "--nodes", "2", "--nproc-per-node", "1", "--", "python", "-c", script)
    assert len(done.stdout) > 2 * lines * width
    for rank in ("0", "1"):
        begin = f"[{rank}]<stdout>: "
        mine = [x.removeprefix(begin) for x in done.stdout.splitlines() if x.startswith(begin)]
        # If a worker got no CPU time within a line, the other's line came in between: its rest stands by itself.
        assert "".join(mine) == (
            "".join(f"{rank} {n} {'x' * width}" for n in range(lines))
            + f"{rank} one long line {'y' * 2**20}{rank} last"
        )
