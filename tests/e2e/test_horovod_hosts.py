"""examples/horovod/discover.sh on a real cluster, asked by the classes that Horovod's elastic driver asks with.

They are plain Python of Horovod's source (``.frameworks/horovod``, or in ``NODEAGENT_FRAMEWORKS``: an unpacked
horovod-0.28.1); its core is not needed. Skipped where they are not.
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
SOURCE = Path(os.environ.get("NODEAGENT_FRAMEWORKS", ROOT / ".frameworks")) / "horovod"
DRIVER = """
import json, sys, time
from horovod.runner.elastic.discovery import HostDiscoveryScript, HostManager
if __name__ == "__main__":
    manager, end = HostManager(HostDiscoveryScript(sys.argv[1], 1)), time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if found := manager.update_available_hosts():
                print(json.dumps([found, manager.current_hosts.host_slots]), flush=True)
        except RuntimeError as error:
            print(json.dumps([str(error).rpartition("Exit code: ")[2], None]), flush=True)
        time.sleep(1)
"""
ADDED, REMOVED = 2, 1


def test_horovods_driver_sees_each_change(calm: Cluster) -> None:
    environ = calm.environ | {"PYTHONPATH": f"{SOURCE}:{ROOT}"}
    look = [sys.executable, "-c", "import horovod.runner.elastic.discovery"]
    if subprocess.run(look, env=environ, capture_output=True, timeout=60).returncode != 0:
        pytest.skip(f"Horovod's runner cannot be imported from {SOURCE}")
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
            [sys.executable, str(driver), str(ROOT / "examples" / "horovod" / "discover.sh")], stdout=out,
            env=environ | {"NODEAGENTCTL": str(tool)}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:

        def saw(kind: int, slots: int) -> bool:
            return any(json.loads(line) == [kind, {"127.0.0.1": slots}] for line in seen.read_text().splitlines())

        calm.until(lambda: saw(ADDED, 4), 30, "two nodes of two workers, which share an address here")
        calm.ctl("scale", "horovod", "1")
        calm.until(lambda: saw(REMOVED, 2), 30, "a node less")
        calm.ctl("stop", "horovod")
        calm.until(lambda: '["6", null]' in seen.read_text(), 30, "no hosts, by exit code")
    finally:
        asks.kill()
        asks.wait()
