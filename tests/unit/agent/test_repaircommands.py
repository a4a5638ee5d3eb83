"""The commands that repair and verify, with real processes: words, environment, deadline, what is kept of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from nodeagent.agent.repaircommands import FAILED, MOST_OUTPUTS, Commands, failed_checks, filled
from nodeagent.model.health import Attempt, Kind
from nodeagent.osutil.linux import is_running, start_time
from nodeagent.spec.healthconfig import RepairConfig
from tests.descriptors import few_files

ENVIRON = {"PATH": os.environ["PATH"], "HOME": "/root", "NODEAGENT__REDIS__URL": "redis://:secret@r/0"}


def commands(folder: Path, **keys: object) -> Commands:
    return Commands(RepairConfig.model_validate(keys), "n1", folder / "out", ENVIRON)


def attempt(kind: Kind = "reboot", device: str = "", pid: int = 0, start: int = 0) -> Attempt:
    return Attempt(
        kind=kind, rule="xid.79", device=device, whole=not device, at=0.0, boot="b", pid=pid, start=start
    )  # fmt: skip


class Received:
    def __init__(self) -> None:
        self.pids: list[tuple[int, int]] = []

    async def __call__(self, pid: int, start: int) -> None:
        self.pids.append((pid, start))


async def test_words_are_filled_in_and_no_secret_is_in_the_environment(tmp_path: Path) -> None:
    script = 'echo "$@"; env'
    hands = commands(tmp_path, gpu_reset=("sh", "-c", script, "0", "-i={gpu}", "{node}", "{rule}"))
    received = Received()
    ended = await hands.repair(attempt("reset_gpu", "GPU-a"), received)
    assert ended.code == 0
    (pid, start) = received.pids[0]
    assert pid > 0 < start
    (output,) = (tmp_path / "out").iterdir()
    lines = output.read_text().splitlines()
    assert lines[0] == "-i=GPU-a n1 xid.79"
    assert {"NODEAGENT_GPU=GPU-a", "NODEAGENT_NODE=n1", "NODEAGENT_REPAIR=reset_gpu", "HOME=/root"} <= set(lines)
    assert not any("secret" in line for line in lines)
    assert filled(["x{y}", "--gpu={gpu}"], ["a", "b"], {"y": "z"}) == ["xz", "--gpu=a", "--gpu=b"]
    assert filled(["--all", "--gpu={gpu}"], [], {}) == ["--all"]


async def test_how_it_ended_is_reported_with_its_last_words(tmp_path: Path) -> None:
    hands = commands(tmp_path, reboot=("sh", "-c", "echo no way; exit 3"), service=("sh", "-c", "kill -9 $$"))
    ended = await hands.repair(attempt(), Received())
    assert (ended.code, ended.text) == (3, "exit code 3: no way")
    assert (await hands.repair(attempt("service"), Received())).code == 137
    missing = await commands(tmp_path, reboot=("/no/such/thing",)).repair(attempt(), Received())
    assert (missing.code, missing.text) == (127, "/no/such/thing cannot be started: No such file or directory")


async def test_past_its_deadline_all_of_it_is_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hands = commands(tmp_path, reboot=("sh", "-c", f"sleep 600 & echo $! > {child}; wait"), deadline=5)
    ended = await hands.repair(attempt(), Received())
    assert (ended.code, ended.text) == (None, "did not end within 5 s")
    async with asyncio.timeout(10):
        while is_running(int(child.read_text())):  # noqa: ASYNC110  # nobody tells of another's child
            await asyncio.sleep(0.02)


async def test_a_verify_run_sees_its_gpus_alone_and_says_what_failed(tmp_path: Path) -> None:
    answer = {
        "passed": False,
        "checks": [
            {"name": "gemm", "gpu": 0, "passed": False, "why": "wrong sums"},
            {"name": "copy", "gpu": 0, "passed": True, "why": ""},
        ],
    }
    script = f"echo '{json.dumps(answer)}'; exit 1"
    failed = await commands(tmp_path, verify=("sh", "-c", script)).verify(["GPU-a"])
    assert (failed.code, failed.text) == (FAILED, "gemm: wrong sums")
    for broken, code in (("raise SystemError", 1), ("import sys; sys.exit(3)", 3), ("import os; os.abort()", 134)):
        ended = await commands(tmp_path, verify=(sys.executable, "-c", broken)).verify(["GPU-a"])
        assert ended.code == code, "a run that is broken itself says nothing of the hardware; one that says 3 does"
    seen = commands(tmp_path, verify=("sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-all}"))
    assert (await seen.verify(["GPU-a", "GPU-b"])).text == "exit code 0: GPU-a,GPU-b"
    assert (await seen.verify([])).text == "exit code 0: all"
    assert failed_checks(f"a warning\n{json.dumps(answer, indent=1)}\ntrailing") == "gemm: wrong sums"
    assert [failed_checks(text) for text in ("", "{", '{"checks": 1}', "no", '{"checks": [{}]}')] == [""] * 5


async def test_the_agents_own_folder_of_programs_is_found(tmp_path: Path) -> None:
    python = Path(sys.executable).name
    assert (await commands(tmp_path, reboot=(python, "-c", "pass")).repair(attempt(), Received())).code == 0


async def test_few_outputs_are_kept(tmp_path: Path) -> None:
    hands = commands(tmp_path, reboot=("true",))
    for _ in range(MOST_OUTPUTS + 3):
        await hands.repair(attempt(), Received())
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {f"{i}-reboot.log" for i in range(4, MOST_OUTPUTS + 4)}


async def test_a_command_that_an_earlier_start_left_is_waited_for_and_killed_in_the_end(tmp_path: Path) -> None:
    hands = commands(tmp_path, reboot=("true",))
    left = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    begun = start_time(left.pid)
    assert begun is not None
    await hands.outlived(attempt(pid=left.pid, start=begun + 1), 60.0)
    assert left.returncode is None, "it is another process of that number"
    with few_files(0):
        await hands.outlived(attempt(pid=left.pid, start=begun), 0.1)
    assert left.returncode is None, "nobody could look which it is"
    await hands.outlived(attempt(pid=left.pid, start=begun), 0.1)
    assert await left.wait() == -9
    await hands.outlived(attempt(), 60.0)
    await hands.outlived(attempt(pid=left.pid, start=begun), 60.0)


async def test_whatever_else_lies_in_its_folder_or_is_taken_from_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("saved.log", "-reboot.log", "9x-reboot.log", "7-reboot.log"):
        (tmp_path / "out" / name).touch()
    hands = commands(tmp_path, reboot=("sh", "-c", f"rm {tmp_path / 'out' / '8-reboot.log'}; exit 4"))
    ended = await hands.repair(attempt(), Received())
    assert (ended.code, ended.text) == (4, "exit code 4")
