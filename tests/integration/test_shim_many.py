"""A pod of a thousand workers, as many as a job file may ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nodeagent.spec.jobvalues import MAX_WORKERS
from tests.integration.shim_support import UID, make_spec, open_bench, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def test_all_workers_fail_with_long_last_words_and_the_agent_reads_it(tmp_path: Path) -> None:
    words = ("sh", "-c", "for i in $(seq 40); do printf '中%.0s' $(seq 120) >&2; echo >&2; done; exit 3")
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(words, tmp_path, workers=MAX_WORKERS))
        status = await bench.run(1, ({},) * MAX_WORKERS, bound=120)
        assert len(status.exits) == MAX_WORKERS
        assert {end.code for end in status.exits} == {3}
        assert status.exits[0].error.count("中") > 10 * status.exits[-1].error.count("中") > 0
        await bench.run_another(2)


async def test_connections_of_workers_do_not_keep_the_agent_out(tmp_path: Path) -> None:
    text = """
import os, socket, time
kept = []
for _ in range(5000):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].connect(os.environ["NODEAGENT_SOCKET"])
print("up", flush=True)
time.sleep(600)
"""
    (tmp_path / "t.py").write_text(text)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((sys.executable, "t.py"), tmp_path, limits={"nofile": 8192}))
        await bench.running()
        await bench.output_line("up")
        await bench.host.close()
        bench.host = bench.new_host()
        await bench.host.adopt()
        await wait_for(lambda: bench.host.connected(UID))
        bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert status.exits[0].stopped
