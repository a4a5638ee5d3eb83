"""What odd files, long texts and lost answers do to a shim: it goes on, and says what it found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nodeagent.pods.folder import state_folder
from tests.integration.shim_support import UID, make_spec, open_bench, shim_with, token


async def test_files_of_any_name_where_the_error_files_are_do_not_hinder_a_start(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, "main.GENERATIONS_KEPT = 1")) as bench:
        await bench.ready(make_spec(("true",), tmp_path))
        await bench.run()
        state = state_folder(tmp_path / "state", UID)
        for name in ("gfoo-r1.json", "g\N{SUPERSCRIPT TWO}-r1.json"):
            (state / "errors" / name).touch()
        (state / "errors" / "g1-r1.json").mkdir()
        (bench.logs / "g\N{SUPERSCRIPT TWO}").mkdir()
        for number in (2, 3):
            assert [end.code for end in (await bench.run(number)).exits] == [0]


async def test_an_env_file_longer_than_a_pipe_holds_is_read(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("".join(f"BIG{n}={'x' * 80_000}\n" for n in range(2)))
    command = ("sh", "-c", "echo ${#BIG1}")
    async with open_bench(tmp_path, shim_with(tmp_path, "prepare.CHECK_BOUND = 5.0")) as bench:
        status = await bench.ready(make_spec(command, tmp_path, env_file="e"))
        assert (status.phase, status.reason) == ("ready", "")
        await bench.run()
        await bench.printed("80000")


async def test_an_environment_that_is_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("BIG=" + "x" * 5000 + "\n")
    async with open_bench(tmp_path, shim_with(tmp_path, "prepare.MOST_FOUND = 4096")) as bench:
        status = await bench.ready(make_spec(("true",), tmp_path, env_file="e"))
        assert status.phase == "unfit"
        assert status.reason.startswith("the job's environment is too long")


@pytest.mark.parametrize("left", ["", "\0" * 40])
async def test_what_a_power_cut_leaves_of_the_started_generation_counts_as_the_promised_one(
    tmp_path: Path, left: str
) -> None:
    async with open_bench(tmp_path) as bench:
        spec = make_spec(("sh", "-c", "echo once >> started"), tmp_path)
        status = await bench.ready(spec)
        await bench.run()
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGKILL)
        await bench.until(lambda s: s.phase == "gone")
        (state_folder(tmp_path / "state", UID) / "started.json").write_text(left)
        status = await bench.ready(spec)
        assert (status.phase, status.highest) == ("ready", token(1))
        bench.host.start(UID, bench.order(1))
        assert [end.code for end in (await bench.run(2)).exits] == [0]
        assert (tmp_path / "started").read_text() == "once\nonce\n", "not generation 1 again"
