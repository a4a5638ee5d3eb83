"""`hosts --format mpi` of a real cluster, read by Open MPI's own `mpirun`. Skipped where it is not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from tests.e2e.support import Cluster

pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.frameworks, pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: install openmpi-bin"),
]  # fmt: skip
NODES = 2
ROOT_TOO = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_mpirun_starts_as_many_processes_as_the_job_has_workers(calm: Cluster) -> None:
    hosts = calm.work / "hosts"

    def ranks() -> list[str]:
        hosts.write_text(calm.ctl("hosts", "mpi", "--format", "mpi").stdout)
        each = ["sh", "-c", "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE"]
        done = subprocess.run(
            ["mpirun", "--hostfile", str(hosts), *each],
            env=os.environ | ROOT_TOO, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    job = {"name": "mpi", "command": ["sleep", "600"], "nodes": "1:2", "workers_per_node": 2, "grace": "1s"}
    calm.submit(json.dumps(job))
    calm.until_running("mpi", 2)
    assert ranks() == ["0 of 4", "1 of 4", "2 of 4", "3 of 4"], hosts.read_text()
    calm.ctl("scale", "mpi", "1")
    calm.until_running("mpi", 1)
    assert ranks() == ["0 of 2", "1 of 2"], hosts.read_text()
