"""The end of a worker that nobody can tell: it is reported all the same."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from nodeagent.shim.exits import LOST
from tests.integration.shim_support import make_spec, open_bench, shim_with

ANSWER_LOST = """
real = client.ForkServer._receive
def receive(self, message):
    if message["event"] != "reaped" or self.pid is None:
        return real(self, message)
    if {forged}:
        return real(self, message | {{"status": {forged}}})
    self.kill()
    self._unlink()
    return bool
client.ForkServer._receive = receive
"""


async def lost(folder: Path, change: str, preload: tuple[str, ...] = ()) -> list[tuple[int | None, str]]:
    """A worker ends well; what is reported of it."""
    (folder / "t.py").write_text("print('up', flush=True)")
    (folder / "quiet.py").write_text("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")
    async with open_bench(folder, shim_with(folder, change)) as bench:
        status = await bench.ready(make_spec((sys.executable, "t.py"), folder, preload=preload))
        assert status.phase == "ready" and status.fork_server_pid is not None
        status = await bench.run()
        return [(end.signal, end.error) for end in status.exits]


async def test_a_worker_whose_fork_server_dies_before_it_answers_has_ended(tmp_path: Path) -> None:
    assert await lost(tmp_path, ANSWER_LOST.format(forged=0)) == [(signal.SIGKILL, LOST)]


@pytest.mark.parametrize("forged", [0x7F, 1 << 40, "'x'"])
async def test_a_worker_of_which_its_fork_server_says_nonsense_has_ended(tmp_path: Path, forged: object) -> None:
    assert await lost(tmp_path, ANSWER_LOST.format(forged=forged)) == [(signal.SIGKILL, LOST)]


async def test_a_worker_that_nobody_reaps_for_a_module_of_the_job_has_ended(tmp_path: Path) -> None:
    assert await lost(tmp_path, "exits.REAP_BOUND = 1.0", ("quiet",)) == [(signal.SIGKILL, LOST)]
