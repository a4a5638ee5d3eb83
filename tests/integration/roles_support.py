"""A pod with several roles, run by a real shim: for the tests of what it does with each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nodeagent.model.jobspec import JobSpec, Nodes, Ready, Role
from nodeagent.pods.base import PodStatus, StartOrder
from tests.integration.shim_support import UID, Bench, make_spec, token

SERVER = """
import os, socket, time
while not os.path.exists("listen"): time.sleep(0.01)
server = socket.create_server(("127.0.0.1", int(os.environ["NODEAGENT_PORT"])))
time.sleep(60)
"""
TRAINER = """
import json, os
print(sorted(json.load(open(os.environ["NODEAGENT_ROLES_FILE"]))))
"""


def spec(folder: Path, ready: Ready | None, fork_server: bool = False) -> JobSpec:
    (folder / "server.py").write_text(SERVER)
    (folder / "trainer.py").write_text(TRAINER)
    one = Nodes(min=1, max=1, target=1)
    roles = (
        Role(name="server", command=(sys.executable, "server.py"), nodes=one, ready=ready),
        Role(name="trainer", command=(sys.executable, "trainer.py"), nodes=one, after=("server",)),
    )
    base = make_spec((sys.executable, "server.py"), folder, fork_server=fork_server)
    return base.model_copy(update={"roles": roles, "completes": "trainer"})


async def begin(
    bench: Bench, job: JobSpec, number: int = 1, places: tuple[str, ...] = ("server.0", "trainer.0")
) -> PodStatus:
    """Promise and start a generation with a worker for each of these places."""
    if number == 1:
        await bench.ready(job)
    needs = len(places) + 1
    bench.host.promise(UID, token(number), False, needs)
    held = await bench.until(lambda s: s.highest == token(number) and len(s.ports) == needs)
    ports = [{"NODEAGENT_PORT": str(port)} for port in held.ports[: len(places)]]
    plain = bench.order(number, tuple(ports))
    order = plain.model_dump() | {"places": places, "roles_file": json.dumps({"server": []})}
    bench.host.start(UID, StartOrder.model_validate(order))
    return await bench.until(lambda s: s.generation == token(number) and s.workers and s.workers[0].pid is not None)
