"""What odd files, long texts and lost answers do to a shim: it goes on, and says what it found."""

from __future__ import annotations

from pathlib import Path

from nodeagent.pods.folder import state_folder
from tests.integration.shim_support import UID, make_spec, open_bench, shim_with


async def test_files_of_any_name_where_the_records_are_do_not_hinder_a_start(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, "main.GENERATIONS_KEPT = 1")) as bench:
        await bench.ready(make_spec(("true",), tmp_path))
        await bench.run()
        state = state_folder(tmp_path / "state", UID)
        for name in ("exits/gfoo-r1.json", "errors/g\N{SUPERSCRIPT TWO}-r1.json"):
            (state / name).touch()
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
        assert bench.output() == ["80000"]


async def test_an_environment_that_is_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("BIG=" + "x" * 5000 + "\n")
    async with open_bench(tmp_path, shim_with(tmp_path, "prepare.MOST_FOUND = 4096")) as bench:
        status = await bench.ready(make_spec(("true",), tmp_path, env_file="e"))
        assert status.phase == "unfit"
        assert status.reason.startswith("the job's environment is too long")
