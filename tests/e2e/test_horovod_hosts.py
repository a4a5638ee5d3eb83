"""examples/horovod/discover.sh on a real cluster, behind Horovod's own elastic driver.

Its runner is plain Python, and `make frameworks` installs it without Horovod's core, so the driver's workers are
threads that wait. Skipped where it is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import ROOT, TOOL, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.frameworks, pytest.mark.timeout(300)]
NODES = 2
PYTHON = Path(os.environ.get("NODEAGENT_FRAMEWORKS", ROOT / ".frameworks")) / "horovod" / "bin" / "python"
DRIVER = """
import sys, time
from horovod.runner.elastic.discovery import HostDiscoveryScript
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.http.http_server import RendezvousServer

def worker(slot, events):
    line = f"worker {slot.rank} of {slot.size} on {slot.hostname}\\n"
    print(line, end="", flush=True)  # one write: the workers are threads, and print makes two
    events[0].wait()
    return 0, time.time()

if __name__ == "__main__":
    rendezvous = RendezvousServer()
    rendezvous.start()
    driver = ElasticDriver(rendezvous, HostDiscoveryScript(sys.argv[1], 1), min_num_proc=1, max_num_proc=4, timeout=120)
    driver.start(4, worker)
    while True:
        slots = driver.wait_for_available_slots(1).count_available_slots()
        if slots != driver.world_size():
            driver.resume()  # as its workers have it do, once they all have left their training
            print(f"resumes with {driver.world_size()}", flush=True)
        time.sleep(0.2)
"""


def test_horovods_driver_sees_each_change(calm: Cluster) -> None:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON} (make frameworks)")
    tool, driver = calm.work / "nodeagentctl", calm.work / "driver.py"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{TOOL}" "$@"\n')
    tool.chmod(0o755)
    driver.write_text(DRIVER)
    job = {"name": "horovod", "command": ["sleep", "600"], "nodes": "1:2", "workers_per_node": 2, "grace": "1s"}
    calm.submit(json.dumps(job))
    calm.until_running("horovod", 2)

    seen = calm.work / "seen"
    with seen.open("w") as out:
        asks = subprocess.Popen(
            [str(PYTHON), str(driver), str(ROOT / "examples" / "horovod" / "discover.sh")], stdout=out, stderr=out,
            env=calm.environ | {"NODEAGENTCTL": str(tool)}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:

        def until_it_says(*lines: str) -> None:
            calm.until(lambda: set(lines) <= set(seen.read_text().splitlines()), 30, f"Horovod's driver says {lines}")

        until_it_says(*(f"worker {rank} of 4 on 127.0.0.1" for rank in range(4)))  # an address that two nodes share
        calm.ctl("scale", "horovod", "1")
        until_it_says("resumes with 2")
        calm.ctl("scale", "horovod", "2")
        until_it_says("resumes with 4")
        calm.ctl("stop", "horovod")
        calm.until(lambda: "Exit code: 6" in seen.read_text(), 30, "no hosts, by exit code")
        assert asks.poll() is None, "which it takes for a moment's trouble"
    finally:
        asks.kill()
        asks.wait()
        print(seen.read_text())
