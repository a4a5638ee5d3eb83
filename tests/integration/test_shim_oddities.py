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
